"""Anthropic's Messages: bodies, their translation into chats, answers and errors in Anthropic's form."""
