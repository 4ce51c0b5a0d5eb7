"""`baton trace`: the spans that the services keep of one request, asked over the bus, as a waterfall."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

import msgspec

from baton import subjects
from baton.bus import Bus, NatsBus
from baton.cli.asking import CONNECT_TIMEOUT_S, ask_all
from baton.cli.trace_tree import ServiceSpan, Tree, build_tree
from baton.cli.waterfall import Look, draw
from baton.errors import InvalidRequest, Unavailable
from baton.messages.traces import TracePage, TraceQuery

_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass(frozen=True, slots=True)
class Answers:
    """All services' answers about one name."""

    spans: tuple[ServiceSpan, ...]
    services: int
    left_out: int


def trace(name: str, *, nats_url: str, as_json: bool, look: Look) -> str:
    """Return the waterfall of a request, or its spans as JSON. Raises BatonError with one sentence."""
    name = check_name(name)
    return asyncio.run(_trace(name, nats_url, as_json=as_json, look=look))


def check_name(name: str) -> str:
    """Return the id by which services know a request: its client sent or received it. Raises InvalidRequest."""
    if not _ID.fullmatch(name):
        raise InvalidRequest(
            f"{name[:140]!r} is no request's id: take the x-request-id or the `id` of its answer, or a trace's id"
        )
    return name


async def _trace(name: str, nats_url: str, *, as_json: bool, look: Look) -> str:
    bus = await NatsBus.connect(nats_url, name="baton-trace", timeout_s=CONNECT_TIMEOUT_S)
    try:
        answers = await ask(bus, name)
        traces = sorted({span.record.trace for span in answers.spans}, key=lambda one: _begun_ns(answers, one))
        if not traces:
            raise InvalidRequest(_unknown(name, answers.services))
        # Only the gateway knows a request's own id; every service knows that of its trace.
        wanted = traces[-1]
        answers = await ask(bus, wanted)
    finally:
        await bus.close()
    tree = build_tree(answers.spans, wanted, now_ns=time.time_ns())
    return (
        _json(tree, answers) if as_json else "\n".join(draw(tree, look, left_out=answers.left_out, older=traces[:-1]))
    )


async def ask(bus: Bus, name: str) -> Answers:
    """Ask every service for its spans, and return all answers that come in time."""
    asker = uuid4().hex
    query = TraceQuery(id=name, asker=asker)
    pages = await ask_all(bus, subjects.TRACES, query, subjects.trace_answers(asker), TracePage)
    return Answers(
        spans=tuple(
            ServiceSpan(page.service, page.instance, page.host, record) for page in pages for record in page.spans
        ),
        services=len({page.instance for page in pages}),
        left_out=sum(page.left_out for page in pages),
    )


def _begun_ns(answers: Answers, trace: str) -> int:
    return min(span.record.start_ns for span in answers.spans if span.record.trace == trace)


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
            "service": node.span.service,
            "instance": node.span.instance,
            "host": node.span.host,
            "shift_ns": tree.shifts_ns.get(node.span.host, 0),
            **msgspec.to_builtins(node.span.record),
        }
        for node in tree.walk()
    ]
    content = {"trace": tree.trace, "left_out": answers.left_out, "spans": spans}
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()
