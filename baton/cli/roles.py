"""`baton roles`: the workers' roles and loads, and a change of one worker's role."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from baton import subjects
from baton.bus import Bus, NatsBus
from baton.cli.asking import CONNECT_TIMEOUT_S, hear_workers, table
from baton.errors import Conflict, InvalidRequest, MalformedMessage
from baton.messages.base import Refused
from baton.messages.workers import ChangeRole, Heartbeat, Role, RoleChange

ANSWER_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Wish:
    """A worker and the role that it shall have."""

    worker: str
    role: Role


def roles(wish: Wish | None, *, nats_url: str, as_json: bool) -> str:
    """Return all workers' roles, or the result of a change, as text or as JSON. Raises BatonError with one sentence."""
    return asyncio.run(_roles(wish, nats_url, as_json))


def parse_wish(words: Sequence[str]) -> Wish | None:
    """Return the change that the command line asks for; None: only a list. Raises InvalidRequest."""
    match words:
        case []:
            return None
        case ["set", worker, role] if role in list(Role):
            return Wish(worker, Role(role))
        case _:
            raise InvalidRequest(f"{' '.join(words)!r} is none of: set WORKER prefill, set WORKER decode")


async def _roles(wish: Wish | None, nats_url: str, as_json: bool) -> str:
    bus = await NatsBus.connect(nats_url, name="baton-roles", timeout_s=CONNECT_TIMEOUT_S)
    try:
        beats = sorted(await hear_workers(bus), key=lambda beat: (beat.model, beat.role, beat.address.worker))
        if wish is None:
            return _as_json([describe(beat) for beat in beats]) if as_json else "\n".join(draw(beats))
        beat = pick(beats, wish)
        change = await _change(bus, beat, wish)
    finally:
        await bus.close()
    if as_json:
        return _as_json({"worker": wish.worker, "role": change.role, "role_epoch": change.role_epoch})
    if change.role_epoch == beat.address.role_epoch:
        return f"{wish.worker} is a {change.role} worker already"
    return f"{wish.worker} becomes a {change.role} worker once its attempts have ended"


def pick(beats: Sequence[Heartbeat], wish: Wish) -> Heartbeat:
    """Return the worker's heartbeat. Raises InvalidRequest if it is unknown, Conflict if it is needed in its role."""
    beat = next((beat for beat in beats if beat.address.worker == wish.worker), None)
    if beat is None:
        known = ", ".join(sorted(beat.address.worker for beat in beats))
        raise InvalidRequest(f"no worker {wish.worker!r} sends heartbeats, only these: {known}")
    others = [
        other
        for other in beats
        if other is not beat and (other.model, other.role) == (beat.model, beat.role) and not other.draining
    ]
    if beat.role is not wish.role and not others:
        raise Conflict(f"{wish.worker} is the last {beat.role} worker of the model {beat.model}")
    return beat


async def _change(bus: Bus, beat: Heartbeat, wish: Wish) -> RoleChange:
    order = ChangeRole(generation=beat.address.generation, role_epoch=beat.address.role_epoch, role=wish.role)
    answer = await bus.request(subjects.role(wish.worker), order, timeout_s=ANSWER_TIMEOUT_S)
    match answer:
        case RoleChange():
            return answer
        case Refused(error=report):
            raise report.to_error()
        case _:
            raise MalformedMessage(f"the worker answered with {type(answer).__name__}")


# ---------------------------------------------------------------- as text


def draw(beats: Sequence[Heartbeat]) -> Iterator[str]:
    """Yield a table of the workers, model by model."""
    header = ("worker", "role", "epoch", "state", "running", "waiting", "KV used", "prompt tokens queued")
    for model in dict.fromkeys(beat.model for beat in beats):
        yield f"model {model}"
        rows = [_row(beat) for beat in beats if beat.model == model]
        yield from table(header, rows)


def _row(beat: Heartbeat) -> tuple[str, ...]:
    return (
        beat.address.worker,
        beat.role,
        str(beat.address.role_epoch),
        f"becomes {beat.next_role}" if beat.next_role else "leaves" if beat.draining else "serves",
        f"{beat.running} of {beat.running_max}",
        str(beat.waiting + beat.overbooked),
        f"{beat.kv_blocks_used / max(1, beat.kv_blocks_total):.0%}",
        str(beat.prefill_tokens_queued),
    )


def describe(beat: Heartbeat) -> dict[str, object]:
    """Return a worker as JSON shows it."""
    return {
        "worker": beat.address.worker,
        "generation": beat.address.generation,
        "model": beat.model,
        "role": beat.role,
        "role_epoch": beat.address.role_epoch,
        "next_role": beat.next_role,
        "draining": beat.draining,
        "running": beat.running,
        "running_max": beat.running_max,
        "waiting": beat.waiting + beat.overbooked,
        "kv_share": beat.kv_blocks_used / max(1, beat.kv_blocks_total),
        "prefill_tokens_queued": beat.prefill_tokens_queued,
    }


def _as_json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
