"""`baton trace`: what the services remember of one request, asked over the bus, as a waterfall."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

import msgspec

from baton import subjects
from baton.bus import Bus, Delivery, NatsBus
from baton.cli.trace_tree import Told, Tree, build_tree
from baton.cli.waterfall import Look, draw
from baton.errors import InvalidRequest, Unavailable
from baton.messages import TracePage, TraceQuery

NATS_URL_FILE: Final = "nats-url"
"""In the run folder of a `baton up`."""
CONNECT_TIMEOUT_S: Final = 3.0
FIRST_ANSWER_S: Final = 1.0
QUIET_S: Final = 0.25
"""Services answer at once and nobody knows how many there are: after this long without a word, all have."""
ANSWERS_S: Final = 3.0
PAGES_MAX: Final = 2000
_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass(frozen=True, slots=True)
class Answers:
    """What all services said about one name."""

    spans: tuple[Told, ...]
    services: int
    left_out: int


def trace(name: str, *, nats_url: str, as_json: bool, look: Look) -> str:
    """Return the waterfall of a request, or its spans as JSON. Raises BatonError, one sentence."""
    name = check_name(name)
    return asyncio.run(_trace(name, nats_url, as_json=as_json, look=look))


def check_name(name: str) -> str:
    """Return what services know a request by: what its client may send or has got. Raises InvalidRequest."""
    if not _ID.fullmatch(name):
        raise InvalidRequest(
            f"{name[:140]!r} is no request's id: take the x-request-id or the `id` of its answer, or a trace's id"
        )
    return name


def find_nats_url(given: str, environ: Mapping[str, str], run_folder: Path) -> str:
    """Return the bus to ask: the one given, or that of the `baton up` which runs here. Raises InvalidRequest."""
    if url := given or environ.get("NATS_URL", ""):
        return url
    try:
        return (run_folder / NATS_URL_FILE).read_text().strip()
    except OSError as error:
        raise InvalidRequest(
            f"no `baton up` runs in {run_folder}: name its port with --port, or the message bus with --nats-url"
        ) from error


async def _trace(name: str, nats_url: str, *, as_json: bool, look: Look) -> str:
    bus = await NatsBus.connect(nats_url, name="baton-trace", timeout_s=CONNECT_TIMEOUT_S)
    try:
        answers = await ask(bus, name)
        traces = sorted({told.record.trace for told in answers.spans}, key=lambda one: _begun_ns(answers, one))
        if not traces:
            raise InvalidRequest(_unknown(name, answers.services))
        # A request's own name is known at the gateway; that of its trace everywhere.
        wanted = traces[-1]
        told = await ask(bus, wanted)
    finally:
        await bus.close()
    tree = build_tree(told.spans, wanted, now_ns=time.time_ns())
    return _json(tree, told) if as_json else "\n".join(draw(tree, look, left_out=told.left_out, older=traces[:-1]))


async def ask(bus: Bus, name: str) -> Answers:
    """Ask every service what it remembers, and return all that comes in time."""
    asker = uuid4().hex
    pages: list[TracePage] = []
    came = asyncio.Event()

    async def take(delivery: Delivery) -> None:
        if isinstance(delivery.message, TracePage) and len(pages) < PAGES_MAX:
            pages.append(delivery.message)
            came.set()

    answers = await bus.subscribe(subjects.trace_answers(asker), take)
    try:
        await bus.publish(subjects.TRACES, TraceQuery(id=name, asker=asker))
        async with asyncio.timeout(ANSWERS_S):
            async with asyncio.timeout(FIRST_ANSWER_S) as quiet:
                while True:
                    await came.wait()
                    came.clear()
                    quiet.reschedule(asyncio.get_running_loop().time() + QUIET_S)
    except TimeoutError:
        pass  # The usual end: whoever had something to say has said it.
    finally:
        await answers.unsubscribe()
    return Answers(
        spans=tuple(Told(page.service, page.instance, page.host, record) for page in pages for record in page.spans),
        services=len({page.instance for page in pages}),
        left_out=sum(page.left_out for page in pages),
    )


def _begun_ns(answers: Answers, trace: str) -> int:
    return min(told.record.start_ns for told in answers.spans if told.record.trace == trace)


def _unknown(name: str, services: int) -> str:
    if not services:
        raise Unavailable("no service answered: does Baton run on this message bus?")
    return (
        f"none of the {services} services that answered knows {name}: a request is remembered for ten minutes, and for "
        "less under load"
    )


def _json(tree: Tree, answers: Answers) -> str:
    spans = [
        {
            "service": node.told.service,
            "instance": node.told.instance,
            "host": node.told.host,
            "shift_ns": tree.shifts_ns.get(node.told.host, 0),
            **msgspec.to_builtins(node.told.record),
        }
        for node in tree.walk()
    ]
    content = {"trace": tree.trace, "left_out": answers.left_out, "spans": spans}
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()
