"""The index in tests: a worker as it sees it, its spill by itself, and its services beside real NATS and Redis."""
