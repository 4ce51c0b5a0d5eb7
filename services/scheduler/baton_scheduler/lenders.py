"""Loans between KV pools in predictions: which workers could lend a prefix, and their links. Pure.

A loan counts only where its upper bound is less than the time of computing its tokens. The borrower gives it up when it
takes longer than computing (`baton.worker.loans`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from baton_scheduler.team import Rows, Serving, Team, Vector
from baton_scheduler.worker_load import WorkerLoad

ASK_S: Final = 0.005
"""Time to ask for a loan, and of the engine's steps until its blocks are promised."""
LENDERS_MAX: Final = 4
"""Lenders considered of each KV identity: those with the longest prefixes."""


class Lender(msgspec.Struct, frozen=True, eq=False):
    """A worker whose KV pool could lend the first `tokens` of the prompt."""

    load: WorkerLoad
    tokens: int


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


def find_links(lenders: Sequence[Lender], team: Team, rows: Rows) -> tuple[Vector, Vector]:
    """Return bandwidth and bound ratio of a pull from each lender by each worker, flat; bandwidth 0: it cannot lend
    there."""
    loads = team.at(rows)
    bandwidth: list[float] = []
    bound_ratio: list[float] = []
    for lender in lenders:
        name, identity = lender.load.worker, lender.load.identity
        bandwidth += [load.bandwidths.get(name, load.bandwidth) if load.identity == identity else 0.0 for load in loads]
        bound_ratio += [load.pull_bound_ratio(name) for load in loads]
    return np.array(bandwidth), np.array(bound_ratio)
