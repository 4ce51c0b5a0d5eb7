"""Random faults at the processes of a `baton up`: which process, how, and when is decided by a seed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import PurePath
from random import Random

import psutil

from tests.faults.record import Fault

STOP_S_MIN = 0.2


def victim_names(prefill: int, decode: int) -> tuple[str, ...]:
    """Return all processes of a deployment but the gateway, with which its clients' connections would end."""
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


def find(launcher_pid: int, victim: str) -> psutil.Process | None:
    """Return the process of that name; None while it is being started again."""
    for child in psutil.Process(launcher_pid).children():
        with suppress(psutil.NoSuchProcess):
            if _name(child.cmdline()) == victim and child.status() != psutil.STATUS_ZOMBIE:
                return child
    return None


def _name(command: Sequence[str]) -> str:
    if "--worker" in command:
        return command[command.index("--worker") + 1]
    for word in command[:3]:
        base = PurePath(word).name
        if base in ("nats-server", "redis-server"):
            return base.removesuffix("-server")
        if word.startswith("baton_"):
            return word.removeprefix("baton_")
    return ""


async def strike(fault: Fault, launcher_pid: int) -> bool:
    """Do it, and undo it where it is a pause; False: the process is not there."""
    process = find(launcher_pid, fault.victim)
    if process is None:
        return False
    with suppress(psutil.NoSuchProcess):
        if fault.how == "kill":
            process.kill()
        else:
            process.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(fault.lasts_s)
            finally:
                process.send_signal(signal.SIGCONT)
    return True


async def strike_all(
    faults: Iterator[Fault], launcher_pid: int, struck: list[Fault], now_s: Callable[[], float]
) -> None:
    """Do all faults at their times; those that hit something are noted in `struck` as they begin."""
    for fault in faults:
        await asyncio.sleep(max(0.0, fault.at_s - now_s()))
        struck.append(fault)
        if not await strike(fault, launcher_pid):
            struck.remove(fault)
