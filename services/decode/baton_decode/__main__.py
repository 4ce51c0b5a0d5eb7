"""`python -m baton_decode`: a worker that pulls prompts' KV and generates."""

from __future__ import annotations

from functools import partial

from baton import config
from baton.messages import Role
from baton.worker.process import run_worker
from baton_decode.config import DecodeSettings

if __name__ == "__main__":
    config.run(partial(run_worker, Role.DECODE), DecodeSettings, service="decode")
