"""`baton explain`: why a request ran where it did and what became of it, read from the stream of decisions."""

from __future__ import annotations

import asyncio
import re
from typing import Final

import msgspec

from baton import subjects
from baton.bus import Bus, NatsBus
from baton.cli.asking import CONNECT_TIMEOUT_S
from baton.cli.explanation import Explanation, describe, draw
from baton.cli.trace import check_name
from baton.errors import InvalidRequest, Unavailable
from baton.messages.decisions import AttemptReport, Decision, NamedRequest

RECORDS_MAX: Final = 512
"""Records read of one request."""


def explain(name: str, *, nats_url: str, as_json: bool) -> str:
    """Return what was decided about a request, as text or as JSON. Raises BatonError with one sentence."""
    return asyncio.run(_explain(check_name(name), nats_url, as_json=as_json))


async def _explain(name: str, nats_url: str, *, as_json: bool) -> str:
    bus = await NatsBus.connect(nats_url, name="baton-explain", timeout_s=CONNECT_TIMEOUT_S)
    try:
        explanation = await look_up(bus, name)
    finally:
        await bus.close()
    if as_json:
        return msgspec.json.format(msgspec.json.encode(describe(explanation)), indent=2).decode()
    return "\n".join(draw(explanation))


async def look_up(bus: Bus, name: str) -> Explanation:
    """Return the records of a request, by the id of its answer or by the newest request of that `x-request-id`.

    Raises InvalidRequest if there are none, Unavailable if no decisions are kept at all.
    """
    # An answer's id is the request's, after a prefix for its kind.
    explanation = await _read(bus, re.split("[-_]", name)[-1])
    if not explanation.is_empty:
        return explanation
    named = await bus.read(subjects.DECISIONS_STREAM, subjects.request_name(name))
    if named is not None and isinstance(named.message, NamedRequest):
        explanation = await _read(bus, named.message.request)
        if not explanation.is_empty:
            return explanation
    raise await _unknown(bus, name)


async def _read(bus: Bus, request: str) -> Explanation:
    decisions: list[Decision] = []
    reports: list[AttemptReport] = []
    after = records = 0
    subject = subjects.decisions(request)
    while (record := await bus.read(subjects.DECISIONS_STREAM, subject, after=after)) is not None:
        if records == RECORDS_MAX:
            return Explanation(request, tuple(decisions), tuple(reports), is_cut=True)
        match record.message:
            case Decision() as decision:
                decisions.append(decision)
            case AttemptReport() as report:
                reports.append(report)
            case _:
                pass  # A record of a newer version.
        after, records = record.stream_sequence, records + 1
    return Explanation(request, tuple(decisions), tuple(reports))


async def _unknown(bus: Bus, name: str) -> InvalidRequest | Unavailable:
    kept = await bus.retention(subjects.DECISIONS_STREAM)
    if kept is None:
        return Unavailable("no decisions are kept on this message bus: does a scheduler run on it, and JetStream?")
    age = f"{kept.age_s_max / 3600:g} h" if kept.age_s_max >= 3600 else f"{kept.age_s_max:g} s"
    return InvalidRequest(
        f"no decision about {name} is kept: decisions are kept for {age}, and for less where they exceed "
        f"{kept.bytes_max / 1e6:.0f} MB"
    )
