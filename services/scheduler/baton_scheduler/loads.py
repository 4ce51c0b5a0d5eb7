"""Loads of the live workers: their newest heartbeats, and what was placed on them since. Pure.

A placement counts as a soft placement until a heartbeat accounts for it: one that lists the attempt, or one
that comes late enough to list it and does not, because the attempt was refused or is over already. It also ends when
the request must have ended by its own prediction, and after `soft_s` at the latest. The worker's own ledger
decides in any case; soft placements only keep a burst between two heartbeats from piling up on one worker.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.errors import MalformedMessage
from baton.messages.workers import Goodbye, Heartbeat, Role
from baton.node.membership import LOST_AFTER_S, Event, Leaving, Workers


@dataclass(frozen=True, slots=True)
class SoftPlacement:
    """Capacity that one attempt, placed at `placed_s`, takes from a worker until `until_s`."""

    attempt: int
    placed_s: float
    until_s: float
    kv_tokens: int
    prefill_tokens: int
    """Prompt tokens that this worker will compute."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Load of a live worker: its newest heartbeat plus what was placed on it since."""

    heartbeat: Heartbeat
    soft_slots: int = 0
    soft_kv_tokens: int = 0
    soft_prefill_tokens: int = 0

    @property
    def worker(self) -> str:
        return self.heartbeat.address.worker

    @property
    def role(self) -> Role:
        return self.heartbeat.role

    @property
    def kv_identity(self) -> str:
        return self.heartbeat.kv_identity or f"digest={self.heartbeat.model_digest}"

    @property
    def kind(self) -> str:
        """Engine and its options: workers of one kind refuse the same requests."""
        return self.heartbeat.engine_kind or self.worker

    @property
    def hands_over(self) -> bool:
        """Whether the worker's engine has a transfer agent."""
        return bool(self.heartbeat.address.agents)

    @property
    def slots_free(self) -> int:
        return self.heartbeat.running_max - self.heartbeat.running - self.heartbeat.waiting - self.soft_slots

    @property
    def used_share(self) -> float:
        """Used share of the slots or of the KV, whichever is larger."""
        slots_used = 1 - self.slots_free / self.heartbeat.running_max if self.heartbeat.running_max > 0 else 1.0
        return max(slots_used, self.kv_tokens_used / (self.kv_tokens_total or 1))

    @property
    def kv_tokens_total(self) -> int:
        return self.heartbeat.kv_blocks_total * self.heartbeat.engine_block_tokens

    @property
    def kv_tokens_used(self) -> int:
        return self.heartbeat.kv_blocks_used * self.heartbeat.engine_block_tokens + self.soft_kv_tokens

    @property
    def prefill_tokens_queued(self) -> int:
        return self.heartbeat.prefill_tokens_queued + self.soft_prefill_tokens


@dataclass(frozen=True, slots=True)
class LoadsOptions:
    lost_after_s: float = LOST_AFTER_S
    soft_s: float = 2.0
    listed_after_s: float = 0.25
    """Age of a placement from which on a heartbeat lists its attempt, if the worker has it."""


class Loads:
    def __init__(self, options: LoadsOptions) -> None:
        self._options = options
        self._workers = Workers(lost_after_s=options.lost_after_s)
        self._soft: dict[str, dict[str, SoftPlacement]] = {}
        """Live worker → request → the soft placement of its newest attempt there."""

    def take(self, message: Heartbeat | Goodbye, now_s: float) -> None:
        """Take a worker's message; one of a generation that is over is ignored.

        Raises MalformedMessage for impossible figures.
        """
        if isinstance(message, Heartbeat):
            _check(message)
        self._drop_ended(self._workers.take(message, now_s))
        address = message.address
        soft = self._soft.get(address.worker)
        if soft and isinstance(message, Heartbeat) and self._workers.is_live(address.worker, address.generation):
            listed = set(message.attempts)
            self._soft[address.worker] = {
                request: each
                for request, each in soft.items()
                if (request, each.attempt) not in listed
                and now_s < min(each.until_s, each.placed_s + self._options.listed_after_s)
            }

    def tick(self, now_s: float, pause_s: float = 0.0) -> None:
        """Drop lost workers; `pause_s` is how long this process could not receive."""
        self._workers.extend_deadlines(pause_s, now_s)
        self._drop_ended(self._workers.expire(now_s))

    def place(self, request: str, placed: Mapping[str, SoftPlacement]) -> None:
        """Count an attempt on the workers it was placed on, in place of the request's earlier attempts."""
        for soft in self._soft.values():
            soft.pop(request, None)
        for worker, each in placed.items():
            if worker in self._workers:
                self._soft.setdefault(worker, {})[request] = each

    def live(self, now_s: float) -> list[WorkerLoad]:
        """Return the loads of the live workers."""
        return [self._load(heartbeat, now_s) for heartbeat in self._workers.beats()]

    def served_lately(self, model: str) -> bool:
        """Return whether any worker, live or departed, served this model lately: it may come back."""
        return self._workers.newest(model) is not None

    def _drop_ended(self, events: Sequence[Event]) -> None:
        for event in events:
            if not isinstance(event, Leaving):
                self._soft.pop(event.member, None)

    def _load(self, heartbeat: Heartbeat, now_s: float) -> WorkerLoad:
        placed = self._soft.get(heartbeat.address.worker, {}).values()
        soft = [each for each in placed if now_s < min(each.until_s, each.placed_s + self._options.soft_s)]
        return WorkerLoad(
            heartbeat,
            soft_slots=len(soft),
            soft_kv_tokens=sum(each.kv_tokens for each in soft),
            soft_prefill_tokens=sum(each.prefill_tokens for each in soft),
        )


def incompatible_pairs(loads: Sequence[WorkerLoad]) -> Counter[str]:
    """Return, by model, the pairs of a prefill and a decode worker that cannot hand over to each other."""
    prefills, decodes = (
        Counter((load.heartbeat.model, load.kv_identity) for load in loads if load.role is role)
        for role in (Role.PREFILL, Role.DECODE)
    )
    pairs = Counter[str]()
    for (model, identity), count in prefills.items():
        unlike = (decodes[kind] for kind in decodes if kind[0] == model and kind[1] != identity)
        pairs[model] += count * sum(unlike)
    return pairs


def _check(heartbeat: Heartbeat) -> None:
    """Raise MalformedMessage for figures that no worker can have and predictions cannot use."""
    sizes = (heartbeat.block_tokens, heartbeat.engine_block_tokens, heartbeat.context_tokens_max)
    counts = (
        heartbeat.running,
        heartbeat.waiting,
        heartbeat.kv_blocks_used,
        heartbeat.kv_blocks_total,
        heartbeat.prefill_tokens_queued,
        heartbeat.kv_bytes_per_token,
    )
    rates = (heartbeat.prefill_tokens_per_s, heartbeat.decode_tokens_per_s, heartbeat.transfer_bytes_per_s)
    if min(sizes) <= 0 or min(counts) < 0 or not all(rate >= 0 and math.isfinite(rate) for rate in rates):
        raise MalformedMessage(f"the heartbeat of {heartbeat.address.worker} has impossible figures")
