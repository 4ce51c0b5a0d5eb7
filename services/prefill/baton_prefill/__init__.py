"""The prefill worker: `baton.worker` in the prefill role."""
