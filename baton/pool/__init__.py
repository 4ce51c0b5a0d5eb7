"""The KV pool: host memory beside an engine that keeps what the engine's own cache forgets (`docs/kv-pool.md`)."""
