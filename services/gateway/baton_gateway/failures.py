"""The gateway's response to each failure: one table, which `docs/failures.md` shows. Pure.

A failure reaches an answer in two ways: a scheduler or the bus gives it instead of a placement, or it ends an attempt.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from baton import errors
from baton.errors import BatonError


class Asking(StrEnum):
    """Response to a failure that comes instead of a placement."""

    FAIL = "the client gets it"
    WAIT = "asked again, later"
    LIFT = "asked again, later; without exclusions if the request has some"
    WAIT_IF_BEGUN = "asked again, later, if the answer has begun; else the client gets it"


class Ending(StrEnum):
    """Response to a failure that ends an attempt."""

    FAIL = "the client gets it"
    FAIL_UNLESS_BEGUN = "another worker, if the answer has begun; else the client gets it"
    WORKER = "another worker"
    PREFILL = "another prefill worker"
    PAIR = "another pair"
    KIND = "a worker of another kind"
    ROOM = "a worker with room; after the first token another worker"
    LISTENER = "a worker that listens, while the search lasts; then another worker"


@dataclass(frozen=True, slots=True)
class Response:
    asking: Asking
    ending: Ending


_FAIL: Final = Response(Asking.FAIL, Ending.FAIL)
_WORKER: Final = Response(Asking.FAIL, Ending.WORKER)
_PAIR: Final = Response(Asking.FAIL, Ending.PAIR)

TABLE: Final[dict[type[BatonError], Response]] = {
    errors.BatonError: _WORKER,
    errors.InvalidRequest: Response(Asking.FAIL, Ending.KIND),
    errors.ContextLengthExceeded: Response(Asking.FAIL, Ending.KIND),
    errors.PayloadTooLarge: _FAIL,
    errors.RequestStopped: _FAIL,
    errors.Unauthenticated: _FAIL,
    errors.Forbidden: _FAIL,
    errors.ModelNotFound: Response(Asking.WAIT, Ending.WORKER),
    errors.RateLimited: _FAIL,
    errors.Overloaded: Response(Asking.WAIT_IF_BEGUN, Ending.ROOM),
    errors.ClientGone: _FAIL,
    errors.Unavailable: Response(Asking.WAIT, Ending.WORKER),
    errors.NoWorkers: Response(Asking.LIFT, Ending.WORKER),
    errors.NoResponders: Response(Asking.WAIT, Ending.LISTENER),
    errors.BusUnavailable: Response(Asking.WAIT, Ending.LISTENER),
    errors.StoreUnavailable: _FAIL,
    errors.RetriesLimited: _FAIL,
    errors.Conflict: _WORKER,
    errors.DeadlineExceeded: Response(Asking.FAIL, Ending.FAIL_UNLESS_BEGUN),
    errors.AttemptFailed: _WORKER,
    errors.WorkerLost: _WORKER,
    errors.TransferFailed: Response(Asking.FAIL, Ending.PREFILL),
    errors.PeerUnreachable: _PAIR,
    errors.LayoutMismatch: _PAIR,
    errors.ModelMismatch: _PAIR,
    errors.EngineFailed: _WORKER,
    errors.NotResumable: _FAIL,
    errors.MalformedMessage: _WORKER,
    errors.ConfigurationError: _FAIL,
}


def asking(error: BatonError, *, begun: bool, excludes: bool) -> Asking:
    """Return FAIL, WAIT or LIFT.

    `begun`: the client has a part of the answer, so a scheduler's full queue does not end it. `excludes`: the request
    excludes workers or pairs, so there may be others.
    """
    response = TABLE[_known(error)].asking
    match response:
        case Asking.WAIT_IF_BEGUN:
            return Asking.WAIT if begun else Asking.FAIL
        case Asking.LIFT:
            return Asking.LIFT if excludes else Asking.WAIT
        case _:
            return response


def ending(error: BatonError, *, begun: bool, attempt_begun: bool, searching: bool) -> Ending:
    """Return FAIL, WORKER, PREFILL, PAIR, KIND or ROOM.

    `begun`, `attempt_begun`: a token of the answer, of this attempt has come. `searching`: the time to look for workers
    is not over.
    """
    response = TABLE[_known(error)].ending
    match response:
        case Ending.FAIL_UNLESS_BEGUN:
            return Ending.WORKER if begun else Ending.FAIL
        case Ending.ROOM:
            return Ending.WORKER if attempt_begun else Ending.ROOM
        case Ending.LISTENER:
            return Ending.ROOM if searching else Ending.WORKER
        case _:
            return response


def _known(error: BatonError) -> type[BatonError]:
    """Return the class of the error, or the nearest one above it that has a row."""
    return next(kind for kind in type(error).__mro__ if kind in TABLE)
