"""The index in tests: a worker as the index sees it, its spill alone, and its services with real NATS and Redis."""
