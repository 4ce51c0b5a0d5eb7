"""The placement decision: a pure function of loads, prefix match, policy and a seeded generator.

A candidate is a decode worker that computes the prompt itself, or a pair: a prefill worker that computes it
and a decode worker that pulls the KV. Workers that can never take the attempt are left out; a worker that is full now
is not, it costs a wait. A policy chooses among the rest (`policies/`), by predictions (`prediction.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from baton.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, NoWorkers
from baton.identity import differing_words
from baton.messages.base import WorkerAddress
from baton.messages.placement import Candidate, Disaggregation, Placed, Placement
from baton.messages.workers import Role
from baton.node.ports import Randomness
from baton_scheduler.lenders import find_lenders
from baton_scheduler.loads import Loads
from baton_scheduler.policies.protocol import Policy, Pool, Question
from baton_scheduler.prediction import Demand, Prediction, PrefixMatch
from baton_scheduler.team import Rows, Serving, Team
from baton_scheduler.worker_load import SoftPlacement


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    output_headroom_tokens: int = 512
    """Workers reserve KV for the prompt and at most this much output."""
    candidates_max: int = 4
    """Most candidates listed in the answer."""
    loans: bool = True
    """Whether workers with KV pools can borrow prefixes."""


def choose(
    demand: Demand,
    serving: Serving,
    match: PrefixMatch,
    policy: Policy,
    options: PlacementOptions,
    random: Randomness,
    now_s: float,
) -> Placement:
    """Return where the attempt runs, why, and the alternatives.

    `serving`: the live workers of the model. Raises ModelNotFound, NoWorkers, InvalidRequest or ContextLengthExceeded.
    The same arguments and seed give the same answer.
    """
    if not serving:
        raise ModelNotFound(f"no live worker serves the model {demand.model}")
    lenders = find_lenders(serving, match.held, match.pooled) if options.loans else ()
    predict = Prediction(demand, match, options.output_headroom_tokens, now_s, lenders)
    team = serving.decode
    decodes = _admit(Role.DECODE, team, predict)
    prefills = np.empty(0, dtype=np.intp)
    if demand.disaggregation is not Disaggregation.NEVER:
        try:
            prefills = _admit(Role.PREFILL, serving.prefill, predict)
        except (NoWorkers, InvalidRequest, ContextLengthExceeded):
            if demand.disaggregation is Disaggregation.ALWAYS:
                raise
    whole = None if demand.disaggregation is Disaggregation.ALWAYS else predict.compute(team, decodes, Role.DECODE)
    question = Question(predict=predict, whole=whole, pools=_pools(serving, prefills, decodes, predict), random=random)
    ranked = policy.rank(question)
    misfit = ""
    if not question.pools and (not ranked or demand.disaggregation is Disaggregation.AUTO):
        misfit = _misfit(serving, prefills, decodes)
    if not ranked:
        why = misfit or "their agents cannot reach each other"
        raise NoWorkers(f"no prefill worker of {demand.model} can hand over to a decode worker: {why}")
    chosen = ranked[0]
    return Placement(
        decode=_address(team, chosen.decode),
        prefill=_address(serving.prefill, chosen.prefill) if chosen.prefill else None,
        reason=_explain(ranked, demand, misfit),
        predicted=chosen,
        candidates=tuple(ranked[: options.candidates_max]),
        lender=chosen.lender,
    )


def soft_placements(
    placed: Placed, loads: Loads, *, now_s: float, options: PlacementOptions
) -> dict[str, SoftPlacement]:
    """Return what a placement takes from each worker until a heartbeat accounts for it."""
    chosen, attempt = placed.predicted, placed.context.attempt
    if chosen is None:
        return {}
    first_token_s = now_s + chosen.predicted_ttft_s
    output_tokens = min(placed.output_tokens_max, options.output_headroom_tokens)
    computes = chosen.prefill or chosen.decode

    def taken(worker: str, need_tokens: int, cached_tokens: int, until_s: float) -> SoftPlacement:
        lacking_tokens = placed.prompt_tokens - chosen.cached_tokens - chosen.borrowed_tokens
        uncached_tokens = lacking_tokens if worker == computes else 0
        prompt_s, prefill_s = loads.prefill_s(worker, uncached_tokens, placed.prompt_tokens)
        return SoftPlacement(
            attempt=attempt,
            placed_s=now_s,
            until_s=until_s,
            kv_tokens=loads.kv_tokens(worker, need_tokens, cached_tokens),
            prefill_s=prefill_s,
            prompt_s=prompt_s,
        )

    last_token_s = first_token_s + placed.output_tokens_max * chosen.predicted_token_interval_s
    need_tokens = placed.prompt_tokens + output_tokens
    # What is promoted takes room like what is computed.
    shared_tokens = chosen.decode_cached_tokens - chosen.decode_promoted_tokens
    both = {chosen.decode: taken(chosen.decode, need_tokens, shared_tokens, last_token_s)}
    if chosen.prefill:
        shared_tokens = chosen.cached_tokens - chosen.promoted_tokens
        both[chosen.prefill] = taken(chosen.prefill, placed.prompt_tokens, shared_tokens, first_token_s)
    return both


# ---------------------------------------------------------------- admission


def _admit(role: Role, team: Team, predict: Prediction) -> Rows:
    """Return the workers of a role that can take this attempt, now or later.

    Raises NoWorkers, InvalidRequest or ContextLengthExceeded where there is none.
    """
    demand = predict.demand
    is_any_barred = demand.parameters or demand.refused or demand.exclude
    if not is_any_barred and team.all_take(demand.prompt_tokens, predict.need_tokens(role)):
        return team.every
    figures = team.figures()
    allowed = figures.ready > 0
    if not allowed.any():
        raise NoWorkers(f"no live {role} worker serves the model {demand.model}")
    if demand.parameters and role is Role.DECODE:
        allowed &= [demand.parameters.issubset(load.heartbeat.parameters) for load in team.loads]
        if not allowed.any():
            names = ", ".join(sorted(demand.parameters))
            raise NoWorkers(f"no live {role} worker of {demand.model} takes the parameters {names}")
    if demand.refused:
        # Only refusals by this role count: the other role was asked for something else.
        refusing = {load.kind for load in team.loads if load.worker in demand.refused}
        allowed &= [load.kind not in refusing for load in team.loads]
        if not allowed.any():
            raise InvalidRequest(f"every live {role} worker of {demand.model} refuses this request")
    allowed &= demand.prompt_tokens < figures.context_tokens_max
    allowed &= predict.need_tokens(role) <= figures.kv_tokens_max
    if not allowed.any():
        raise ContextLengthExceeded(
            f"no {role} worker of {demand.model} can hold a prompt of {demand.prompt_tokens} tokens"
        )
    # Exclusions come last, as they pass: what only an excluded worker can hold is not refused for good.
    allowed[[team.rows[worker] for worker in demand.exclude if worker in team.rows]] = False
    if not allowed.any():
        raise NoWorkers(f"every live {role} worker of {demand.model} that can hold it failed this request before")
    return np.flatnonzero(allowed)


def _pools(serving: Serving, prefills: Rows, decodes: Rows, predict: Prediction) -> list[Pool]:
    """Return prefill and decode workers of each KV identity: only these can hand over to each other."""
    if not len(prefills):
        return []
    prefill, decode = serving.prefill, serving.decode
    if prefill.identities == decode.identities and len(decode.identities) == 1:
        if "" in decode.identities:
            return []
        return [(predict.compute(prefill, prefills, Role.PREFILL), predict.receive(decode, decodes))]
    pools: list[Pool] = []
    for identity in sorted((prefill.identities & decode.identities) - {""}):
        source_rows = prefills[[load.identity == identity for load in prefill.at(prefills)]]
        sink_rows = decodes[[load.identity == identity for load in decode.at(decodes)]]
        if len(source_rows) and len(sink_rows):
            source = predict.compute(prefill, source_rows, Role.PREFILL)
            pools.append((source, predict.receive(decode, sink_rows)))
    return pools


def _address(team: Team, worker: str) -> WorkerAddress:
    return team.loads[team.rows[worker]].heartbeat.address


# ---------------------------------------------------------------- explanation


def _misfit(serving: Serving, prefills: Rows, decodes: Rows) -> str:
    """Return why prefill and decode workers can never hand over to each other; empty where nothing prevents it."""
    sources, sinks = (
        {load.identity: load.worker for load in team.at(rows)}
        for team, rows in ((serving.prefill, prefills), (serving.decode, decodes))
    )
    for identities in (sources, sinks):
        if set(identities) == {""}:
            return f"{identities['']} has no transfer agent"
    for source, sink in product(sources, sinks):
        if source != sink:
            ours, theirs = differing_words(source, sink)
            return f"{sources[source]} has {ours}, {sinks[sink]} has {theirs}"
    return ""


def _explain(ranked: Sequence[Candidate], demand: Demand, misfit: str) -> str:
    chosen = ranked[0]
    uncached_tokens = demand.prompt_tokens - chosen.cached_tokens - chosen.borrowed_tokens
    where = f"everything on {chosen.decode}"
    if chosen.prefill:
        where = f"prefill on {chosen.prefill}, decode on {chosen.decode}"
    cost = f"{uncached_tokens} of {demand.prompt_tokens} tokens to compute, "
    if chosen.promoted_tokens:
        cost += f"{chosen.promoted_tokens} to promote from the pool, "
    if chosen.lender:
        cost += f"{chosen.borrowed_tokens} to borrow from {chosen.lender}, "
    cost += f"{chosen.predicted_ttft_s:.3f} s predicted"
    if demand.disaggregation is not Disaggregation.AUTO:
        return f"{where}: {cost}; disaggregation is {demand.disaggregation}."
    other = next((each for each in ranked if bool(each.prefill) != bool(chosen.prefill)), None)
    kind = "the best aggregated worker" if chosen.prefill else "the best pair"
    if other is None:
        why = f": {misfit}" if misfit else ""
        return f"{where}: {cost}; there is no {'aggregated worker' if chosen.prefill else 'pair'} to compare with{why}."
    return (
        f"{where}: {cost}, at a cost of {chosen.cost_s:.3f} s to all, against {other.predicted_ttft_s:.3f} s and "
        f"{other.cost_s:.3f} s for {kind}."
    )
