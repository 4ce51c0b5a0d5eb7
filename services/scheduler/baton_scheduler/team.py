"""Live workers of one model and role, with their loads as vectors. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.messages.workers import Role
from baton_scheduler.worker_load import WorkerLoad

Vector = NDArray[np.float64]


class Figures(NamedTuple):
    """Attributes of several loads, by which they are judged, as vectors."""

    block_tokens: Vector
    compute_weight: Vector
    computes_until_s: Vector
    context_tokens_max: Vector
    half_interval_s: Vector
    interval_s: Vector
    kv_bytes_per_token: Vector
    kv_share: Vector
    kv_tokens_max: Vector
    next_interval_s: Vector
    pair_s: Vector
    pool_tokens_free: Vector
    promoted_token_s: Vector
    filed_token_s: Vector
    ready: Vector
    shared_share: Vector
    slots_lacking: Vector
    step_s: Vector
    step_tokens_max: Vector
    token_s: Vector
    tokens_free: Vector
    bandwidth: Vector
    used_share: Vector


_attributes = attrgetter(*Figures._fields)


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

    def figures(self, rows: Rows | None = None) -> Figures:
        """Return the figures of these workers, which are in order, or of all."""
        return self._all if rows is None or len(rows) == len(self.loads) else Figures(*self._table[:, rows])

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
        self.prompt_tokens_max = min((prompt_tokens_max for prompt_tokens_max, _, _ in limits), default=-1)
        self.need_tokens_max = min((kv_tokens_max for _, kv_tokens_max, _ in limits), default=-1)
        self.digests = frozenset(digest for _, _, digest in limits)


Rows = NDArray[np.intp]
"""Places in the `loads` of a team."""


class Serving:
    """Live workers of one model."""

    def __init__(self, loads: Iterable[WorkerLoad] = ()) -> None:
        self.teams = {role: Team() for role in Role}
        for load in loads:
            self.teams[load.role].add(load)

    def __iter__(self) -> Iterator[WorkerLoad]:
        for team in self.teams.values():
            yield from team.loads

    def __bool__(self) -> bool:
        return bool(self.teams[Role.DECODE].loads or self.teams[Role.PREFILL].loads)

    @property
    def digests(self) -> frozenset[str]:
        """Digests of the model: one, except while it is being replaced by a new version of the same name."""
        return self.teams[Role.DECODE].digests | self.teams[Role.PREFILL].digests


def _name(load: WorkerLoad) -> str:
    return load.worker


Number = TypeVar("Number", float, Vector, covariant=True)


class Rated(Protocol[Number]):
    """What the time of a prompt depends on: of one load, or of several as vectors."""

    @property
    def step_s(self) -> Number: ...
    @property
    def step_tokens_max(self) -> Number: ...
    @property
    def token_s(self) -> Number: ...
    @property
    def pair_s(self) -> Number: ...
    @property
    def interval_s(self) -> Number: ...


def prefill_s(rated: Rated[Number], uncached_tokens: Number, prompt_tokens: int) -> tuple[Number, Number]:
    """Return the time of computing the last tokens of a prompt, and the same with the sequences in its steps."""
    cached_tokens = prompt_tokens - uncached_tokens
    steps = -(-uncached_tokens // rated.step_tokens_max)
    pairs = prompt_tokens * prompt_tokens - cached_tokens * cached_tokens
    prompt_s = rated.step_s * steps + rated.token_s * uncached_tokens + rated.pair_s * pairs
    return prompt_s, prompt_s + rated.interval_s * steps
