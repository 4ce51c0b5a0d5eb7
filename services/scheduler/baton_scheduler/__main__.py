"""`python -m baton_scheduler`: answers where an attempt runs."""

from __future__ import annotations

from baton.node.service import Process, run
from baton_scheduler.config import SchedulerSettings
from baton_scheduler.service import SchedulerService


async def main(settings: SchedulerSettings, process: Process) -> None:
    async with process.join("scheduler", seed=settings.seed) as node:
        await process.serve(SchedulerService(settings, node))


if __name__ == "__main__":
    run("scheduler", SchedulerSettings, main)
