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
    borrower = _load(serving, chosen.prefill or chosen.decode)
    if borrower is None or not borrower.promotion_bytes_per_s:
        return ""
    best, best_s = "", ASK_S
    for worker in sorted(match.held.keys() | match.pooled.keys()):
        lender = _load(serving, worker)
        if lender is None or lender is borrower or lender.identity != borrower.identity:
            continue
        if not lender.promotion_bytes_per_s or not lender.ready:
            continue
        blocks = max(match.held.get(worker, 0), match.pooled.get(worker, 0))
        saved_s = _saved_s(borrower, worker, blocks * lender.block_tokens, chosen.cached_tokens, demand.prompt_tokens)
        if saved_s > best_s:
            best, best_s = worker, saved_s
    return best


def _saved_s(borrower: WorkerLoad, lender: str, lent_tokens: int, own_tokens: int, prompt_tokens: int) -> float:
    # The last token is always computed.
    tokens = min(lent_tokens, prompt_tokens - 1) - own_tokens
    if tokens <= 0:
        return 0.0
    missing_tokens = prompt_tokens - own_tokens
    _, alone_s = prefill_s(borrower, missing_tokens, prompt_tokens)
    _, rest_s = prefill_s(borrower, missing_tokens - tokens, prompt_tokens)
    bandwidth = borrower.bandwidths.get(lender, borrower.bandwidth)
    return alone_s - rest_s - tokens * (borrower.kv_bytes_per_token / bandwidth + borrower.promoted_token_s)


def _load(serving: Serving, worker: str) -> WorkerLoad | None:
    for team in serving.teams.values():
        if (row := team.rows.get(worker)) is not None:
            return team.loads[row]
    return None
