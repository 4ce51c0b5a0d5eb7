"""Reader of Mooncake's traces: one JSON object per request, ids of blocks of 512 tokens."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Annotated, Final

from msgspec import Meta, Struct

from baton_simulator.traffic.lines import decode
from baton_simulator.traffic.trace import Request, Trace

BLOCK_TOKENS: Final = 512
STAMP_S: Final = 3.0
"""Resolution of the time stamps: requests are spread evenly over the time that theirs stands for."""


class _Line(Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    """In milliseconds."""
    input_length: Annotated[int, Meta(gt=0)]
    output_length: Annotated[int, Meta(gt=0)]
    hash_ids: list[int]


def read(name: str, lines: Iterable[bytes], random: Random) -> Trace:
    """Return the trace, its arrivals spread by `random`. Raises MalformedTrace with the line's number."""
    requests = [
        Request(
            at_s=line.timestamp / 1000 + random.uniform(0, STAMP_S),
            # The last id may stand for a part of a block; caches hold whole ones.
            blocks=tuple(line.hash_ids[: line.input_length // BLOCK_TOKENS]),
            prompt_tokens=line.input_length,
            output_tokens=line.output_length,
        )
        for line in decode(name, lines, _Line)
    ]
    return Trace(name, BLOCK_TOKENS, sorted(requests, key=lambda request: request.at_s))
