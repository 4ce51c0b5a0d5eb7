"""A real engine in the Python environment that has it, for benchmarks and for the tests with engines."""
