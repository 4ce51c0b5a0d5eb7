"""The gateway: OpenAI's HTTP surface in front, attempts on workers behind."""
