"""Asks every service over the bus, without knowing how many there are."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from baton import subjects
from baton.bus import Bus, Delivery
from baton.clock import SystemClock
from baton.errors import InvalidRequest, Unavailable
from baton.messages.codec import AnyMessage
from baton.messages.workers import Goodbye, Heartbeat
from baton.node.membership import Workers

NATS_URL_FILE: Final = "nats-url"
"""File with the bus's address in the run folder of a `baton up`."""
REDIS_URL_FILE: Final = "redis-url"
"""The same, of Redis."""
CONNECT_TIMEOUT_S: Final = 3.0
FIRST_ANSWER_S: Final = 3.0
"""Time for the first answer to arrive from a busy machine."""
QUIET_S: Final = 0.25
"""Silence after which all services have answered: they answer at once."""
ANSWERS_S: Final = 5.0
ANSWERS_MAX: Final = 2000
FIRST_HEARTBEAT_S: Final = 3.0
"""Time for the first heartbeat to arrive from a busy machine."""
HEARTBEATS_S: Final = 0.6
"""Two heartbeats: after this time every live worker is known."""

Answer = TypeVar("Answer")


def find_nats_url(given: str, environ: Mapping[str, str], run_folder: Path) -> str:
    """Return the bus to ask: `given`, or that of the `baton up` that runs here. Raises InvalidRequest."""
    if url := given or environ.get("NATS_URL", ""):
        return url
    return _read_url(run_folder / NATS_URL_FILE, "the message bus with --nats-url")


def find_redis_url(given: str, environ: Mapping[str, str], run_folder: Path) -> str:
    """Return the Redis of a deployment: `given`, or that of the `baton up` that runs here. Raises InvalidRequest."""
    if url := given or environ.get("REDIS_URL", ""):
        return url
    return _read_url(run_folder / REDIS_URL_FILE, "Redis with --redis-url")


def _read_url(file: Path, otherwise: str) -> str:
    try:
        return file.read_text().strip()
    except OSError as error:
        raise InvalidRequest(
            f"no `baton up` runs in {file.parent}: name its port with --port, or {otherwise}"
        ) from error


async def ask_all(bus: Bus, subject: str, query: AnyMessage, answer_to: str, kind: type[Answer]) -> list[Answer]:
    """Send `query`, and return all answers of this kind that come in time."""
    answers: list[Answer] = []
    came = asyncio.Event()

    async def take(delivery: Delivery) -> None:
        if isinstance(delivery.message, kind) and len(answers) < ANSWERS_MAX:
            answers.append(delivery.message)
            came.set()

    subscription = await bus.subscribe(answer_to, take)
    try:
        await bus.publish(subject, query)
        async with asyncio.timeout(ANSWERS_S):
            async with asyncio.timeout(FIRST_ANSWER_S) as quiet:
                while True:
                    await came.wait()
                    came.clear()
                    quiet.reschedule(asyncio.get_running_loop().time() + QUIET_S)
    except TimeoutError:
        pass  # The usual end: all services have answered.
    finally:
        await subscription.unsubscribe()
    return answers


async def hear_workers(bus: Bus) -> list[Heartbeat]:
    """Return the newest heartbeat of each live worker. Raises Unavailable if there is none."""
    workers, clock = Workers(), SystemClock()
    first = asyncio.Event()

    async def take(delivery: Delivery) -> None:
        if isinstance(delivery.message, Heartbeat | Goodbye):
            workers.take(delivery.message, clock.now_s())
            first.set()

    subscription = await bus.subscribe(subjects.HEARTBEAT, take)
    with suppress(TimeoutError):
        await asyncio.wait_for(first.wait(), FIRST_HEARTBEAT_S)
        await asyncio.sleep(HEARTBEATS_S)
    await subscription.unsubscribe()
    if not (beats := list(workers.beats())):
        raise Unavailable("no worker sends heartbeats: does Baton run on this message bus?")
    return beats


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table; none where there are no rows."""
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        yield "    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
