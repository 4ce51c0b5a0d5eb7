"""The gateway in tests: what acts behind it, the stage with a real one, and one attempt's machine by itself."""
