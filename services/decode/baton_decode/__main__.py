"""`python -m baton_decode`: a worker that pulls prompts' KV and generates."""

from __future__ import annotations

from baton.messages.workers import Role
from baton.worker.process import run_worker
from baton_decode.config import DecodeSettings

if __name__ == "__main__":
    run_worker(Role.DECODE, DecodeSettings)
