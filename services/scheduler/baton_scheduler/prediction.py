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

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import astuple, replace

from baton.blocks import ID_BYTES
from baton.messages.placement import Candidate, Disaggregation, Place
from baton.messages.workers import Role
from baton_scheduler.lenders import Borrowing, Lender, borrow
from baton_scheduler.team import Figures, Rows, Team, Vector, prefill_s
from baton_scheduler.worker_load import DISPLACED_WEIGHT, WorkerLoad

WAIT_S: Final = 10.0
"""Predicted wait of an attempt on a worker that lacks all the KV it has, or all its slots; in proportion."""
PRESSURE_S: Final = 0.5
"""Cost of decoding where all KV is in use, in proportion: steps are longer, cached prefixes are evicted, and the next
long prompt finds no room."""
MEMORY_S: Final = 10.0
"""Cost of taking all KV of a worker that decodes, in proportion: an attempt takes less where it shares its prefix."""
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

    held: Mapping[str, int] = msgspec.field(default_factory=dict[str, int])
    speculative: Mapping[str, int] = msgspec.field(default_factory=dict[str, int])
    """Speculative leading blocks: prompts already placed there; their prefill time is in its queue already."""
    pooled: Mapping[str, int] = msgspec.field(default_factory=dict[str, int])
    """Leading blocks on the device or in the pool, where the pool adds some."""
    filed: Mapping[str, int] = msgspec.field(default_factory=dict[str, int])
    """Leading blocks on the device, in the pool or in its file, where the file adds some."""


class Stored(NamedTuple):
    """What workers have beyond their devices, down to a tier: one element per worker."""

    tokens: Vector
    """Prompt tokens that the device lacks."""
    fetching_s: Vector
    """Time to bring them to the device."""


class Room(msgspec.Struct, frozen=True, eq=False):
    """What an attempt finds on some workers of a team and takes from them, whatever it does there.

    One element per worker.
    """

    team: Team
    rows: Rows
    """Which workers of the team."""
    places: Mapping[str, int]
    """Worker → its place in the team now: later, workers may have joined or left."""
    figures: Figures
    waiting_s: Vector
    pressure_s: Vector
    cached_tokens: Vector
    """Prompt tokens on the device, now or once speculative blocks are computed."""
    stored: tuple[Stored, ...]
    """Further ones in the pool, then in pool and file; empty: no worker has any."""


class Leg(Room, frozen=True, eq=False):
    """Part of each worker of a team in a placement: one element per worker. `cached_tokens` has what is promoted."""

    promoted_tokens: Vector | None
    """Part of `cached_tokens` that is promoted from the pool or its file; None: no worker has any."""
    cost_s: Vector
    """Cost of this part; without the pull where KV is pulled."""

    def __len__(self) -> int:
        return len(self.rows)

    def load(self, index: int) -> WorkerLoad:
        return self.team.loads[self.rows.item(index)]

    def promoted(self, index: int) -> int:
        """Return the tokens that a worker promotes from its pool."""
        return 0 if self.promoted_tokens is None else int(self.promoted_tokens.item(index))


class Computing(Leg, frozen=True, eq=False):
    """Workers that compute the prompt, and decode unless they are prefill workers."""

    queue_s: Vector
    """Time until the prompt's turn: of the prompts that are placed there already, or of the present step."""
    own_s: Vector
    """Time of the prompt itself: of the loan, of the promotion, and of computing the rest."""
    promotion_s: Vector | None
    """Part of `own_s` in which tokens are promoted, and read for that."""
    borrowing: Borrowing | None = None
    """Loans that are part of it; None: no worker could borrow."""

    def borrowed(self, index: int) -> int:
        """Return the tokens that a worker borrows."""
        return 0 if self.borrowing is None else int(self.borrowing.tokens.item(index))

    def bound_s(self, index: int) -> float:
        """Return the upper bound of a worker's `queue_s` and `own_s`."""
        ratio = self.load(index).bound_ratio
        bound_s = ratio * (self.queue_s.item(index) + self.own_s.item(index))
        if self.borrowing is not None:
            loan_s = ratio * self.borrowing.loan_s.item(index)
            bound_s += max(self.borrowing.loan_bound_s.item(index) - loan_s, 0.0)
        return bound_s

    def terms(self) -> dict[str, Vector]:
        """Return the parts of the cost by name."""
        own = {"waiting_s": self.waiting_s, "queue_s": self.queue_s, "own_s": self.own_s}
        if self.promotion_s is not None:
            own |= {"own_s": self.own_s - self.promotion_s, "promotion_s": self.promotion_s}
        if self.borrowing is not None:
            own |= {"own_s": own["own_s"] - self.borrowing.loan_s, "loan_s": self.borrowing.loan_s}
        others_s = self.cost_s - sum(own.values()) - self.pressure_s
        return {**own, "others_s": others_s, "pressure_s": self.pressure_s}


class Receiving(Leg, frozen=True, eq=False):
    """Decode workers that pull the KV."""

    missing_bytes: Vector
    pull_s: Vector
    """Time of the pull at the bandwidth that the worker has with most peers."""

    def terms(self) -> dict[str, Vector]:
        """Return the parts of the cost by name, and the time of the pull, of which only the tail is added to a pair."""
        interval_s = self.cost_s - self.waiting_s - self.pressure_s
        own = {"waiting_s": self.waiting_s, "interval_s": interval_s, "pressure_s": self.pressure_s}
        return {**own, "pull_s": self.pull_s}


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
        self._blocks = match.held
        if match.speculative:
            longer = {worker: max(blocks, match.held.get(worker, 0)) for worker, blocks in match.speculative.items()}
            self._blocks = {**match.held, **longer}
        self._pooled = match.pooled
        self._filed = match.filed
        self._blocks_of: dict[tuple[int, int], Vector] = {}
        """Blocks that each worker of a team holds, down to a tier: by the ids of the team and of what is known."""
        self._output_tokens = min(demand.output_tokens_max, output_headroom_tokens)
        # Arrays without dimensions: a plain number takes as long to convert as an operation on a vector does.
        self._now_s = np.array(now_s)
        self._prompt_tokens = np.array(float(demand.prompt_tokens))
        self._cached_tokens_max = np.array(demand.prompt_tokens - 1.0)
        """The last token is always computed, to sample from it."""

    def need_tokens(self, role: Role) -> int:
        """Return the tokens for which a worker's ledger reserves KV, before rounding to its blocks."""
        # Prefill's sampled token is discarded and gets no place.
        return self.demand.prompt_tokens + (0 if role is Role.PREFILL else self._output_tokens)

    def room(self, team: Team, rows: Rows, role: Role) -> Room:
        figures = team.figures(rows)
        cached_tokens = self._cached_tokens(team, rows, figures, self._blocks)
        stored: list[Stored] = []
        if self._pooled or self._filed:
            reach = self._cached_tokens(team, rows, figures, self._pooled)
            pooled_tokens = np.maximum(reach - cached_tokens, 0.0)
            stored.append(Stored(pooled_tokens, pooled_tokens * figures.promoted_token_s))
            if self._filed:
                reach = self._cached_tokens(team, rows, figures, self._filed)
                filed_tokens = np.maximum(reach - cached_tokens - pooled_tokens, 0.0)
                fetching_s = stored[0].fetching_s + filed_tokens * figures.filed_token_s
                stored.append(Stored(pooled_tokens + filed_tokens, fetching_s))
        shared_tokens = cached_tokens * figures.shared_share
        waiting_s = self._waiting_s(figures, role, shared_tokens)
        pressure_s = _pressure_s(figures, shared_tokens) if role is Role.DECODE else np.zeros(len(rows))
        return Room(team, rows, team.rows, figures, waiting_s, pressure_s, cached_tokens, tuple(stored))

    def compute(self, room: Room) -> Computing:
        figures, prompt_tokens = room.figures, self._prompt_tokens
        # A prompt enters with the next step: on average, half of the present one is left.
        queue_s = np.maximum(figures.computes_until_s - self._now_s, figures.half_interval_s)
        prompt_s, own_s = prefill_s(figures, prompt_tokens - room.cached_tokens, prompt_tokens)
        promoted_tokens = promotion_s = None
        for tokens, fetching_s in room.stored:
            uncached_tokens = prompt_tokens - room.cached_tokens - tokens
            rest_prompt_s, rest_s = prefill_s(figures, uncached_tokens, prompt_tokens)
            is_faster = fetching_s + rest_s < own_s
            promoted_tokens = np.where(is_faster, tokens, 0.0 if promoted_tokens is None else promoted_tokens)
            promotion_s = np.where(is_faster, fetching_s, 0.0 if promotion_s is None else promotion_s)
            prompt_s = np.where(is_faster, rest_prompt_s, prompt_s)
            own_s = np.where(is_faster, fetching_s + rest_s, own_s)
        borrowing = None
        if self._lenders:
            nothing = np.zeros(len(room.rows))
            # A borrower promotes what its own pool has, too.
            for tokens, fetching_s in room.stored or (Stored(nothing, nothing),):
                own_tokens = room.cached_tokens + tokens
                loan = borrow(self._lenders, room.team, room.rows, figures, own_tokens, self.demand.prompt_tokens)
                pays = (loan.tokens > 0) & (fetching_s + loan.loan_bound_s + loan.rest_s < own_s)
                if promoted_tokens is not None and promotion_s is not None:
                    promoted_tokens = np.where(pays, tokens, promoted_tokens)
                    promotion_s = np.where(pays, fetching_s, promotion_s)
                prompt_s = np.where(pays, loan.rest_prompt_s, prompt_s)
                own_s = np.where(pays, fetching_s + loan.loan_s + loan.rest_s, own_s)
                borrowing = loan.where(pays, borrowing)
        cost_s = room.waiting_s + queue_s + own_s + figures.compute_weight * prompt_s + room.pressure_s
        if borrowing is not None:
            cost_s += DISPLACED_WEIGHT * borrowing.displaced_s
        found = astuple(_promoting(room, promoted_tokens))
        return Computing(
            *found,
            promoted_tokens=promoted_tokens,
            cost_s=cost_s,
            queue_s=queue_s,
            own_s=own_s,
            promotion_s=promotion_s,
            borrowing=borrowing,
        )

    def lender(self, leg: Computing, index: int) -> str:
        """Return the worker that lends to one of a leg; empty: none."""
        if not leg.borrowed(index):
            return ""
        assert leg.borrowing is not None
        return self._lenders[leg.borrowing.lenders.item(index)].load.worker

    def free(self, leg: Computing) -> int:
        """Return the number of workers that have room for the attempt, and no prompt ahead."""
        return int(np.count_nonzero((leg.waiting_s <= 0) & (leg.figures.computes_until_s <= self._now_s)))

    def receive(self, room: Room) -> Receiving:
        figures = room.figures
        promoted_tokens = None
        saved_s: Vector | float = 0.0
        for tokens, fetching_s in room.stored:
            here_s = tokens * figures.kv_bytes_per_token / figures.bandwidth - fetching_s
            is_faster = here_s > saved_s
            promoted_tokens = np.where(is_faster, tokens, 0.0 if promoted_tokens is None else promoted_tokens)
            saved_s = np.maximum(here_s, saved_s)
        found = _promoting(room, promoted_tokens)
        missing_bytes = (self._prompt_tokens - found.cached_tokens) * figures.kv_bytes_per_token
        cost_s = room.waiting_s + figures.next_interval_s + room.pressure_s
        return Receiving(
            *astuple(found),
            promoted_tokens=promoted_tokens,
            cost_s=cost_s,
            missing_bytes=missing_bytes,
            pull_s=missing_bytes / figures.bandwidth,
        )

    def whole(self, leg: Computing, index: int) -> Candidate:
        """Return the candidate that computes the prompt where it decodes."""
        load, waiting_s, queue_s = leg.load(index), leg.waiting_s.item(index), leg.queue_s.item(index)
        cached_tokens, promoted_tokens = int(leg.cached_tokens.item(index)), leg.promoted(index)
        return Candidate(
            decode=load.worker,
            cached_tokens=cached_tokens,
            decode_cached_tokens=cached_tokens,
            promoted_tokens=promoted_tokens,
            decode_promoted_tokens=promoted_tokens,
            borrowed_tokens=leg.borrowed(index),
            lender=self.lender(leg, index),
            speculative_tokens=self._speculative_tokens(load, cached_tokens - promoted_tokens),
            predicted_ttft_s=waiting_s + (queue_s + leg.own_s.item(index)),
            ttft_bound_s=waiting_s + leg.bound_s(index),
            predicted_token_interval_s=load.answer_interval_s,
            waiting_s=waiting_s,
            queue_s=queue_s,
            cost_s=leg.cost_s.item(index),
        )

    def pair(self, source: Computing, source_index: int, sink: Receiving, sink_index: int) -> Candidate:
        """Return the candidate that prefills on one worker and decodes on another."""
        prefill, decode = source.load(source_index), sink.load(sink_index)
        queue_s, own_s = source.queue_s.item(source_index), source.own_s.item(source_index)
        missing_bytes = sink.missing_bytes.item(sink_index)
        left_s = tail_s(prefill, decode, missing_bytes, own_s)
        left_bound_s = tail_s(prefill, decode, missing_bytes * decode.pull_bound_ratios.get(prefill.worker, 1.0), own_s)
        interval_s = decode.half_interval_s + decode.next_interval_s
        waiting_s = max(source.waiting_s.item(source_index), sink.waiting_s.item(sink_index))
        cached_tokens, promoted_tokens = int(source.cached_tokens.item(source_index)), source.promoted(source_index)
        return Candidate(
            decode=decode.worker,
            prefill=prefill.worker,
            cached_tokens=cached_tokens,
            decode_cached_tokens=int(sink.cached_tokens.item(sink_index)),
            promoted_tokens=promoted_tokens,
            decode_promoted_tokens=sink.promoted(sink_index),
            borrowed_tokens=source.borrowed(source_index),
            lender=self.lender(source, source_index),
            speculative_tokens=self._speculative_tokens(prefill, cached_tokens - promoted_tokens),
            predicted_ttft_s=waiting_s + (queue_s + own_s) + left_s + interval_s,
            ttft_bound_s=waiting_s + source.bound_s(source_index) + left_bound_s + decode.bound_ratio * interval_s,
            predicted_token_interval_s=decode.answer_interval_s,
            waiting_s=waiting_s,
            queue_s=queue_s,
            tail_s=left_s,
            cost_s=source.cost_s.item(source_index) + sink.cost_s.item(sink_index) + left_s,
        )

    def _cached_tokens(self, team: Team, rows: Rows, figures: Figures, known: Mapping[str, int]) -> Vector:
        """Return the prompt tokens of which workers are known to hold the leading blocks."""
        key = id(team), id(known)
        blocks = self._blocks_of.get(key)
        if blocks is None:
            row_of = team.rows.get
            blocks = self._blocks_of[key] = np.zeros(len(team.loads))
            for worker, count in known.items():
                if (row := row_of(worker)) is not None:
                    blocks[row] = count
        if rows is not team.every:
            blocks = blocks[rows]
        return np.minimum(blocks * figures.block_tokens, self._cached_tokens_max)

    def _waiting_s(self, figures: Figures, role: Role, shared_tokens: Vector) -> Vector:
        """Return the predicted wait until a worker has room for the attempt: 0 where it has.

        Tokens of the prompt that the attempt shares with others take no room.
        """
        need_tokens = np.array(float(self.need_tokens(role)))
        kv = (need_tokens - shared_tokens - figures.tokens_free) / figures.kv_tokens_max
        return WAIT_S * np.maximum(kv, figures.slots_lacking)

    def _speculative_tokens(self, load: WorkerLoad, cached_tokens: int) -> int:
        return max(0, cached_tokens - self._held.get(load.worker, 0) * load.block_tokens)


def _promoting(room: Room, promoted_tokens: Vector | None) -> Room:
    """Return a room with promoted tokens among its cached ones."""
    return room if promoted_tokens is None else replace(room, cached_tokens=room.cached_tokens + promoted_tokens)


def _pressure_s(figures: Figures, shared_tokens: Vector) -> Vector:
    """Return the cost of the KV in use, and of what the attempt takes beyond the worker where it shares most."""
    shared = shared_tokens / figures.kv_tokens_max
    return PRESSURE_S * figures.kv_share + MEMORY_S * (np.maximum.reduce(shared, initial=0.0) - shared)


def tail_s(prefill: WorkerLoad, decode: WorkerLoad, missing_bytes: float, own_s: float) -> float:
    """Return what is left of a pull when the prompt is computed, which takes `own_s`: the rest moves in that time."""
    left_s = missing_bytes / decode.bandwidths.get(prefill.worker, decode.bandwidth) - own_s
    return left_s if left_s > 0 else 0.0
