"""The placement decision: a pure function of loads, prefix match, options and a seeded generator.

A candidate is a decode worker that computes the prompt itself, or a pair: a prefill worker that computes it
and a decode worker that pulls the KV. Its cost is the predicted time to first token in seconds:

    pair        prefill's queue + uncached tokens at its measured rate
                + bytes that decode lacks at the slower side's measured bandwidth + entry into decode's next step
    aggregated  decode's own prefill queue + uncached tokens at its rate + entry into its next step

A queue's time is its prompt tokens over the measured rate. Entry costs one token interval, and one more for each
attempt that waits. A candidate that pushes the decode worker's token interval above the limit, as computing a
prompt between the steps of running attempts can, ranks behind all candidates that keep it.
Among near-ties the candidate with the most cached tokens wins, then the one without a transfer, then the less loaded
of two random ones, so that several schedulers do not all choose the same worker.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final

from baton.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, NoWorkers, Overloaded
from baton.identity import differing_words
from baton.messages.placement import Candidate, Disaggregation, Placed, Placement
from baton.messages.workers import Role
from baton.node.ports import Randomness
from baton_scheduler.loads import SoftPlacement, WorkerLoad

# Rates of a worker that has not measured its own yet.
ASSUMED_PREFILL_TOKENS_PER_S: Final = 1000.0
ASSUMED_DECODE_TOKENS_PER_S: Final = 20.0
ASSUMED_TRANSFER_BYTES_PER_S: Final = 1e9
RETRY_AFTER_S_MAX: Final = 30.0


Cost = tuple[bool, float]
"""Whether the token interval breaks the limit, and the predicted seconds; compared in this order."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Requirements of one attempt."""

    model: str
    prompt_tokens: int
    output_tokens_max: int
    disaggregation: Disaggregation
    exclude: frozenset[str] = frozenset()
    exclude_pairs: frozenset[tuple[str, str]] = frozenset()
    parameters: frozenset[str] = frozenset()
    """Extension parameters, all of which the decode worker's engine must take."""
    refused: frozenset[str] = frozenset()
    """Workers that refused what the request asks; all workers of their kinds would refuse it."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The index's answer: worker → leading blocks of the prompt, where there are any."""

    held: Mapping[str, int] = field(default_factory=dict[str, int])
    speculative: Mapping[str, int] = field(default_factory=dict[str, int])
    """Speculative leading blocks: prompts already placed there; their prefill time is in its queue already."""


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    token_interval_s_max: float = 0.1
    tie_share: float = 0.05
    """Candidates within this share of the best prediction are near-ties."""
    tie_s: float = 0.001
    """Candidates within this time of the best prediction are near-ties, whatever the share."""
    chunk_tokens: int = 2048
    """Prompt tokens that an engine computes in one step beside running attempts."""
    output_headroom_tokens: int = 512
    """Workers reserve KV for the prompt and at most this much output."""
    leased_share_max: float = 0.4
    """Prefill workers lease out at most this share of their KV."""
    retry_after_s: float = 1.0
    candidates_max: int = 4
    """Most candidates listed in the answer."""
    shortlist: int = 8
    """Workers of each role that are paired and ranked: the best by their own part of the cost."""


def choose(
    demand: Demand,
    workers: Sequence[WorkerLoad],
    match: PrefixMatch,
    options: PlacementOptions,
    random: Randomness,
) -> Placement:
    """Return where the attempt runs, why, and the alternatives.

    Raises ModelNotFound, NoWorkers, InvalidRequest, ContextLengthExceeded or Overloaded. The same arguments and
    seed give the same answer, whatever the order of `workers`.
    """
    # Sorted, so that what chance picks does not depend on the order in which workers were heard.
    serving = sorted((load for load in workers if load.heartbeat.model == demand.model), key=lambda load: load.worker)
    if not serving:
        raise ModelNotFound(f"no live worker serves the model {demand.model}")
    predict = _Prediction(demand, match, options, random)
    decodes = _admit(Role.DECODE, serving, demand, options)
    wholes = [] if demand.disaggregation is Disaggregation.ALWAYS else predict.wholes(decodes)
    prefills: list[WorkerLoad] = []
    pairs: list[Candidate] = []
    if demand.disaggregation is not Disaggregation.NEVER:
        try:
            prefills = _admit(Role.PREFILL, serving, demand, options)
        except (NoWorkers, InvalidRequest, Overloaded):
            if demand.disaggregation is Disaggregation.ALWAYS:
                raise
        pairs = predict.pairs(prefills, decodes)
    misfit = "" if pairs else _misfit(prefills, decodes)
    if not wholes and not pairs:
        why = misfit or "their agents cannot reach each other"
        raise NoWorkers(f"no prefill worker of {demand.model} can hand over to a decode worker that is free: {why}")
    by_name = {load.worker: load for load in serving}
    chosen = _pick([*wholes, *pairs], by_name, options, random)
    ranked = sorted([*wholes, *pairs], key=lambda candidate: _rank(candidate, options))
    return Placement(
        decode=by_name[chosen.decode].heartbeat.address,
        prefill=by_name[chosen.prefill].heartbeat.address if chosen.prefill else None,
        reason=_explain(chosen, wholes, pairs, demand, misfit),
        predicted=chosen,
        candidates=tuple(ranked[: options.candidates_max]),
    )


def soft_placements(placed: Placed, *, now_s: float, options: PlacementOptions) -> dict[str, SoftPlacement]:
    """Return what a placement takes from each worker until a heartbeat accounts for it."""
    chosen, attempt = placed.predicted, placed.context.attempt
    if chosen is None:
        return {}
    uncached_tokens = placed.prompt_tokens - chosen.cached_tokens
    first_token_s = now_s + chosen.predicted_ttft_s
    output_tokens = min(placed.output_tokens_max, options.output_headroom_tokens)
    taken = {
        chosen.decode: SoftPlacement(
            attempt=attempt,
            placed_s=now_s,
            until_s=first_token_s + placed.output_tokens_max * chosen.predicted_token_interval_s,
            kv_tokens=placed.prompt_tokens + output_tokens,
            prefill_tokens=0 if chosen.prefill else uncached_tokens,
        )
    }
    if chosen.prefill:
        taken[chosen.prefill] = SoftPlacement(
            attempt=attempt,
            placed_s=now_s,
            until_s=first_token_s,
            kv_tokens=placed.prompt_tokens,
            prefill_tokens=uncached_tokens,
        )
    return taken


# ---------------------------------------------------------------- admission


def _admit(role: Role, serving: Sequence[WorkerLoad], demand: Demand, options: PlacementOptions) -> list[WorkerLoad]:
    """Return the workers of a role that can take this attempt now.

    Raises NoWorkers, InvalidRequest, ContextLengthExceeded or Overloaded where there is none.
    """
    of_role = [load for load in serving if load.role is role]
    # Only refusals by this role count: the other role was asked for something else.
    refusing = {load.kind for load in of_role if load.worker in demand.refused}
    ready = [load for load in of_role if not load.heartbeat.draining]
    if not ready:
        raise NoWorkers(f"no live {role} worker serves the model {demand.model}")
    taking = [load for load in ready if role is Role.PREFILL or demand.parameters.issubset(load.heartbeat.parameters)]
    if not taking:
        names = ", ".join(sorted(demand.parameters))
        raise NoWorkers(f"no live {role} worker of {demand.model} takes the parameters {names}")
    willing = [load for load in taking if load.kind not in refusing and load.worker not in demand.refused]
    if not willing:
        raise InvalidRequest(f"every live {role} worker of {demand.model} refuses this request")
    allowed = [load for load in willing if load.worker not in demand.exclude]
    if not allowed:
        raise NoWorkers(f"every live {role} worker of {demand.model} failed this request before")
    free = [load for load in allowed if load.slots_free > 0 and _fits(load, demand, options, load.kv_tokens_used)]
    if free:
        return free
    fitting = [load for load in allowed if _fits(load, demand, options, 0)]
    if not fitting:
        raise ContextLengthExceeded(
            f"no {role} worker of {demand.model} can hold a prompt of {demand.prompt_tokens} tokens"
        )
    raise Overloaded(f"every {role} worker of {demand.model} is full", retry_after_s=_retry_after_s(fitting, options))


def _fits(load: WorkerLoad, demand: Demand, options: PlacementOptions, used_tokens: int) -> bool:
    """Whether the attempt has room beside `used_tokens` of KV."""
    in_context = demand.prompt_tokens < load.heartbeat.context_tokens_max
    return in_context and used_tokens + _need(load, demand, options) <= _kv_tokens_max(load, options)


def _need(load: WorkerLoad, demand: Demand, options: PlacementOptions) -> int:
    """Return the tokens of KV that the worker's ledger will reserve, in whole engine blocks."""
    # Prefill's sampled token is discarded and gets no place.
    output = 0 if load.role is Role.PREFILL else min(demand.output_tokens_max, options.output_headroom_tokens)
    block_tokens = load.heartbeat.engine_block_tokens
    return math.ceil((demand.prompt_tokens + output) / block_tokens) * block_tokens


def _kv_tokens_max(load: WorkerLoad, options: PlacementOptions) -> int:
    share = options.leased_share_max if load.role is Role.PREFILL else 1.0
    return int(load.kv_tokens_total * share)


def _retry_after_s(full: Sequence[WorkerLoad], options: PlacementOptions) -> float:
    """Return a rough time until the first of the full workers has computed its queue."""
    soonest_s = min(load.prefill_tokens_queued / _prefill_rate(load) for load in full)
    return min(max(options.retry_after_s, soonest_s), RETRY_AFTER_S_MAX)


# ---------------------------------------------------------------- prediction


def _prefill_rate(load: WorkerLoad) -> float:
    return load.heartbeat.prefill_tokens_per_s or ASSUMED_PREFILL_TOKENS_PER_S


def _bandwidth(load: WorkerLoad) -> float:
    return load.heartbeat.transfer_bytes_per_s or ASSUMED_TRANSFER_BYTES_PER_S


def _interval_s(load: WorkerLoad) -> float:
    return 1.0 / (load.heartbeat.decode_tokens_per_s or ASSUMED_DECODE_TOKENS_PER_S)


class _Prediction:
    """Predicted costs of one demand on any worker."""

    def __init__(self, demand: Demand, match: PrefixMatch, options: PlacementOptions, random: Randomness) -> None:
        self._demand = demand
        self._match = match
        self._options = options
        self._random = random
        self._blocks = {
            **match.held,
            **{w: max(blocks, match.held.get(w, 0)) for w, blocks in match.speculative.items()},
        }

    def wholes(self, decodes: Sequence[WorkerLoad]) -> list[Candidate]:
        """Return the candidates that compute the prompt where they decode."""

        def cost(decode: WorkerLoad) -> Cost:
            return self._breaks_limit(self._whole_interval_s(decode)), self._prefill_s(decode) + self._entry_s(decode)

        return [self._whole(decode) for decode in self._shortlist(decodes, cost)]

    def _whole_interval_s(self, decode: WorkerLoad) -> float:
        if not decode.heartbeat.running:
            return _interval_s(decode)
        # A chunk of the prompt runs in the same step as the attempts that decode there, and delays their tokens.
        uncached_tokens = self._demand.prompt_tokens - self._cached_tokens(decode)
        return _interval_s(decode) + min(uncached_tokens, self._options.chunk_tokens) / _prefill_rate(decode)

    def _whole(self, decode: WorkerLoad) -> Candidate:
        cached_tokens = self._cached_tokens(decode)
        return Candidate(
            decode=decode.worker,
            cached_tokens=cached_tokens,
            decode_cached_tokens=cached_tokens,
            speculative_tokens=self._speculative_tokens(decode),
            predicted_ttft_s=self._prefill_s(decode) + self._entry_s(decode),
            predicted_token_interval_s=self._whole_interval_s(decode),
        )

    def pairs(self, prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad]) -> list[Candidate]:
        """Return the candidates that prefill on one worker and decode on another."""

        def send(prefill: WorkerLoad) -> Cost:
            return False, self._prefill_s(prefill)

        def receive(decode: WorkerLoad) -> Cost:
            cost_s = self._pull_s(decode, _bandwidth(decode)) + self._entry_s(decode)
            return self._breaks_limit(_interval_s(decode)), cost_s

        pairs: list[Candidate] = []
        # One shortlist per KV identity: only workers of the same identity can be paired.
        for identity in sorted({load.kv_identity for load in prefills}):
            sources, sinks = (
                self._shortlist([load for load in loads if load.hands_over and load.kv_identity == identity], cost)
                for loads, cost in ((prefills, send), (decodes, receive))
            )
            pairs += [
                self._pair(source, sink)
                for source, sink in product(sources, sinks)
                if (source.worker, sink.worker) not in self._demand.exclude_pairs
            ]
        return pairs

    def _pair(self, prefill: WorkerLoad, decode: WorkerLoad) -> Candidate:
        bandwidth = min(_bandwidth(prefill), _bandwidth(decode))
        return Candidate(
            decode=decode.worker,
            prefill=prefill.worker,
            cached_tokens=self._cached_tokens(prefill),
            decode_cached_tokens=self._cached_tokens(decode),
            speculative_tokens=self._speculative_tokens(prefill),
            predicted_ttft_s=self._prefill_s(prefill) + self._pull_s(decode, bandwidth) + self._entry_s(decode),
            predicted_token_interval_s=_interval_s(decode),
        )

    def _shortlist(self, loads: Sequence[WorkerLoad], cost: Callable[[WorkerLoad], Cost]) -> Sequence[WorkerLoad]:
        """Return the workers with the lowest cost: costs add up, so the best pairs consist of the best of each side.

        Near-ties are ordered by cached tokens, then at random: a fixed order would be the same in every scheduler
        and at every request, and all requests would go to the same few workers.
        """
        # Each excluded pair may take one of the best from the list.
        count = self._options.shortlist + len(self._demand.exclude_pairs)
        if len(loads) <= count:
            return loads
        costs = {load.worker: cost(load) for load in loads}
        near_s = _near_s(min(costs.values())[1], self._options)

        def merit(load: WorkerLoad) -> tuple[bool, float, int, float]:
            breaks_limit, cost_s = costs[load.worker]
            return breaks_limit, max(cost_s, near_s), -self._cached_tokens(load), self._random.random()

        return heapq.nsmallest(count, loads, key=merit)

    def _breaks_limit(self, token_interval_s: float) -> bool:
        return token_interval_s > self._options.token_interval_s_max

    def _cached_tokens(self, load: WorkerLoad) -> int:
        """Return the prompt tokens that a worker holds or, speculatively, will hold."""
        return self._tokens(load, self._blocks.get(load.worker, 0))

    def _speculative_tokens(self, load: WorkerLoad) -> int:
        return self._cached_tokens(load) - self._tokens(load, self._match.held.get(load.worker, 0))

    def _tokens(self, load: WorkerLoad, blocks: int) -> int:
        """Return the prompt tokens that these blocks save; the last token is always computed, to sample from it."""
        if not blocks:
            return 0
        return max(0, min(blocks * load.heartbeat.block_tokens, self._demand.prompt_tokens - 1))

    def _prefill_s(self, load: WorkerLoad) -> float:
        uncached_tokens = self._demand.prompt_tokens - self._cached_tokens(load)
        return (load.prefill_tokens_queued + uncached_tokens) / _prefill_rate(load)

    def _pull_s(self, decode: WorkerLoad, bandwidth: float) -> float:
        missing_tokens = self._demand.prompt_tokens - self._cached_tokens(decode)
        return missing_tokens * decode.heartbeat.kv_bytes_per_token / bandwidth

    def _entry_s(self, decode: WorkerLoad) -> float:
        return (1 + decode.heartbeat.waiting) * _interval_s(decode)


# ---------------------------------------------------------------- choice


def _breaks_limit(candidate: Candidate, options: PlacementOptions) -> bool:
    return candidate.predicted_token_interval_s > options.token_interval_s_max


def _rank(candidate: Candidate, options: PlacementOptions) -> tuple[bool, float, str, str]:
    return (_breaks_limit(candidate, options), candidate.predicted_ttft_s, candidate.decode, candidate.prefill)


def _near_s(best_s: float, options: PlacementOptions) -> float:
    """Return the highest cost in seconds at which a candidate still ties with the best."""
    return best_s + max(best_s * options.tie_share, options.tie_s)


def _pick(
    candidates: Sequence[Candidate], loads: Mapping[str, WorkerLoad], options: PlacementOptions, random: Randomness
) -> Candidate:
    """Return the best candidate of all near-ties: most cached tokens, no transfer, the less loaded of two."""
    best = min(candidates, key=lambda candidate: _rank(candidate, options))
    limit_s = _near_s(best.predicted_ttft_s, options)
    ties = [
        candidate
        for candidate in candidates
        if candidate.predicted_ttft_s <= limit_s and _breaks_limit(candidate, options) == _breaks_limit(best, options)
    ]

    def merit(candidate: Candidate) -> tuple[int, int, bool]:
        return (candidate.cached_tokens, candidate.decode_cached_tokens, not candidate.prefill)

    most = max(map(merit, ties))
    equals = [candidate for candidate in ties if merit(candidate) == most]
    # The least loaded of all is the same for every scheduler until the next heartbeat; of two random ones it rarely is.
    two = random.sample(equals, min(2, len(equals)))
    return min(two, key=lambda candidate: loads[candidate.decode].used_share)


def _misfit(prefills: Sequence[WorkerLoad], decodes: Sequence[WorkerLoad]) -> str:
    """Return why prefill and decode workers can never hand over to each other; empty where nothing prevents it."""
    for loads in (prefills, decodes):
        if loads and not any(load.hands_over for load in loads):
            return f"{loads[0].worker} has no transfer agent"
    sources, sinks = ({load.kv_identity: load.worker for load in loads} for loads in (prefills, decodes))
    for source, sink in product(sources, sinks):
        if source != sink:
            ours, theirs = differing_words(source, sink)
            return f"{sources[source]} has {ours}, {sinks[sink]} has {theirs}"
    return ""


def _explain(
    chosen: Candidate, wholes: Sequence[Candidate], pairs: Sequence[Candidate], demand: Demand, misfit: str
) -> str:
    uncached_tokens = demand.prompt_tokens - chosen.cached_tokens
    where = f"everything on {chosen.decode}"
    if chosen.prefill:
        where = f"prefill on {chosen.prefill}, decode on {chosen.decode}"
    cost = f"{uncached_tokens} of {demand.prompt_tokens} tokens to compute, {chosen.predicted_ttft_s:.3f} s predicted"
    if demand.disaggregation is not Disaggregation.AUTO:
        return f"{where}: {cost}; disaggregation is {demand.disaggregation}."
    others = wholes if chosen.prefill else pairs
    kind = "the best aggregated worker" if chosen.prefill else "the best pair"
    if not others:
        why = f": {misfit}" if misfit else ""
        return f"{where}: {cost}; there is no {'aggregated worker' if chosen.prefill else 'pair'} to compare with{why}."
    other = min(others, key=lambda candidate: candidate.predicted_ttft_s)
    return (
        f"{where}: {cost}, against {other.predicted_ttft_s:.3f} s and {other.predicted_token_interval_s:.3f} s "
        f"between tokens for {kind}; {chosen.predicted_token_interval_s:.3f} s between tokens here."
    )
