"""Parsing of answers: a model's text split into reasoning, content and tool calls."""
