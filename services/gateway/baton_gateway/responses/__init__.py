"""OpenAI's Responses API: the chat path behind it, and the store of responses that outlive their connection."""
