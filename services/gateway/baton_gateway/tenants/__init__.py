"""Tenants: API keys and their records, limits per minute and usage of each key."""
