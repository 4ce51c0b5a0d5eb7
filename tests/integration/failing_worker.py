"""A decode worker that stands still while a file exists, and dies of a prompt that begins with a certain word.

Started as `python -m tests.integration.failing_worker`, with the flags of a decode worker. The file is
`FAILING_WORKER_FOLDER/NAME.stuck`, the prompt one that begins with the tokens `DEADLY`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Final

from baton_decode.config import DecodeSettings

from baton.engines.simulated.core import EngineCore
from baton.engines.simulated.scheduler import Step
from baton.messages.workers import Role
from baton.worker.process import run_worker

FOLDER: Final = "FAILING_WORKER_FOLDER"
DEADLY: Final = [7, 11, 13, 17, 19, 23]
POLL_S: Final = 0.05

_compute: Final = EngineCore._compute  # pyright: ignore[reportPrivateUsage]


def stuck_file(folder: Path, worker: str) -> Path:
    return folder / f"{worker}.stuck"


async def _fail_or_compute(self: EngineCore, step: Step) -> None:
    if any(chunk.attempt.tokens[: len(DEADLY)] == DEADLY for chunk in step.chunks):
        os.kill(os.getpid(), signal.SIGKILL)
    stuck = stuck_file(Path(os.environ[FOLDER]), sys.argv[sys.argv.index("--worker") + 1])
    while stuck.exists():  # noqa: ASYNC110 - another process makes it.
        await asyncio.sleep(POLL_S)
    await _compute(self, step)


if __name__ == "__main__":
    EngineCore._compute = _fail_or_compute  # pyright: ignore[reportPrivateUsage]
    run_worker(Role.DECODE, DecodeSettings)
