"""`python -m baton_prefill`: a worker that computes prompts and holds their KV for decode workers."""

from __future__ import annotations

from baton.messages.workers import Role
from baton.worker.process import run_worker
from baton_prefill.config import PrefillSettings

if __name__ == "__main__":
    run_worker(Role.PREFILL, PrefillSettings)
