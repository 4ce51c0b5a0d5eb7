"""The decode worker's deployable: `baton.worker` in the role of decode."""
