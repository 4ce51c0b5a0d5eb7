"""A real engine in its own Python environment, for benchmarks and for the tests with engines."""
