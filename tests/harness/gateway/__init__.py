"""The gateway in tests: actors behind it, a stage with a real gateway, and one attempt's state machine alone."""
