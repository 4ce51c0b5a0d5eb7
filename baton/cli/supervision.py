"""Keeps children alive: starts them again when they end or hang, with back-off only after starts that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from baton.cli.processes import Child, describe_exit

START_INTERVAL_S: Final = 0.1
"""Interval of the probes of whether a starting child is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Back-off before a start that follows failed ones, and the limit of failed probes."""

    first_s: float = 0.5
    max_s: float = 10.0
    alive_interval_s: float = 1.0
    failed_probes_max: int = 10
    """Probes in a row that a child may fail. Counted, not timed: a pause of the launcher itself counts as one."""

    def wait_s(self, previous_s: float, *, was_ready: bool) -> float:
        """Return the back-off before the next start: doubling while starts fail, none after one that succeeded."""
        return 0.0 if was_ready else min(self.max_s, max(self.first_s, previous_s * 2))


async def keep_alive(child: Child, tell: Callable[[str], None], policy: RestartPolicy | None = None) -> None:
    """Start `child` again whenever it ends or hangs, until cancelled. The child must be ready."""
    policy = policy or RestartPolicy()
    ready, wait_s = True, 0.0
    while True:
        status, was_ready = await _until_end(child, tell, policy, ready=ready)
        wait_s = policy.wait_s(wait_s, was_ready=was_ready)
        when = f" in {wait_s:g} s" if wait_s else ""
        tell(f"{child.name} {describe_exit(status)}; starting it again{when} (log: {child.program.log_path})")
        await asyncio.sleep(wait_s)
        # First end what it left behind in its process group.
        child.kill()
        child.start()
        ready = False


async def _until_end(
    child: Child, tell: Callable[[str], None], policy: RestartPolicy, *, ready: bool
) -> tuple[int, bool]:
    """Wait for one process to end, kill it if it hangs; return its exit status and whether it was ready."""
    loop = asyncio.get_running_loop()
    give_up_at_s = loop.time() + child.program.start_timeout_s
    failed_probes = 0
    ended = asyncio.create_task(child.wait())
    try:
        while not ended.done():
            if await (child.program.alive if ready else child.program.ready)():
                if not ready:
                    tell(f"{child.name} is back")
                ready, failed_probes = True, 0
            elif ready:
                failed_probes += 1
                if failed_probes == policy.failed_probes_max:
                    tell(f"{child.name} runs but does not answer: ending it")
                    child.kill()
            elif loop.time() > give_up_at_s:
                tell(f"{child.name} was not ready within {child.program.start_timeout_s:g} s: ending it")
                child.kill()
            await asyncio.wait((ended,), timeout=policy.alive_interval_s if ready else START_INTERVAL_S)
        return ended.result(), ready
    finally:
        ended.cancel()
