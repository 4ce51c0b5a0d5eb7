"""Inputs of the attempt machine (events, timers) and its outputs (actions). See `attempt.py`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from baton.errors import BatonError
from baton.messages.attempts import DigestEntry, FinishReason, Frame, TokenLogprob
from baton.messages.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTimers:
    place_resend_s: float = 0.25
    place_resends_max: int = 3
    accept_s: float = 0.1
    first_token_s: float = 120.0
    progress_s: float = 30.0
    resend_s: float = 0.25
    admission_wait_s: float = 10.0
    retry_pause_s: float = 0.1
    attempts_max: int = 4


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class PlaceGranted:
    attempt: int
    placement: Placement
    unanswered: int = 0
    """Attempts of this gateway that workers have not answered yet; they delay the answers to this one."""


@dataclass(frozen=True, slots=True)
class PlaceRefused:
    attempt: int
    error: BatonError


@dataclass(frozen=True, slots=True)
class PlaceHeld:
    """A scheduler holds the request, and repeats this several times a second."""

    attempt: int
    position: int | None = None
    """Number of requests before it, if the scheduler has said so."""
    turn_s: float = 0.0
    """Predicted time until its turn."""


@dataclass(frozen=True, slots=True)
class PlaceHandedBack:
    """A scheduler that leaves does not hold the request any more."""

    attempt: int


@dataclass(frozen=True, slots=True)
class TaskAccepted:
    attempt: int
    worker: str


@dataclass(frozen=True, slots=True)
class TaskBusy:
    """The worker is alive and will not run this attempt."""

    attempt: int
    worker: str
    detail: str


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The task did not reach the worker (NoResponders, BusUnavailable), or the worker refused it with `error`.

    InvalidRequest: the worker's engine does not take the request's parameters.
    """

    attempt: int
    worker: str
    error: BatonError


@dataclass(frozen=True, slots=True)
class FrameArrived:
    worker: str
    generation: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """Prefill is done; its worker had `cached_tokens` of the prompt, and promoted some of them from its pool."""

    attempt: int
    cached_tokens: int
    promoted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DigestArrived:
    """A digest of `worker`; `entry` is None if it does not list this attempt."""

    worker: str
    generation: int
    entry: DigestEntry | None


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """This generation of the worker has ended: no heartbeat for too long, a newer generation, or a goodbye."""

    worker: str
    generation: int
    detail: str


@dataclass(frozen=True, slots=True)
class WorkerLeaving:
    """This generation of the worker is draining; until it leaves, it goes on with what it has."""

    worker: str
    generation: int
    leaves_in_s: float
    token_interval_s: float
    """Interval between the tokens of one answer on this worker."""


@dataclass(frozen=True, slots=True)
class WorkerStuck:
    """This generation of the worker is alive, but its engine does nothing with its work. Heartbeats repeat it."""

    worker: str
    generation: int


@dataclass(frozen=True, slots=True)
class Shown:
    """The client receives the first part of the answer, which from now on cannot start over."""


@dataclass(frozen=True, slots=True)
class TextStopped:
    """A stop string was found in the text; the rest of the output is not needed."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The answer is no longer needed; `error` says why."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    PlaceGranted
    | PlaceRefused
    | PlaceHeld
    | PlaceHandedBack
    | TaskAccepted
    | TaskBusy
    | TaskFailed
    | FrameArrived
    | PromptComputed
    | DigestArrived
    | WorkerGone
    | WorkerLeaving
    | WorkerStuck
    | Shown
    | TextStopped
    | Aborted
    | Tick
)

# ---------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class SendPlace:
    """Ask any scheduler (see `Place`)."""

    attempt: int
    exclude: tuple[str, ...] = ()
    exclude_pairs: tuple[tuple[str, str], ...] = ()
    refused: tuple[str, ...] = ()
    unavailable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SendTasks:
    """Send both tasks at the same time, for the prompt plus what was delivered."""

    attempt: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class SendCancel:
    worker: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class SendAcknowledge:
    worker: str
    attempt: int


@dataclass(frozen=True, slots=True)
class SendResend:
    worker: str
    attempt: int
    index: int


@dataclass(frozen=True, slots=True)
class SendWithdraw:
    """Tell all schedulers that this attempt needs no placement any more: one of them may hold it."""

    attempt: int


@dataclass(frozen=True, slots=True)
class ReportFault:
    """Tell all schedulers who is at fault for a failed attempt: workers of these generations, or a pair."""

    attempt: int
    workers: tuple[tuple[str, int], ...]
    pair: tuple[str, str] | None
    error: BatonError


class Deliver(msgspec.Struct, frozen=True):
    """Tokens in order, each exactly once since the answer started. `ends`: the last of them ended the output."""

    tokens: list[int]
    logprobs: tuple[TokenLogprob, ...]
    ends: bool


@dataclass(frozen=True, slots=True)
class StartOver:
    """Drop the delivered tokens, none of which the client has received: the answer restarts at its first token."""


@dataclass(frozen=True, slots=True)
class Complete:
    """The answer is whole. The machine does nothing after this."""

    reason: FinishReason
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The answer has failed. The machine does nothing after this."""

    error: BatonError


Action = (
    SendPlace
    | SendTasks
    | SendCancel
    | SendAcknowledge
    | SendResend
    | SendWithdraw
    | ReportFault
    | Deliver
    | StartOver
    | Complete
    | Fail
)
