"""What prefill and decode workers share: ledger, frames, KV events, canary, service."""
