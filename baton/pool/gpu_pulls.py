"""Sink side of a `GpuAgent`: each pull goes straight to the source's GPU, or is staged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from baton.errors import TransferFailed
from baton.pool.gpu_offers import Way
from baton.pool.staging import StagedAgent
from baton.transfer import Cause, EventKind, NativeAgent, TransferEvent, Whole

_log = logging.getLogger(__name__)

REFUSED_S: Final = 60.0
"""Time for which a peer that refused the direct way is not asked for it again, in seconds."""
LATE_S: Final = 0.05
"""Time for which a pull that is late still runs, in seconds, so that its source is told of its end."""
_REFUSALS: Final = frozenset({Cause.REFUSED, Cause.LAYOUT, Cause.UNREACHABLE})
"""Causes of failures before the two agents have agreed on a backend, after which a pull is staged."""
FAR_BACKEND: Final = "gpudirect"
"""Backend of the direct way that reaches another host."""
_BETWEEN: Final = "|"


def join_endpoint(staged: str, host: str, direct: str, *, far: bool) -> str:
    """Return an endpoint of both ways. An agent without GPUs reads what stands before the first mark.

    `far`: whether the direct way reaches other hosts.
    """
    return _BETWEEN.join((staged, host, direct, *([FAR_BACKEND] if far else [])))


@dataclass(slots=True, eq=False, kw_only=True)
class Pull:
    endpoint: str
    direct: str = ""
    """Endpoint of the source's agent for the direct way, if that is tried."""
    first_token: int
    tokens: int
    blocks: Sequence[int]
    deadline_s: float
    whole: Whole | None
    way: Way | None = None
    """None: it waits until nothing in the stream uses its blocks."""
    declined: str = ""
    """Reason why it is staged."""
    is_fallback: bool = False
    """Whether that is not what this pair should do."""
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class _Refusal:
    why: str
    until_s: float


class Pulls:
    """Not thread-safe: the agent's lock is held in every call."""

    def __init__(
        self,
        direct: NativeAgent,
        staged: StagedAgent,
        host: str,
        tell: Callable[[TransferEvent], None],
        now_s: Callable[[], float],
        *,
        far: bool,
    ) -> None:
        """`far`: whether the direct way reaches other hosts from here."""
        self._far = far
        self._direct = direct
        self._staged = staged
        self._host = host
        self._tell = tell
        self._now_s = now_s
        self._pulls: dict[bytes, Pull] = {}
        self._refusals: dict[str, _Refusal] = {}
        """By endpoint of the direct way."""
        self.fallbacks = 0
        self.refused = 0
        """Failures of the direct way after which a pull was staged."""

    def __len__(self) -> int:
        return len(self._pulls)

    def begin(self, key: bytes, pull: Pull) -> bool:
        """Begin a pull; return whether it is to be started (`start`) once the stream's work has ended."""
        if key in self._pulls:
            raise ValueError("this key is pulled already")
        self._choose(pull)
        if not pull.direct:
            self._stage(key, pull)
        self._pulls[key] = pull
        return bool(pull.direct)

    def start(self, key: bytes, pull: Pull) -> None:
        """Let a pull write its blocks, unless it was cancelled meanwhile: then they may be another request's."""
        if not self._waits(key, pull):
            return
        pull.way = Way.DIRECT
        try:
            self._direct.pull(
                key,
                pull.direct,
                first_token=pull.first_token,
                tokens=pull.tokens,
                blocks=pull.blocks,
                budget_s=max(pull.deadline_s - self._now_s(), LATE_S),
            )
        except (TransferFailed, ValueError) as error:
            self._end(key, Cause.REFUSED, str(error))

    def fail(self, key: bytes, pull: Pull, cause: Cause, detail: str) -> None:
        """End a pull that waits for the stream, unless it was cancelled meanwhile."""
        if self._waits(key, pull):
            self._end(key, cause, detail)

    def cancel(self, key: bytes) -> None:
        pull = self._pulls.get(key)
        if pull is None or pull.way is Way.STAGED:
            self._staged.cancel_pull(key)
        elif pull.way is Way.DIRECT:
            pull.cancelled = True
            self._direct.cancel_pull(key)
        else:
            self._stage_cancelled(key, pull)

    def take(self, way: Way, event: TransferEvent) -> None:
        """Take an event of a pull of one agent."""
        pull = self._pulls.get(event.key)
        if pull is None or pull.way is not way:
            return
        failed = event.kind is EventKind.PULL_FAILED
        if failed and way is Way.DIRECT and not event.backend:
            # The source may know nothing of it: the agents have not agreed on a backend.
            if pull.cancelled:
                self._stage_cancelled(event.key, pull)
                return
            if event.cause is Cause.DEADLINE:
                # The other agent fails it for the same reason, and tells the source.
                self.refused += 1
                self._stage_or_end(event.key, pull)
                return
            if event.cause in _REFUSALS:
                self._fall_back(event, pull)
                return
        if event.kind is not EventKind.PULL_PROGRESS:
            del self._pulls[event.key]
            self.fallbacks += pull.is_fallback
        if failed and pull.cancelled:
            event = replace(event, cause=Cause.CANCELLED)
        declined = "; ".join(filter(None, (pull.declined, event.declined)))
        self._tell(replace(event, declined=declined))

    def _waits(self, key: bytes, pull: Pull) -> bool:
        return self._pulls.get(key) is pull and pull.way is None

    def _choose(self, pull: Pull) -> None:
        _, host, direct, far = (*pull.endpoint.split(_BETWEEN), "", "", "")[:4]
        backend = "cuda-ipc" if host == self._host else FAR_BACKEND
        if not direct:
            pull.declined = f"{backend}: the source does not offer its GPU's memory"
        elif pull.whole is not None:
            pull.declined = f"{backend}: the numbers of tensor-parallel ranks differ"
        elif host != self._host and not (far and self._far):
            pull.declined = f"{backend}: the source is on another host, and not both have RDMA adapters"
        elif (refusal := self._refusals.get(direct)) and self._now_s() < refusal.until_s:
            pull.declined, pull.is_fallback = refusal.why, True
        else:
            pull.direct = direct

    def _fall_back(self, failure: TransferEvent, pull: Pull) -> None:
        now_s = self._now_s()
        self._refusals = {peer: known for peer, known in self._refusals.items() if now_s < known.until_s}
        if pull.direct not in self._refusals:
            _log.warning("KV is staged, since it cannot come straight from the source's GPU: %s", failure.detail)
        self._refusals[pull.direct] = _Refusal(failure.detail, now_s + REFUSED_S)
        pull.declined, pull.is_fallback = failure.detail, True
        self.refused += 1
        self._stage_or_end(failure.key, pull)

    def _stage_cancelled(self, key: bytes, pull: Pull) -> None:
        """Cancel a pull of which the source may know nothing: its lease ends now, instead of by its time."""
        pull.cancelled = True
        self.refused += pull.way is Way.DIRECT
        if self._stage_or_end(key, pull):
            self._staged.cancel_pull(key)

    def _stage_or_end(self, key: bytes, pull: Pull) -> bool:
        try:
            self._stage(key, pull)
        except (TransferFailed, ValueError) as error:
            self._end(key, Cause.CANCELLED if pull.cancelled else Cause.REFUSED, str(error))
            return False
        return True

    def _stage(self, key: bytes, pull: Pull) -> None:
        pull.way = Way.STAGED
        self._staged.pull(
            key,
            pull.endpoint,
            first_token=pull.first_token,
            tokens=pull.tokens,
            blocks=pull.blocks,
            budget_s=max(pull.deadline_s - self._now_s(), LATE_S),
            whole=pull.whole,
        )

    def _end(self, key: bytes, cause: Cause, detail: str) -> None:
        """End a pull that no agent has."""
        del self._pulls[key]
        self._tell(TransferEvent(kind=EventKind.PULL_FAILED, key=key, cause=cause, detail=detail))
