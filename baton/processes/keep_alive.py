"""Keeps children alive: starts them again when they end or hang, with back-off only after starts that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from subprocess import SubprocessError
from typing import Final

from baton.processes.child import Child, describe_exit

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


class StartFailed(Exception):
    """A child ended before it was ready, with `status`; None: it was not ready in time."""

    def __init__(self, child: Child, status: int | None) -> None:
        super().__init__(child.name)
        self.child = child
        self.status = status


async def until_ready(children: Sequence[Child], note: Callable[[float], None] = lambda _waited_s: None) -> None:
    """Wait until all children, which were started, are ready; `note` gets the time waited. Raises StartFailed."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    timeout_s = max(child.program.start_timeout_s for child in children)
    ends = {asyncio.create_task(child.wait()): child for child in children}
    try:
        while not all(await asyncio.gather(*(child.program.ready() for child in children))):
            await asyncio.wait(ends, timeout=START_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            for ended, child in ends.items():
                if ended.done():
                    raise StartFailed(child, ended.result())
            waited_s = loop.time() - started_s
            if waited_s > timeout_s:
                raise StartFailed(children[-1], None)
            note(waited_s)
    finally:
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


async def keep_alive(child: Child, tell: Callable[[str], None], policy: RestartPolicy | None = None) -> None:
    """Start `child` again whenever it ends or hangs, until cancelled. The child must be ready."""
    policy = policy or RestartPolicy()
    ready, wait_s = True, 0.0
    while True:
        status, was_ready = await _until_end(child, tell, policy, ready=ready)
        wait_s = policy.wait_s(wait_s, was_ready=was_ready)
        when = f" in {wait_s:g} s" if wait_s else ""
        log_path = child.program.log_path
        where = "" if log_path is None else f" (log: {log_path})"
        tell(f"{child.name} {describe_exit(status)}; starting it again{when}{where}")
        await asyncio.sleep(wait_s)
        # First end what it left behind in its process group.
        child.kill()
        while (error := _start(child)) is not None:
            wait_s = policy.wait_s(wait_s, was_ready=False)
            tell(f"{child.name} cannot be started: {error}; trying again in {wait_s:g} s")
            await asyncio.sleep(wait_s)
        ready = False


def _start(child: Child) -> Exception | None:
    """Start a child and return None, or why that is impossible now: no memory, no free descriptor, a full disk."""
    try:
        child.start()
    except (OSError, SubprocessError) as error:
        return error
    return None


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
                    await asyncio.wait((ended,))
            elif loop.time() > give_up_at_s:
                tell(f"{child.name} was not ready within {child.program.start_timeout_s:g} s: ending it")
                child.kill()
                await asyncio.wait((ended,))
            await asyncio.wait((ended,), timeout=policy.alive_interval_s if ready else START_INTERVAL_S)
        return ended.result(), ready
    finally:
        ended.cancel()
