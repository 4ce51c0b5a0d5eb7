"""SGLang behind the `Engine` protocol."""
