"""Load as a share of what the workers could do with an infinite shared cache and perfect balance.

Capacity is the highest rate at which no kind of resource is exhausted: the time of engines that prefill, the memory of
engines that decode, the links; and on aggregated workers, where prompts are computed between the steps of decode, the
TPOT goal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from baton_simulator.cache import PrefixCache
from baton_simulator.goals import GOAL_TPOT_S
from baton_simulator.replay import Fleet
from baton_simulator.steps import MockerSteps, StepModel
from baton_simulator.traffic.trace import Request, Trace

WINDOW_REQUESTS: Final = 150
BISECTIONS: Final = 40


@dataclass(frozen=True, slots=True)
class Work:
    """Least work of one request."""

    prefill_s: float
    decode_steps: int
    kv_share: float
    """Share of one worker's memory that the request holds meanwhile."""
    link_s: float


def works_of(trace: Trace, fleet: Fleet, model: StepModel, window: int) -> list[Work]:
    """Return the least work of each request: steps are as full as memory allows, and no block is computed twice.

    Running requests on one worker hold a block together. How many there are at a time is unknown here; counted are
    those of the same window of the trace, one of each session, spread evenly over the workers.
    """
    workers = fleet.decode or fleet.aggregated
    works: list[Work] = []
    cached = ideal_cached_tokens(trace)
    for first in range(0, len(trace.requests), window):
        requests = trace.requests[first : first + window]
        users = Counter(block for blocks in _blocks_of_users(requests) for block in blocks)
        works += [
            _work(
                request,
                next(cached),
                sum(1 / max(users[block] / workers, 1) for block in request.blocks),
                trace,
                fleet,
                model,
            )
            for request in requests
        ]
    return works


def _blocks_of_users(requests: Sequence[Request]) -> Iterable[Iterable[int]]:
    """Return the blocks of each session, and of each request that has none."""
    sessions: dict[str, set[int]] = {}
    for number, request in enumerate(requests):
        sessions.setdefault(request.session or f"request {number}", set()).update(request.blocks)
    return sessions.values()


def _work(
    request: Request, cached_tokens: int, shared_blocks: float, trace: Trace, fleet: Fleet, model: StepModel
) -> Work:
    """Return the work of a request whose whole blocks count as `shared_blocks` in decode's memory."""
    uncached_tokens = request.prompt_tokens - cached_tokens
    chunk_tokens = fleet.prefill_chunk_tokens if fleet.prefill else fleet.chunk_tokens
    prefill_s = model.prompt_s(cached_tokens, request.prompt_tokens)
    prefill_s += uncached_tokens / chunk_tokens * model.step_s(0.0, 0, 1)
    blocks = -(-(request.prompt_tokens + request.output_tokens) // trace.block_tokens)
    held_tokens = (blocks - len(request.blocks) + shared_blocks) * trace.block_tokens
    link_s = uncached_tokens * fleet.kv_bytes_per_token / fleet.link_bytes_per_s
    return Work(prefill_s, request.output_tokens - 1, held_tokens / fleet.kv_tokens_in_use, link_s)


def ideal_cached_tokens(trace: Trace) -> Iterator[int]:
    """Yield, for each request, the prompt tokens that an infinite shared cache would hold."""
    seen: set[int] = set()
    for request in trace.requests:
        held = next((count for count, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        seen.update(request.blocks)
        yield min(held * trace.block_tokens, request.prompt_tokens - 1)


def pooled_cached_share(trace: Trace, fleet: Fleet) -> float:
    """Return the share of prompt tokens that one LRU cache as large as all workers' would hold."""
    blocks_max = fleet.workers * fleet.kv_tokens // trace.block_tokens
    cache = PrefixCache(in_use_max=blocks_max, blocks_max=blocks_max)
    cached = prompts = 0
    for request in trace.requests:
        held, _ = cache.admit(request.blocks, 0)
        cache.release(request.blocks, 0)
        cached += min(held * trace.block_tokens, request.prompt_tokens - 1)
        prompts += request.prompt_tokens
    return cached / prompts


def least_time_s(works: Sequence[Work], fleet: Fleet, model: StepModel) -> float:
    """Return the least time in which the fleet can do the work."""
    prefill_s = sum(work.prefill_s for work in works)
    shares = sum(work.decode_steps * work.kv_share for work in works)
    # Memory is never full: on average half a request's share is free, in which the next one does not fit.
    room = 1 - sum(work.decode_steps * work.kv_share**2 for work in works) / (2 * shares) if shares else 1.0
    if fleet.aggregated:
        return _least_time_aggregated_s(prefill_s / fleet.aggregated, shares / fleet.aggregated, room, model)
    link_s = sum(work.link_s for work in works)
    decode_s = shares / room * model.step_s(room, 1, 0)
    return max(prefill_s / fleet.prefill, decode_s / fleet.decode, link_s / min(fleet.prefill, fleet.decode))


def _least_time_aggregated_s(prefill_s: float, shares: float, room: float, model: StepModel) -> float:
    """Return the least time in which one worker prefills and decodes with a token interval of at most the goal."""

    def is_enough(time_s: float) -> bool:
        # Sequences that get a token each `GOAL_TPOT_S` hold this share of the memory, on average.
        kv_share = shares * GOAL_TPOT_S / time_s
        return kv_share <= room and model.step_s(kv_share, 1, 0) <= GOAL_TPOT_S * (1 - prefill_s / time_s)

    low_s = max(prefill_s, shares * GOAL_TPOT_S)
    high_s = low_s
    while not is_enough(high_s):
        high_s *= 2
    for _ in range(BISECTIONS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (low_s, middle_s) if is_enough(middle_s) else (middle_s, high_s)
    return high_s


def at_load(trace: Trace, fleet: Fleet, load: float, *, copies: int = 1, model: StepModel | None = None) -> Trace:
    """Return the trace stretched so that each of its windows is `load` times what the fleet could do.

    Order and bursts inside a window stay the trace's, and so do the gaps of sessions, in proportion.
    """
    model = model or MockerSteps()
    requests = trace.requests
    start_s, size = 0.0, WINDOW_REQUESTS * copies
    works = works_of(trace, fleet, model, size)
    stretched: list[Request] = []
    for first in range(0, len(requests), size):
        window = requests[first : first + size]
        begin_s = window[0].at_s
        end_s = requests[first + size].at_s if first + size < len(requests) else window[-1].at_s
        length_s = least_time_s(works[first : first + size], fleet, model) / load
        factor = length_s / (end_s - begin_s) if end_s > begin_s else 0.0
        stretched += [
            replace(each, at_s=start_s + (each.at_s - begin_s) * factor, gap_s=each.gap_s * factor) for each in window
        ]
        start_s += length_s
    return replace(trace, requests=stretched)
