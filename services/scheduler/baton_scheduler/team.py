"""Live workers of one model and role, with their loads as vectors. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.messages.workers import Role
from baton_scheduler.worker_load import WorkerLoad

Vector = NDArray[np.float64]
Table = NDArray[np.float64]
"""A row for each kind of number, with a column for each worker."""


class Figures(NamedTuple):
    """Attributes of several loads, by which they are judged, as vectors: first those that a placement changes.

    The library knows them by their order (`baton_native.placement.FIGURES`).
    """

    computes_until_s: Vector
    half_interval_s: Vector
    interval_s: Vector
    kv_share: Vector
    next_interval_s: Vector
    slots_lacking: Vector
    tokens_free: Vector
    used_share: Vector
    block_tokens: Vector
    compute_weight: Vector
    context_tokens_max: Vector
    kv_bytes_per_token: Vector
    kv_tokens_max: Vector
    pair_s: Vector
    pool_tokens_free: Vector
    promoted_token_s: Vector
    filed_token_s: Vector
    ready: Vector
    shared_share: Vector
    step_s: Vector
    step_tokens_max: Vector
    token_s: Vector
    bandwidth: Vector


PLACED: Final = Figures._fields.index("block_tokens")
"""Number of figures that a placement changes."""
_attributes = attrgetter(*Figures._fields)
_placed = attrgetter(*Figures._fields[:PLACED])


class Team:
    """Live workers of one role and model, in the order of their names, so that chance decides alike everywhere."""

    def __init__(self) -> None:
        self.loads: list[WorkerLoad] = []
        self.rows: dict[str, int] = {}
        """Worker → its place in `loads`."""
        self.identities: frozenset[str] = frozenset()
        """KV identities of the workers; empty for one that cannot hand over."""
        self.every: Rows = np.arange(0)
        """The places of all workers."""
        self.prompt_tokens_max = self.need_tokens_max = -1
        """Prompt tokens and tokens of KV that every worker can take; -1 if one takes no new attempts."""
        self.digests: frozenset[str] = frozenset()
        """Digests of the workers' models."""
        self.any_lends = False
        """Whether any worker has a KV pool that can lend."""
        self._table = np.empty((len(Figures._fields), 0))
        self._number()

    def add(self, load: WorkerLoad) -> None:
        row = bisect_left(self.loads, load.worker, key=_name)
        self.loads.insert(row, load)
        self._table = np.insert(self._table, row, _attributes(load), axis=1)
        self._number()

    def remove(self, load: WorkerLoad) -> None:
        row = self.rows[load.worker]
        del self.loads[row]
        self._table = np.delete(self._table, row, axis=1)
        self._number()

    def update(self, load: WorkerLoad) -> None:
        """Take over the attributes of a load that was refreshed."""
        row = self.rows[load.worker]
        self._table[:, row] = _attributes(load)
        if load.limits != self._limits[row]:
            self._limits[row] = load.limits
            self._renew_limits()

    def place(self, load: WorkerLoad) -> None:
        """Take over what a placement on a worker has changed."""
        self._table[:PLACED, self.rows[load.worker]] = _placed(load)

    def figures(self) -> Figures:
        """Return the figures of all workers."""
        return self._all

    def table(self, rows: Rows) -> Table:
        """Return the figures of these workers, which are in order: a row for each figure."""
        return self._table if len(rows) == len(self.loads) else self._table.take(rows, axis=1)

    def all_take(self, prompt_tokens: int, need_tokens: int) -> bool:
        """Return whether every worker takes new attempts, and could hold one of this size if it were empty."""
        return prompt_tokens <= self.prompt_tokens_max and need_tokens <= self.need_tokens_max

    def at(self, rows: Rows) -> list[WorkerLoad]:
        """Return the loads at these places."""
        return [self.loads[row] for row in rows.tolist()]

    def _number(self) -> None:
        self.rows = {load.worker: row for row, load in enumerate(self.loads)}
        self.identities = frozenset(load.identity for load in self.loads)
        self.every = np.arange(len(self.loads))
        self._all = Figures(*self._table)
        self._limits = [load.limits for load in self.loads]
        self._renew_limits()

    def _renew_limits(self) -> None:
        limits = self._limits
        self.prompt_tokens_max = min((prompt_tokens_max for prompt_tokens_max, *_ in limits), default=-1)
        self.need_tokens_max = min((kv_tokens_max for _, kv_tokens_max, *_ in limits), default=-1)
        self.digests = frozenset(digest for _, _, digest, _ in limits)
        self.any_lends = any(lends for *_, lends in limits)


Rows = NDArray[np.intp]
"""Places in the `loads` of a team."""


class Serving:
    """Live workers of one model."""

    def __init__(self, loads: Iterable[WorkerLoad] = ()) -> None:
        self.decode, self.prefill = Team(), Team()
        self.teams = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        for load in loads:
            self.teams[load.role].add(load)

    def __iter__(self) -> Iterator[WorkerLoad]:
        for team in self.teams.values():
            yield from team.loads

    def __bool__(self) -> bool:
        return bool(self.decode.loads or self.prefill.loads)

    @property
    def digests(self) -> frozenset[str]:
        """Digests of the model: one, except while it is being replaced by a new version of the same name."""
        return self.decode.digests | self.prefill.digests


def _name(load: WorkerLoad) -> str:
    return load.worker


def prefill_s(load: WorkerLoad, uncached_tokens: int, prompt_tokens: int) -> tuple[float, float]:
    """Return the time of computing the last tokens of a prompt, and the same with the sequences in its steps.

    The library computes the same for all workers of a leg (`native/placement/legs.cpp`).
    """
    steps = -(-uncached_tokens // load.step_tokens_max)
    # end² − start²
    pairs = uncached_tokens * (prompt_tokens + (prompt_tokens - uncached_tokens))
    prompt_s = load.step_s * steps + load.token_s * uncached_tokens + load.pair_s * pairs
    return prompt_s, prompt_s + load.interval_s * steps
