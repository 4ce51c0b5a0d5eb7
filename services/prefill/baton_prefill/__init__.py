"""The prefill worker's deployable: `baton.worker` in the role of prefill."""
