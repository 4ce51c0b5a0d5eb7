"""Parts and copies of a trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Final

from baton_simulator.traffic.trace import Request, Trace

TUNING_S: Final = 900.0
COPY_SHIFT_S: Final = 30.0
JITTER_S: Final = 3.0


def tuning_part(trace: Trace) -> Trace:
    """Return the part that policies may be tuned on: half of the sessions, or else the first 15 minutes."""
    if any(request.session for request in trace.requests):
        return _select(trace, _sessions(trace, 0), 0.0)
    return _select(trace, lambda request: request.at_s < TUNING_S, 0.0)


def held_out_part(trace: Trace) -> Trace:
    """Return the rest of the trace, on which results are reported."""
    if any(request.session for request in trace.requests):
        return _select(trace, _sessions(trace, 1), 0.0)
    return _select(trace, lambda request: request.at_s >= TUNING_S, TUNING_S)


def overlay(trace: Trace, copies: int, random: Random) -> Trace:
    """Return several copies of a trace side by side: with block ids and sessions of their own, at shifted times."""
    if copies == 1:
        return trace
    stride = 1 + max((max(request.blocks, default=0) for request in trace.requests), default=0)
    found: list[tuple[float, int, int, Request]] = []
    for copy in range(copies):
        shift_s = random.uniform(0, COPY_SHIFT_S) if copy else 0.0
        for index, request in enumerate(trace.requests):
            jitter_s = 0.0 if request.session or not copy else random.uniform(0, JITTER_S)
            found.append((request.at_s + shift_s + jitter_s, copy, index, request))
    found.sort(key=lambda each: each[0])
    places = {(copy, index): place for place, (_, copy, index, _) in enumerate(found)}
    requests = [
        replace(
            request,
            at_s=at_s,
            blocks=tuple(copy * stride + block for block in request.blocks),
            session=f"{request.session}/{copy}" if request.session else "",
            after=None if request.after is None else places[copy, request.after],
        )
        for at_s, copy, _, request in found
    ]
    return replace(trace, requests=requests)


def _sessions(trace: Trace, remainder: int) -> Callable[[Request], bool]:
    numbers: dict[str, int] = {}
    for request in trace.requests:
        numbers.setdefault(request.session, len(numbers))
    return lambda request: numbers[request.session] % 2 == remainder


def _select(trace: Trace, is_in: Callable[[Request], bool], start_s: float) -> Trace:
    kept = [index for index, request in enumerate(trace.requests) if is_in(request)]
    places = {index: place for place, index in enumerate(kept)}
    requests = [
        replace(
            request, at_s=request.at_s - start_s, after=None if request.after is None else places.get(request.after)
        )
        for request in (trace.requests[index] for index in kept)
    ]
    return replace(trace, requests=requests)
