"""The simulated engine: an engine's scheduler, cache and KV bytes, without a model."""
