"""The decode worker: `baton.worker` in the decode role."""
