"""Predictions for one attempt on any worker, and the cost that ranks them. Pure.

The prediction is plain time, which is reported and compared with what happens:

    time to first token    wait for room + prompts queued before it + its own prompt                 aggregated
                           the same on the prefill worker + tail of the pull                         a pair
                           + half of decode's present step + its next one

The tail of a pull is what is left of it when the prompt is computed: KV moves while prefill computes.

What a worker has in its pool only is promoted, and what it has in the pool's file only is read and promoted, where
that takes less time than to compute it, or to pull it. What only another worker's pool has is borrowed where that takes
less time than to compute it (`lenders.py`).

Half of the actual times are above a prediction. Its bound is two standard deviations of the workers' samples above it.

The cost adds what the placement does to other requests, in seconds as well; its weights are in `worker_load.py`. It
leaves out the half step, with which placements were no better (`docs/replay.md`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from baton_native import placement

from baton.blocks import ID_BYTES
from baton.messages.placement import Candidate, Disaggregation, Place
from baton.messages.workers import Role
from baton_scheduler.lenders import ASK_S, Lender, find_links
from baton_scheduler.team import Figures, Rows, Table, Team, Vector
from baton_scheduler.worker_load import DISPLACED_WEIGHT, WorkerLoad

WAIT_S: Final = 10.0
"""Predicted wait of an attempt on a worker that lacks all the KV it has, or all its slots; in proportion."""
PRESSURE_S: Final = 0.5
"""Cost of decoding where all KV is in use, in proportion: steps are longer, cached prefixes are evicted, and the next
long prompt finds no room."""
MEMORY_S: Final = 10.0
"""Cost of taking all KV of a worker that decodes, in proportion: an attempt takes less where it shares its prefix."""
PULL_OVERLAP: Final = 1.0
"""Share of the prompt's time in which KV moves already."""
SESSION_BLOCKS: Final = 32
"""Blocks at its beginning that tell a conversation from others, of 32 tokens each: about a system prompt."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
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
    session: str = ""
    """Conversation that the request belongs to; empty where that is unknown."""


def session_of(place: Place) -> str:
    """Return the name of a request's conversation; without one, how its prompt begins."""
    # The id of a block stands for all of the prompt up to there.
    begins = place.blocks[: SESSION_BLOCKS * ID_BYTES][-ID_BYTES:]
    return place.session or begins.hex()


class PrefixMatch(msgspec.Struct, frozen=True):
    """The index's answer: worker → leading blocks of the prompt, where there are any."""

    held: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    speculative: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Speculative leading blocks: prompts already placed there; their prefill time is in its queue already."""
    pooled: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Leading blocks on the device or in the pool, where the pool adds some."""
    filed: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Leading blocks on the device, in the pool or in its file, where the file adds some."""


WAITING, PRESSURE, CACHED, COST = range(4)
"""Rows of every leg's table, in the order of `native/placement/legs.h`;"""
QUEUE, OWN, PROMOTED, PROMOTION, BORROWED, LOAN, LOAN_BOUND, LENDER = range(4, 12)
"""those after them where the prompt is computed: `OWN` is the time of the prompt itself, its loan and promotion
included;"""
MISSING, PULL, PULLED_PROMOTED = range(4, 7)
"""and those where the KV is pulled."""


class Leg(msgspec.Struct, frozen=True, eq=False):
    """Part of each worker of a team in a placement: vectors have one element per worker."""

    team: Team
    rows: Rows
    """Which workers of the team."""
    places: Mapping[str, int]
    """Worker → its place in the team now: later, workers may have joined or left."""
    table: Table
    """Figures of the workers, see `figures`."""
    columns: Table
    """A column for each worker, with the rows above. Those of promotions and loans exist where there can be any."""
    promotes: bool
    """Whether any worker is known to have more of the prompt in its pool or file."""

    def __len__(self) -> int:
        return len(self.rows)

    def load(self, index: int) -> WorkerLoad:
        return self.team.loads[self.rows.item(index)]

    def column(self, index: int) -> list[float]:
        """Return the numbers of one worker, in the order of the rows above."""
        return self.columns[:, index].tolist()

    @property
    def figures(self) -> Figures:
        return Figures(*self.table)

    @property
    def waiting_s(self) -> Vector:
        return self.columns[WAITING]

    @property
    def cached_tokens(self) -> Vector:
        """Prompt tokens on the device, now or once speculative blocks are computed, and what is promoted."""
        return self.columns[CACHED]

    @property
    def cost_s(self) -> Vector:
        """Cost of this part; without the pull where KV is pulled."""
        return self.columns[COST]

    @abstractmethod
    def terms(self, indexes: Sequence[int]) -> tuple[tuple[str, ...], bytes]:
        """Return the parts of the cost by name, and their values for these workers: float32, a term's in a row."""


class Computing(Leg, frozen=True, eq=False):
    """Workers that compute the prompt, and decode unless they are prefill workers."""

    lenders: Sequence[Lender]
    """Workers that could lend; empty: no worker could borrow."""

    @property
    def queue_s(self) -> Vector:
        """Time until the prompt's turn: of the prompts that are placed there already, or of the present step."""
        return self.columns[QUEUE]

    def borrowed(self, column: Sequence[float]) -> tuple[int, str]:
        """Return the tokens that a worker borrows, and from which; none: empty."""
        if not (self.lenders and column[BORROWED]):
            return 0, ""
        return int(column[BORROWED]), self.lenders[int(column[LENDER])].load.worker

    def bound_s(self, load: WorkerLoad, column: Sequence[float]) -> float:
        """Return the upper bound of a worker's `queue_s` and `own_s`."""
        ratio = load.bound_ratio
        bound_s = ratio * (column[QUEUE] + column[OWN])
        if self.lenders:
            bound_s += max(column[LOAN_BOUND] - ratio * column[LOAN], 0.0)
        return bound_s

    def terms(self, indexes: Sequence[int]) -> tuple[tuple[str, ...], bytes]:
        return placement.computing_terms(self.columns, self.promotes, bool(self.lenders), indexes)


class Receiving(Leg, frozen=True, eq=False):
    """Decode workers that pull the KV."""

    def terms(self, indexes: Sequence[int]) -> tuple[tuple[str, ...], bytes]:
        return placement.receiving_terms(self.columns, self.promotes, indexes)


class Prediction:
    """Predicted times and costs of one demand on the workers at one instant."""

    def __init__(
        self,
        demand: Demand,
        match: PrefixMatch,
        output_headroom_tokens: int,
        now_s: float,
        lenders: Sequence[Lender] = (),
    ) -> None:
        self.demand = demand
        self._lenders = lenders
        self._held = match.held
        blocks = match.held
        if match.speculative:
            longer = {worker: max(blocks, match.held.get(worker, 0)) for worker, blocks in match.speculative.items()}
            blocks = {**match.held, **longer}
        self._tiers = [blocks]
        """Worker → leading blocks, down to each tier of which anything is known."""
        if match.pooled or match.filed:
            self._tiers.append(match.pooled)
        if match.filed:
            self._tiers.append(match.filed)
        self._blocks_of: dict[int, Table] = {}
        """Blocks that each worker of a team holds, a row for each tier: by the team's id."""
        self._output_tokens = min(demand.output_tokens_max, output_headroom_tokens)
        self._now_s = now_s

    def need_tokens(self, role: Role) -> int:
        """Return the tokens for which a worker's ledger reserves KV, before rounding to its blocks."""
        # Prefill's sampled token is discarded and gets no place.
        return self.demand.prompt_tokens + (0 if role is Role.PREFILL else self._output_tokens)

    def compute(self, team: Team, rows: Rows, role: Role) -> Computing:
        """Return these workers of a team as those that compute the prompt, and decode unless they are prefill
        workers."""
        table, lenders = team.table(rows), self._lenders
        lent_tokens, bandwidth, bound_ratio = _NO_LOANS
        height = LENDER + 1 if lenders else PROMOTION + 1 if len(self._tiers) > 1 else OWN + 1
        if lenders:
            bandwidth, bound_ratio = find_links(lenders, team, rows)
            lent_tokens = [each.tokens for each in lenders]
        columns = np.empty((height, len(rows)))
        placement.compute(
            columns,
            table,
            self._blocks(team, rows),
            self.demand.prompt_tokens,
            self.need_tokens(role),
            self._now_s,
            role is Role.DECODE,
            WAIT_S,
            PRESSURE_S,
            MEMORY_S,
            DISPLACED_WEIGHT,
            ASK_S,
            lent_tokens,
            bandwidth,
            bound_ratio,
        )
        return Computing(team, rows, team.rows, table, columns, len(self._tiers) > 1, lenders)

    def receive(self, team: Team, rows: Rows) -> Receiving:
        """Return these workers of a team as those that pull the KV, and decode."""
        table, promotes = team.table(rows), len(self._tiers) > 1
        columns = np.empty((PULLED_PROMOTED + 1 if promotes else PULL + 1, len(rows)))
        placement.receive(
            columns,
            table,
            self._blocks(team, rows),
            self.demand.prompt_tokens,
            self.need_tokens(Role.DECODE),
            WAIT_S,
            PRESSURE_S,
            MEMORY_S,
        )
        return Receiving(team, rows, team.rows, table, columns, promotes)

    def free(self, leg: Computing) -> int:
        """Return the number of workers that have room for the attempt, and no prompt ahead."""
        return int(np.count_nonzero((leg.waiting_s <= 0) & (leg.figures.computes_until_s <= self._now_s)))

    def whole(self, leg: Computing, index: int) -> Candidate:
        """Return the candidate that computes the prompt where it decodes."""
        load, column = leg.load(index), leg.column(index)
        waiting_s, queue_s = column[WAITING], column[QUEUE]
        cached_tokens, promoted_tokens = int(column[CACHED]), int(column[PROMOTED]) if leg.promotes else 0
        borrowed_tokens, lender = leg.borrowed(column)
        return Candidate(
            decode=load.worker,
            cached_tokens=cached_tokens,
            decode_cached_tokens=cached_tokens,
            promoted_tokens=promoted_tokens,
            decode_promoted_tokens=promoted_tokens,
            borrowed_tokens=borrowed_tokens,
            lender=lender,
            speculative_tokens=self._speculative_tokens(load, cached_tokens - promoted_tokens),
            predicted_ttft_s=waiting_s + (queue_s + column[OWN]),
            ttft_bound_s=waiting_s + leg.bound_s(load, column),
            predicted_token_interval_s=load.answer_interval_s,
            waiting_s=waiting_s,
            queue_s=queue_s,
            cost_s=column[COST],
        )

    def pair(self, source: Computing, source_index: int, sink: Receiving, sink_index: int) -> Candidate:
        """Return the candidate that prefills on one worker and decodes on another."""
        prefill, computes = source.load(source_index), source.column(source_index)
        decode, pulls = sink.load(sink_index), sink.column(sink_index)
        queue_s, own_s, missing_bytes = computes[QUEUE], computes[OWN], pulls[MISSING]
        left_s = tail_s(prefill, decode, missing_bytes, own_s)
        left_bound_s = tail_s(prefill, decode, missing_bytes * decode.pull_bound_ratio(prefill.worker), own_s)
        interval_s = decode.half_interval_s + decode.next_interval_s
        waiting_s = max(computes[WAITING], pulls[WAITING])
        cached_tokens, promoted_tokens = int(computes[CACHED]), int(computes[PROMOTED]) if source.promotes else 0
        borrowed_tokens, lender = source.borrowed(computes)
        return Candidate(
            decode=decode.worker,
            prefill=prefill.worker,
            cached_tokens=cached_tokens,
            decode_cached_tokens=int(pulls[CACHED]),
            promoted_tokens=promoted_tokens,
            decode_promoted_tokens=int(pulls[PULLED_PROMOTED]) if sink.promotes else 0,
            borrowed_tokens=borrowed_tokens,
            lender=lender,
            speculative_tokens=self._speculative_tokens(prefill, cached_tokens - promoted_tokens),
            predicted_ttft_s=waiting_s + (queue_s + own_s) + left_s + interval_s,
            ttft_bound_s=waiting_s + source.bound_s(prefill, computes) + left_bound_s + decode.bound_ratio * interval_s,
            predicted_token_interval_s=decode.answer_interval_s,
            waiting_s=waiting_s,
            queue_s=queue_s,
            tail_s=left_s,
            cost_s=computes[COST] + pulls[COST] + left_s,
        )

    def _blocks(self, team: Team, rows: Rows) -> Table:
        """Return the leading blocks that workers are known to hold, a row for each tier."""
        blocks = self._blocks_of.get(id(team))
        if blocks is None:
            blocks = self._blocks_of[id(team)] = np.empty((len(self._tiers), len(team.loads)))
            placement.count_blocks(self._tiers, team.rows, blocks)
        return blocks if len(rows) == len(team.loads) else blocks.take(rows, axis=1)

    def _speculative_tokens(self, load: WorkerLoad, cached_tokens: int) -> int:
        return max(0, cached_tokens - self._held.get(load.worker, 0) * load.block_tokens)


def tail_s(prefill: WorkerLoad, decode: WorkerLoad, missing_bytes: float, own_s: float) -> float:
    """Return what is left of a pull when the prompt is computed, which takes `own_s`: the rest moves in that time."""
    left_s = missing_bytes / decode.bandwidths.get(prefill.worker, decode.bandwidth) - PULL_OVERLAP * own_s
    return left_s if left_s > 0 else 0.0


_NO_LOANS: Final[tuple[list[int], Vector, Vector]] = ([], np.empty(0), np.empty(0))
