"""Code shared by prefill and decode workers: ledger, frames, KV events, canary, service."""
