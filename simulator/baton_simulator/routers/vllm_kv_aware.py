"""The vLLM project's router with KV events."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from random import Random

from baton_simulator.routers.events_ignored import EventsIgnored
from baton_simulator.routers.in_flight import InFlight, decoding, prefilling
from baton_simulator.routers.prompt_load import PromptLoad
from baton_simulator.routers.protocol import Arrival, Route, WorkerSpec


class VllmKvAware(EventsIgnored):
    """vllm-router 0.1.17 with `--policy kv_aware` (`src/policies/kv_aware.rs`).

    Cost: prompt tokens not yet computed at the worker, this request's without those that its cache holds included,
    times its requests in flight, this one included. The last token of a prompt is always computed. The first of the
    cheapest is taken; the temperature is 0, and session affinity is off.

    Separated (`src/routers/http/pd_router.rs`): prefill by these tokens alone, then by its requests; decode by
    requests, pending ones included, equal ones in turn.

    Read, not compared in a run.
    """

    def __init__(self, workers: Sequence[WorkerSpec], options: None, random: Random) -> None:
        del options, random
        prefill, decode = prefilling(workers), decoding(workers)
        self._prompts = PromptLoad(prefill or decode)
        self._prefill = InFlight(prefill)
        self._decode = InFlight(decode)
        self._turns = count()

    def route(self, arrival: Arrival, now_s: float) -> Route:
        most = (arrival.prompt_tokens - 1) // arrival.block_tokens
        cached = self._prompts.cached_blocks(arrival, now_s)
        uncached_tokens = {
            worker: arrival.prompt_tokens - min(cached.get(worker, 0), most) * arrival.block_tokens
            for worker in self._prompts.tokens
        }
        work = {worker: tokens + self._prompts.tokens[worker] for worker, tokens in uncached_tokens.items()}
        if self._prefill.counts:
            prefill = min(work, key=lambda worker: (work[worker], self._prefill.counts[worker]))
            fewest = min(self._decode.counts.values())
            idlest = [worker for worker, requests in self._decode.counts.items() if requests == fewest]
            decode = idlest[next(self._turns) % len(idlest)]
            self._prefill.start(arrival.id, prefill)
        else:
            prefill = None
            decode = min(work, key=lambda worker: work[worker] * (self._decode.counts[worker] + 1))
        computing = prefill or decode
        self._prompts.start(arrival, computing, uncached_tokens[computing])
        self._decode.start(arrival.id, decode)
        return Route(decode, prefill)

    def prefilled(self, arrival: Arrival, now_s: float) -> None:
        self._prompts.end(arrival)
        self._prefill.end(arrival.id)

    def ended(self, arrival: Arrival, now_s: float) -> None:
        self.prefilled(arrival, now_s)
        self._decode.end(arrival.id)

    def cached(self, worker: str, stored: Sequence[int], evicted: Sequence[int], now_s: float) -> None:
        self._prompts.change(worker, stored, evicted, now_s)
