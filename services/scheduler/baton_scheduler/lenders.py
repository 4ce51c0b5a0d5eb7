"""Loans between KV pools in predictions: for each worker, the lender that shortens the prompt most. Pure.

A loan counts only where its upper bound is less than the time of computing its tokens. The borrower gives it up when it
takes longer than computing (`baton.worker.loans`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_scheduler.team import Figures, Rows, Serving, Team, Vector, prefill_s
from baton_scheduler.worker_load import WorkerLoad

ASK_S: Final = 0.005
"""Time to ask for a loan, and of the engine's steps until its blocks are promised."""
LENDERS_MAX: Final = 4
"""Lenders considered of each KV identity: those with the longest prefixes."""


class Lender(msgspec.Struct, frozen=True, eq=False):
    """A worker whose KV pool could lend the first `tokens` of the prompt."""

    load: WorkerLoad
    tokens: int


class Borrowing(msgspec.Struct, frozen=True, eq=False):
    """The best loan of each worker of a leg, one element per worker; 0 tokens where none pays."""

    tokens: Vector
    loan_s: Vector
    """Time to ask for it and to pull and promote its tokens."""
    loan_bound_s: Vector
    """Upper bound of it, as pulls from the lender have scattered."""
    rest_s: Vector
    """Time to compute the tokens after it, with the sequences in its steps."""
    rest_prompt_s: Vector
    """The same without these sequences."""
    displaced_s: Vector
    """Time to compute what the borrower's pool evicts for it: as many tokens as it brings, once the pool is full."""
    lenders: Rows
    """Index of the lender."""

    def where(self, holds: NDArray[np.bool], other: Borrowing | None) -> Borrowing:
        """Return these loans where `holds`, and elsewhere the other ones, or none."""
        tokens = self.tokens * 0.0 if other is None else other.tokens
        rest = self if other is None else other
        return Borrowing(
            tokens=np.where(holds, self.tokens, tokens),
            loan_s=np.where(holds, self.loan_s, 0.0 if other is None else other.loan_s),
            loan_bound_s=np.where(holds, self.loan_bound_s, 0.0 if other is None else other.loan_bound_s),
            rest_s=np.where(holds, self.rest_s, rest.rest_s),
            rest_prompt_s=np.where(holds, self.rest_prompt_s, rest.rest_prompt_s),
            displaced_s=np.where(holds, self.displaced_s, 0.0 if other is None else other.displaced_s),
            lenders=np.where(holds, self.lenders, rest.lenders),
        )


def find_lenders(serving: Serving, held: Mapping[str, int], pooled: Mapping[str, int]) -> list[Lender]:
    """Return the workers that could lend most of the prompt, the longest prefix first.

    `held`, `pooled`: leading blocks on a worker's device, and in its pool.
    """
    if not (serving.prefill.any_lends or serving.decode.any_lends):
        return []
    teams = serving.prefill, serving.decode
    reach = dict(held)
    for name, blocks in pooled.items():
        reach[name] = max(blocks, reach.get(name, 0))
    able: list[tuple[int, WorkerLoad]] = []
    for name, blocks in reach.items():
        load = next((team.loads[team.rows[name]] for team in teams if name in team.rows), None)
        if load is not None and load.lends and blocks:
            able.append((blocks, load))
    counts = Counter[str]()
    lenders: list[Lender] = []
    for blocks, load in sorted(able, key=lambda each: (-each[0], each[1].worker)):
        counts[load.identity] += 1
        if counts[load.identity] <= LENDERS_MAX:
            lenders.append(Lender(load, blocks * load.block_tokens))
    return lenders


def borrow(
    lenders: Sequence[Lender], team: Team, rows: Rows, figures: Figures, own_tokens: Vector, prompt_tokens: int
) -> Borrowing:
    """Return the best loan of each worker, which has `own_tokens` of the prompt already, on its device or pool."""
    nothing = np.zeros(len(rows))
    whole_prompt_s, whole_s = prefill_s(figures, prompt_tokens - own_tokens, prompt_tokens)
    best = Borrowing(nothing, nothing, nothing, whole_s, whole_prompt_s, nothing, np.full(len(rows), -1))
    least_s = whole_s
    loads = team.at(rows)
    is_alike = len(team.identities) == 1
    for number, lender in enumerate(lenders):
        if lender.load.identity not in team.identities:
            continue
        # The last token is always computed.
        tokens = np.maximum(min(lender.tokens, prompt_tokens - 1) - own_tokens, 0.0)
        if not is_alike:
            tokens *= [load.identity == lender.load.identity for load in loads]
        if not tokens.any():
            continue
        name = lender.load.worker
        bandwidth = np.array([load.bandwidths.get(name, load.bandwidth) for load in loads])
        loan_s = ASK_S + tokens * (figures.kv_bytes_per_token / bandwidth + figures.promoted_token_s)
        loan_bound_s = loan_s * [load.pull_bound_ratios.get(name, 1.0) for load in loads]
        rest_prompt_s, rest_s = prefill_s(figures, prompt_tokens - own_tokens - tokens, prompt_tokens)
        bound_s = loan_bound_s + rest_s
        is_faster = (tokens > 0) & (bound_s < least_s)
        least_s = np.where(is_faster, bound_s, least_s)
        displaced_share = np.maximum(1 - figures.pool_tokens_free / np.maximum(tokens, 1.0), 0.0)
        displaced_s = displaced_share * (whole_prompt_s - rest_prompt_s)
        loan = Borrowing(tokens, loan_s, loan_bound_s, rest_s, rest_prompt_s, displaced_s, np.full(len(rows), number))
        best = loan.where(is_faster, best)
    return best
