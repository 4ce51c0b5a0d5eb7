"""Predicted times and costs of placements, and their ranking. Tables are arrays of float64 in C order.

A table of figures has a row for each of `FIGURES`, a leg's table the rows of `native/placement/legs.h`; both have a
column for each worker. Everything raises ValueError for tables that do not fit each other, and TypeError for other
arrays.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Table: TypeAlias = NDArray[np.float64]
Option: TypeAlias = tuple[float, int, int, int]
"""Used share of the worker that decodes; number of the leg or pair of legs, in the order in which they were added;
columns of the worker that computes the prompt, and of the one that pulls, -1: the same one decodes."""

FIGURES: tuple[str, ...]

def count_blocks(tiers: list[dict[str, int]], rows: dict[str, int], blocks: Table) -> None:
    """Fill a table with the leading blocks that workers are known to hold: a row for each tier.

    `rows`: worker → its column; others are left out.
    """

def compute(
    leg: Table,
    figures: Table,
    blocks: Table,
    prompt_tokens: float,
    need_tokens: float,
    now_s: float,
    decodes: bool,
    wait_s: float,
    pressure_s: float,
    memory_s: float,
    displaced: float,
    ask_s: float,
    lent_tokens: Sequence[float],
    bandwidth: Table,
    bound_ratio: Table,
) -> None:
    """Fill a leg that computes the prompt: 6 rows, 8 with what is promoted, 12 with loans too.

    `blocks`: leading blocks on the device, then down to the pool, then down to its file. `bandwidth`, `bound_ratio`: of
    each lender to each worker, flat; bandwidth 0: it cannot lend there.
    """

def receive(
    leg: Table,
    figures: Table,
    blocks: Table,
    prompt_tokens: float,
    need_tokens: float,
    wait_s: float,
    pressure_s: float,
    memory_s: float,
) -> None:
    """Fill a leg that pulls the KV: 6 rows, 7 with what is promoted."""

def shortlist(leg: Table, count: int, tie_share: float, tie_s: float) -> tuple[list[int], bool]:
    """Return the columns of the lowest costs, the best first; or all near-ties, in order, and True if these are
    more."""

def shortlist_pulls(leg: Table, own_s: float, count: int, tie_share: float, tie_s: float) -> tuple[list[int], bool]:
    """Return the same of a leg that pulls the KV, with what is left of each pull after `own_s`, the time of the
    prompt."""

def computing_terms(leg: Table, promotes: bool, lends: bool, workers: Sequence[int]) -> tuple[tuple[str, ...], bytes]:
    """Return the names of the terms of the cost, and their values for these workers: float32, a term's in a row."""

def receiving_terms(leg: Table, promotes: bool, workers: Sequence[int]) -> tuple[tuple[str, ...], bytes]:
    """Return the same of a leg that pulls the KV, with the time of the pull, of which only the tail is added to a
    pair."""

class Options:
    """The placements that shortlisted workers make. False where there is none."""

    def __bool__(self) -> bool: ...
    def add_wholes(self, leg: Table, figures: Table, workers: Sequence[int]) -> None: ...
    def add_pairs(
        self,
        source: Table,
        sink: Table,
        sink_figures: Table,
        sources: Sequence[int],
        sinks: Sequence[int],
        bandwidth: Sequence[float],
        overlap: float,
    ) -> None:
        """Add all pairs. `bandwidth`: of each sink with each source, a sink's in a row; 0: these two make no pair.

        `overlap`: share of the prompt's time in which KV moves already.
        """

    def rank(
        self, tie_share: float, tie_s: float, count: int
    ) -> tuple[list[Option], list[Option], Option | None, Option | None]:
        """Return the near-ties with the most cached tokens and least transfers; the `count` lowest costs, the best
        first; the best without a transfer; the best with one. Raises ValueError where there is no option."""
