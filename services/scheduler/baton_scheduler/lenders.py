"""The choice of a worker whose KV pool lends the prompt's prefix to the one that computes it. Pure.

It follows the placement and does not change it: a loan saves time where the placement would compute what another worker
has. The borrower gives it up when it takes longer than to compute (`baton.worker.loans`).
"""

from __future__ import annotations

from typing import Final

from baton.messages.placement import Candidate
from baton_scheduler.prediction import Demand, PrefixMatch
from baton_scheduler.team import Serving, prefill_s
from baton_scheduler.worker_load import WorkerLoad

ASK_S: Final = 0.005
"""Time to ask for a loan, and of the engine's steps until its blocks are promised."""


def choose_lender(serving: Serving, match: PrefixMatch, chosen: Candidate, demand: Demand) -> str:
    """Return the worker whose loan saves most of the predicted time; empty if none saves any."""
    loads = {load.worker: load for load in serving}
    borrower = loads[chosen.prefill or chosen.decode]
    if not borrower.promotion_bytes_per_s:
        return ""
    own_tokens = chosen.cached_tokens

    def saved_s(lender: WorkerLoad) -> float:
        blocks = max(match.held.get(lender.worker, 0), match.pooled.get(lender.worker, 0))
        tokens = min(blocks * lender.block_tokens, demand.prompt_tokens - 1) - own_tokens
        if tokens <= 0:
            return 0.0
        missing_tokens = demand.prompt_tokens - own_tokens
        _, alone_s = prefill_s(borrower, missing_tokens, demand.prompt_tokens)
        _, rest_s = prefill_s(borrower, missing_tokens - tokens, demand.prompt_tokens)
        bandwidth = borrower.bandwidths.get(lender.worker, borrower.bandwidth)
        borrowing_s = tokens * (borrower.kv_bytes_per_token / bandwidth + borrower.promoted_token_s)
        return alone_s - rest_s - borrowing_s - ASK_S

    # The worker's own identity is not empty: it has a pool's agent.
    lenders = [
        load
        for load in serving
        if load.promotion_bytes_per_s and load.ready and load is not borrower and load.identity == borrower.identity
    ]
    best = max(lenders, key=lambda load: (saved_s(load), load.worker), default=None)
    return best.worker if best is not None and saved_s(best) > 0 else ""
