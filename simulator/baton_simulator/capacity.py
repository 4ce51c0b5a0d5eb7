"""Load as a share of what the workers could do with an infinite shared cache and perfect balance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from baton_simulator.replay import Fleet
from baton_simulator.steps import MockerSteps, StepModel
from baton_simulator.traffic.trace import Request, Trace

WINDOW_REQUESTS: Final = 150


@dataclass(frozen=True, slots=True)
class Work:
    """Least engine and link time of one request."""

    prefill_s: float
    decode_s: float
    link_s: float


def work_of(request: Request, cached_tokens: int, fleet: Fleet, block_tokens: int, model: StepModel) -> Work:
    """Return the work of a request whose prompt is cached up to `cached_tokens`, in steps as full as memory allows."""
    uncached_tokens = request.prompt_tokens - cached_tokens
    chunk_tokens = fleet.prefill_chunk_tokens if fleet.prefill else fleet.chunk_tokens
    # A full step is shared by the prompts in it, and a step with all memory in use by the sequences that hold it.
    prefill_s = model.prompt_s(cached_tokens, request.prompt_tokens)
    prefill_s += uncached_tokens / chunk_tokens * model.step_s(0.0, 0, 1)
    held_tokens = -(-(request.prompt_tokens + request.output_tokens) // block_tokens) * block_tokens
    decode_s = (request.output_tokens - 1) * held_tokens / fleet.kv_tokens_in_use * model.step_s(1.0, 1, 0)
    link_s = uncached_tokens * fleet.kv_bytes_per_token / fleet.link_bytes_per_s
    return Work(prefill_s, decode_s, link_s)


def ideal_cached_tokens(trace: Trace) -> Iterator[int]:
    """Yield, for each request, the prompt tokens that an infinite shared cache would hold."""
    seen: set[int] = set()
    for request in trace.requests:
        held = next((count for count, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        seen.update(request.blocks)
        yield min(held * trace.block_tokens, request.prompt_tokens - 1)


def busiest_s(works: Sequence[Work], fleet: Fleet) -> float:
    """Return the least time in which the fleet can do the work: that of its busiest kind of resource."""
    prefill_s, decode_s = sum(work.prefill_s for work in works), sum(work.decode_s for work in works)
    if fleet.aggregated:
        return (prefill_s + decode_s) / fleet.aggregated
    link_s = sum(work.link_s for work in works)
    return max(prefill_s / fleet.prefill, decode_s / fleet.decode, link_s / fleet.prefill, link_s / fleet.decode)


def at_load(trace: Trace, fleet: Fleet, load: float, *, copies: int = 1, model: StepModel | None = None) -> Trace:
    """Return the trace stretched so that each of its windows is `load` times what the fleet could do.

    Order and bursts inside a window stay the trace's, and so do the gaps of sessions, in proportion.
    """
    model = model or MockerSteps()
    requests = trace.requests
    works = [
        work_of(request, cached_tokens, fleet, trace.block_tokens, model)
        for request, cached_tokens in zip(requests, ideal_cached_tokens(trace), strict=True)
    ]
    stretched: list[Request] = []
    start_s, size = 0.0, WINDOW_REQUESTS * copies
    for first in range(0, len(requests), size):
        window = requests[first : first + size]
        begin_s = window[0].at_s
        end_s = requests[first + size].at_s if first + size < len(requests) else window[-1].at_s
        length_s = busiest_s(works[first : first + size], fleet) / load
        factor = length_s / (end_s - begin_s) if end_s > begin_s else 0.0
        stretched += [
            replace(each, at_s=start_s + (each.at_s - begin_s) * factor, gap_s=each.gap_s * factor) for each in window
        ]
        start_s += length_s
    return replace(trace, requests=stretched)
