"""vLLM behind the `Engine` protocol."""
