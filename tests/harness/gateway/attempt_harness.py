"""An attempt's state machine on the test's own clock, with a record of every action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from baton_gateway import attempt_events as ev
from baton_gateway.attempt import AttemptMachine, Phase
from baton_gateway.attempt_events import AttemptTimers
from baton_gateway.search import Retries

from baton.errors import BatonError
from baton.messages.attempts import Finish, FinishReason, Frame, Sampling, Usage
from baton.messages.base import ErrorReport, WorkerAddress, pack_tokens
from baton.messages.placement import Candidate, Placement

Kind = TypeVar("Kind")
REQUEST = "r"
GREEDY = Sampling(max_tokens=8, temperature=0.0)


def placement(decode: str = "d1", prefill: str = "", generation: int = 1) -> Placement:
    return Placement(
        decode=WorkerAddress(worker=decode, generation=generation),
        prefill=WorkerAddress(worker=prefill, generation=generation) if prefill else None,
        reason="test",
        scheduler="s1",
        predicted=Candidate(decode=decode, predicted_ttft_s=0.1),
    )


def frame(
    attempt: int,
    index: int,
    tokens: Sequence[int],
    finish: FinishReason | None = None,
    error: BatonError | None = None,
    cached: int = 0,
) -> Frame:
    ended = None
    if finish is not None:
        usage = Usage(prompt_tokens=4, completion_tokens=index + len(tokens), cached_tokens=cached)
        ended = Finish(reason=finish, usage=usage, error=ErrorReport.of(error) if error else None)
    return Frame(request=REQUEST, attempt=attempt, index=index, tokens=pack_tokens(tokens), finish=ended)


class AttemptHarness:
    """Steps an attempt's state machine and records its actions."""

    def __init__(
        self,
        sampling: Sampling = GREEDY,
        *,
        deadline_s: float = 300.0,
        request: str = REQUEST,
        retries: Retries | None = None,
        now_s: float = 0.0,
    ) -> None:
        self.now_s = now_s
        self.retries = retries or Retries()
        self.machine = AttemptMachine(
            sampling,
            AttemptTimers(),
            client_request=request,
            retries=self.retries,
            deadline_at_s=deadline_s,
            eos_tokens=frozenset({2}),
        )
        self.all: list[ev.Action] = list(self.machine.start(now_s))
        self.fresh: list[ev.Action] = list(self.all)

    def step(self, event: ev.Event) -> list[ev.Action]:
        self.fresh = self.machine.step(self.now_s, event)
        self.all += self.fresh
        return self.fresh

    def wait(self, duration_s: float) -> list[ev.Action]:
        """Let time pass, ticking whenever the machine wants to be woken."""
        end_s, done = self.now_s + duration_s, list[ev.Action]()
        while not self.machine.ended and self.machine.wake_at_s <= end_s:
            self.now_s = max(self.now_s, self.machine.wake_at_s)
            done += self.step(ev.Tick())
        self.now_s = end_s
        self.fresh = done
        return done

    def frame(self, index: int, tokens: Sequence[int], finish: FinishReason | None = None, **extra: object) -> None:
        worker = self.machine.placement.decode if self.machine.placement else WorkerAddress(worker="?", generation=0)
        shown = frame(self.machine.attempt, index, tokens, finish, **extra)  # pyright: ignore[reportArgumentType]
        self.step(ev.FrameArrived(worker.worker, worker.generation, shown))

    def run_on(self, decode: str = "d1", prefill: str = "") -> None:
        """Place the current attempt on workers."""
        self.step(ev.PlaceGranted(self.machine.attempt, placement(decode, prefill)))
        for worker in filter(None, (decode, prefill)):
            self.step(ev.TaskAccepted(self.machine.attempt, worker))
        assert self.machine.phase is Phase.WAITING

    def did(self, kind: type[Kind]) -> list[Kind]:
        return [action for action in self.fresh if isinstance(action, kind)]

    def did_ever(self, kind: type[Kind]) -> list[Kind]:
        return [action for action in self.all if isinstance(action, kind)]

    @property
    def error(self) -> BatonError:
        (failure,) = self.did_ever(ev.Fail)
        return failure.error
