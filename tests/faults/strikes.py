"""Random faults on the processes of a `baton up`. A seed decides the process, the kind and the time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import PurePath
from random import Random

import psutil

from tests.faults.record import Fault
from tests.harness.limits import HANG_S
from tests.harness.processes import command_line, runs

STOP_S_MIN = 0.2
FIND_INTERVAL_S = 0.05


def victim_names(prefill: int, decode: int) -> tuple[str, ...]:
    """Return all processes of a deployment except the gateway, whose end would break its clients' connections."""
    workers = [*(f"prefill-{number}" for number in range(prefill)), *(f"decode-{number}" for number in range(decode))]
    return ("nats", "redis", "kvindex", "scheduler", *workers)


def plan(names: Sequence[str], random: Random, *, every_s: float, until_s: float, stop_s_max: float) -> Iterator[Fault]:
    """Yield a fault every `every_s`."""
    at_s = every_s
    while at_s < until_s:
        victim, how = random.choice(names), random.choice(("kill", "stop"))
        lasts_s = random.uniform(STOP_S_MIN, stop_s_max) if how == "stop" else 0.0
        yield Fault(how=how, victim=victim, at_s=at_s, lasts_s=lasts_s)
        at_s += every_s


def plan_each(names: Sequence[str], random: Random, *, stop_s: float) -> list[Fault]:
    """Return a kill and a stop of every process, in random order, each as soon as the one before is over."""
    blows = list(product(("kill", "stop"), names))
    random.shuffle(blows)
    return [Fault(how=how, victim=victim, at_s=0.0, lasts_s=stop_s if how == "stop" else 0.0) for how, victim in blows]


def find(launcher_pid: int, victim: str) -> psutil.Process | None:
    """Return the process of that name; None while it restarts."""
    for child in psutil.Process(launcher_pid).children():
        if process_name(command_line(child)) == victim and runs(child):
            return child
    return None


def process_name(command: Sequence[str]) -> str:
    """Return the name in `victim_names` of the process with this command line; empty if there is none."""
    if "--worker" in command:
        return command[command.index("--worker") + 1]
    for word in command[:3]:
        # Redis appends its address to its name.
        base = PurePath(word.partition(" ")[0]).name
        if base in ("nats-server", "redis-server"):
            return base.removesuffix("-server")
        if word.startswith("baton_"):
            return word.removeprefix("baton_")
    return ""


async def _find_soon(launcher_pid: int, victim: str) -> psutil.Process:
    """Wait for the process of that name, which may be restarting, and return it."""
    async with asyncio.timeout(HANG_S):
        while (process := find(launcher_pid, victim)) is None:  # noqa: ASYNC110 - another process.
            await asyncio.sleep(FIND_INTERVAL_S)
    return process


async def strike(fault: Fault, process: psutil.Process) -> None:
    """Inject a fault, and resume the process after a pause."""
    with suppress(psutil.NoSuchProcess):
        if fault.how == "kill":
            process.kill()
        else:
            process.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.lasts_s)
            finally:
                process.send_signal(signal.SIGCONT)


async def strike_all(
    faults: Iterable[Fault],
    launcher_pid: int,
    struck: list[Fault],
    now_s: Callable[[], float],
    judge: Callable[[Fault], Coroutine[None, None, None]],
    *,
    is_patient: bool,
) -> None:
    """Inject all faults at their times, and append each to `struck` as it begins.

    `judge` runs after each of them: to its end if `is_patient`, else until the next fault begins.
    """
    running: list[asyncio.Task[None]] = []
    async with asyncio.TaskGroup() as judges:
        for fault in faults:
            await asyncio.sleep(max(0.0, fault.at_s - now_s()))
            process = await _find_soon(launcher_pid, fault.victim)
            for judging in running:
                judging.cancel()
            struck.append(replace(fault, at_s=now_s()))
            await strike(fault, process)
            running = [judges.create_task(judge(struck[-1]))]
            if is_patient:
                await asyncio.wait(running)
