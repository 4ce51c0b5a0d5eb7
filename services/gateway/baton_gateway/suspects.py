"""Suspects: requests that had just begun on a worker when it was lost. Pure and bounded.

A request may be what ends a worker: a prompt that crashes the engine crashes the next one as well. Such a request is
stopped after two workers. An innocent one may be on two lost workers by chance, so it takes all of this:

- Two different workers were lost, not merely left with a failed attempt, and each before the request had
  `JUST_BEGUN_TOKENS` there. Requests that ran on for longer are innocent of a loss.
- In the last `KEPT_S` fewer workers were lost without this request than with it.
- At the first of these losses there was no other suspect. With others, each suspect of two losses is tried alone, one
  after the other, and is stopped if its worker is lost then, too. One that gets its tokens is cleared.

A loss is often known later than the failure of the attempt. A suspect of an earlier loss waits for `CONFIRM_S`, in
which the silence of a worker shows.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

JUST_BEGUN_TOKENS: Final = 8
KEPT_S: Final = 300.0
CONFIRM_S: Final = 2.0
LOSSES_MAX: Final = 256
STOPPED_MAX: Final = 256
SUSPECTS_MAX: Final = 4096
"""Suspects of one loss; further ones are not suspected."""

Worker = tuple[str, int]
"""Name and generation."""


class Verdict(StrEnum):
    FREE = "free"
    WAIT = "wait"
    """Ask again soon: a worker may turn out to be lost, or another suspect is on trial."""
    STOP = "stop"


@dataclass(slots=True)
class _Loss:
    """A worker that is lost or, unless `confirmed`, may be."""

    worker: str
    at_s: float
    confirmed: bool = False
    suspects: set[str] = field(default_factory=set[str])


class Suspects:
    """Losses of workers and their suspects, as one gateway sees them."""

    def __init__(self) -> None:
        self._losses: OrderedDict[Worker, _Loss] = OrderedDict()
        self._on_trial = ""
        self._stopped: OrderedDict[str, tuple[str, ...]] = OrderedDict()
        """Requests that were stopped, and the workers lost with them: other choices of one may still run."""

    def note_failed(self, request: str, worker: Worker, now_s: float) -> None:
        """Note that an attempt failed when it had just begun on this worker, which may be lost."""
        suspects = self._loss(worker, now_s).suspects
        if len(suspects) < SUSPECTS_MAX:
            suspects.add(request)

    def note_lost(self, worker: Worker, now_s: float) -> None:
        """Note that a worker is lost: silent for too long, restarted, or ended by itself."""
        self._loss(worker, now_s).confirmed = True

    def clear(self, request: str) -> None:
        """Drop all suspicion: the request has got its tokens, or has ended."""
        for loss in self._losses.values():
            loss.suspects.discard(request)
        if self._on_trial == request:
            self._on_trial = ""

    def judge(self, request: str, now_s: float) -> tuple[Verdict, tuple[str, ...]]:
        """Say whether a request may be tried again now, and which workers were lost with it."""
        if request in self._stopped:
            return Verdict.STOP, self._stopped[request]
        self._forget(now_s)
        confirmed = [loss for loss in self._losses.values() if loss.confirmed]
        mine = [loss for loss in confirmed if request in loss.suspects]
        workers = tuple(dict.fromkeys(loss.worker for loss in mine))
        if not mine or len(confirmed) - len(mine) >= max(2, len(mine)):
            return Verdict.FREE, workers
        if len(workers) < 2 or (self._on_trial == request and len(workers) < 3):
            # The newest failure counts once its worker is known to be lost.
            return (Verdict.WAIT if self._may_be_lost(request, workers, now_s) else Verdict.FREE), workers
        if self._on_trial == request or len(mine[0].suspects) == 1:
            # These losses are explained: they clear the other suspects, and do not speak for later ones.
            self._losses = OrderedDict((key, loss) for key, loss in self._losses.items() if loss not in mine)
            self._stopped[request] = workers
            if len(self._stopped) > STOPPED_MAX:
                self._stopped.popitem(last=False)
            return Verdict.STOP, workers
        if self._on_trial:
            return Verdict.WAIT, workers
        self._on_trial = request
        return Verdict.FREE, workers

    def _may_be_lost(self, request: str, workers: tuple[str, ...], now_s: float) -> bool:
        return any(
            not loss.confirmed
            and request in loss.suspects
            and loss.worker not in workers
            and now_s - loss.at_s < CONFIRM_S
            for loss in self._losses.values()
        )

    def _loss(self, worker: Worker, now_s: float) -> _Loss:
        self._forget(now_s)
        if worker not in self._losses:
            self._losses[worker] = _Loss(worker[0], now_s)
            if len(self._losses) > LOSSES_MAX:
                self._losses.popitem(last=False)
        return self._losses[worker]

    def _forget(self, now_s: float) -> None:
        while self._losses:
            key, loss = next(iter(self._losses.items()))
            if now_s - loss.at_s <= KEPT_S:
                return
            del self._losses[key]
