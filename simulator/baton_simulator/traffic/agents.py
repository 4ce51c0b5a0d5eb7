"""Reader of the coding-agent sessions: one session per line, with its requests in order.

A request comes only after the answer before it, by the recorded time between the two. When sessions start is not
recorded: they start at random times within half an hour, and what would come after it is left out, as is what a
session asks from the first prompt on that is too long for a model with a context of 131,072 tokens. Block ids belong
to their session, except those of the tools' description, with which an agent's prompts begin: sessions with
descriptions of equal length share them. Calls of subagents are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from random import Random
from typing import Annotated, Final

from msgspec import Meta, Struct

from baton_simulator.traffic.lines import decode
from baton_simulator.traffic.trace import Request, Trace

BLOCK_TOKENS: Final = 512
"""Blocks of the result: each stands for several recorded ones, and has the id of the last of them."""
HORIZON_S: Final = 1800.0
CONTEXT_TOKENS: Final = 131_072
FIRST_ID: Final = 1
"""With this id the prompts of the agent itself begin, in every session."""

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]


class _Call(Struct, rename={"prompt_tokens": "in", "output_tokens": "out"}):
    t: Seconds
    """Since the session's start."""
    type: str
    prompt_tokens: Count = 0
    output_tokens: Count = 0
    api_time: Seconds = 0.0
    """Time that the answer took."""
    hash_runs: Sequence[tuple[Count, Count]] = ()
    """(first id, number of consecutive ids)."""


class _Session(Struct):
    id: str
    block_size: Annotated[int, Meta(gt=0, le=BLOCK_TOKENS)]
    tool_tokens: Count
    requests: Sequence[_Call]


def read(name: str, lines: Iterable[bytes], random: Random) -> Trace:
    """Return the trace, its sessions started by `random`. Raises InvalidRequest with the line's number."""
    tools: dict[int, int] = {}
    found: list[tuple[float, _Session, _Call, tuple[int, ...], float]] = []
    ids = count(0, 1 << 32)
    for session in decode(name, lines, _Session):
        start_s, first_id = random.uniform(0, HORIZON_S), next(ids)
        tools_id = tools.setdefault(session.tool_tokens, next(ids))
        earlier: _Call | None = None
        for call in session.requests:
            if start_s + call.t > HORIZON_S or call.prompt_tokens + call.output_tokens > CONTEXT_TOKENS:
                break
            if call.type == "subagent" or not call.prompt_tokens or not call.output_tokens:
                continue
            blocks = _blocks(session, call, first_id, tools_id)
            gap_s = max(0.0, call.t - earlier.t - earlier.api_time) if earlier else 0.0
            found.append((start_s + call.t, session, call, blocks, gap_s))
            earlier = call
    found.sort(key=lambda each: each[0])
    newest: dict[str, int] = {}
    requests: list[Request] = []
    for at_s, session, call, blocks, gap_s in found:
        after = newest.get(session.id)
        newest[session.id] = len(requests)
        requests.append(Request(at_s, blocks, call.prompt_tokens, call.output_tokens, session.id, after, gap_s))
    return Trace(name, BLOCK_TOKENS, requests)


def _blocks(session: _Session, call: _Call, first_id: int, tools_id: int) -> tuple[int, ...]:
    """Return the ids of the prompt's whole blocks, unique over all sessions."""
    each = BLOCK_TOKENS // session.block_size
    blocks = [first_id + last for last in _every(call.hash_runs, each)]
    shared = session.tool_tokens // BLOCK_TOKENS if call.hash_runs and call.hash_runs[0][0] == FIRST_ID else 0
    blocks[:shared] = [tools_id + number for number in range(min(shared, len(blocks)))]
    return tuple(blocks[: call.prompt_tokens // BLOCK_TOKENS])


def _every(runs: Sequence[tuple[int, int]], each: int) -> Iterator[int]:
    """Yield every `each`-th id of the runs."""
    skip = each - 1
    for start, length in runs:
        yield from range(start + skip, start + length, each)
        skip = (skip - length) % each
