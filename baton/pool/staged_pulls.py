"""Sink side of a `StagedAgent`: pulls into slots, and copies of what has arrived there to the cache.

A pull has a part for each rank of the peer that has some of the heads. All parts fill the same slots, and a layer is
copied once it has arrived in all parts. The parts end together: if one fails, the others are cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from baton.errors import TransferFailed
from baton.pool.staged_flows import Flow, Staging
from baton.transfer import Cause, EventKind, TransferAgent, TransferEvent, Whole


@dataclass(slots=True)
class Part:
    endpoint: str
    layers: int = 0
    """Leading layers that are in the slots."""
    restarts: int = 0
    news: list[TransferEvent] = field(default_factory=list[TransferEvent])
    """Events to be told once their layers are in the cache."""
    end: TransferEvent | None = None
    """PULL_DONE or PULL_FAILED; nothing writes this part's heads of the slots any more."""


@dataclass(slots=True, eq=False, kw_only=True)
class StagedPull(Flow):
    whole: Whole
    first_token: int
    tokens: int
    began_s: float
    deadline_s: float
    parts: dict[bytes, Part] = field(default_factory=dict[bytes, Part])
    layers: int = 0
    """Layers whose copies were started."""
    has_slots: bool = False
    started: bool = False
    """Whether it has its slots, and the peers are asked."""
    waited_s: float = 0.0
    """Time in which it waited for slots."""


class StagedPulls:
    """See the module's docstring. Not thread-safe: the agent's lock is held in every call."""

    def __init__(
        self,
        agent: TransferAgent,
        staging: Staging,
        done: Callable[[StagedPull], None],
        now_s: Callable[[], float],
    ) -> None:
        """`done` is told of a pull that is in the cache, and in its slots, which nothing writes any more."""
        self._agent = agent
        self._staging = staging
        self._done = done
        self._now_s = now_s
        self._pulls: dict[bytes, StagedPull] = {}
        self._by_part: dict[bytes, StagedPull] = {}

    def begin(
        self,
        key: bytes,
        endpoint: str,
        *,
        first_token: int,
        tokens: int,
        blocks: Sequence[int],
        budget_s: float,
        after: int | None,
        whole: Whole,
    ) -> None:
        """Begin a pull, or add a part to it. The peers are asked once it has all its parts, and slots."""
        self._staging.check_blocks(blocks)
        if key in self._by_part:
            raise ValueError("this key is pulled already")
        pull = self._pulls.get(whole.key)
        if pull is None:
            pull = self._new(whole, list(blocks), first_token=first_token, tokens=tokens, budget_s=budget_s)
            pull.after = after
            self._staging.ask(pull, len(blocks))
            self._pulls[whole.key] = pull
        elif (pull.blocks, pull.first_token, pull.tokens) != (list(blocks), first_token, tokens):
            raise ValueError("the parts of one pull are of the same tokens, in the same blocks")
        self._by_part[key] = pull
        pull.parts[key] = Part(endpoint)
        self._start_complete(pull)

    def cancel(self, key: bytes) -> bool:
        """Cancel a pull that still waits for slots; return False if there is none."""
        pull = self._by_part.get(key)
        if pull is None or pull.started:
            return False
        self._give_up(pull, Cause.CANCELLED, "it waited for slots")
        return True

    def check_deadlines(self) -> None:
        now_s = self._now_s()
        for pull in [pull for pull in self._pulls.values() if not pull.started and now_s >= pull.deadline_s]:
            self._give_up(pull, Cause.DEADLINE, "it waited for slots")

    def take(self, event: TransferEvent) -> bool:
        """Take an event of a part's pull into the slots; return False if there is no such part."""
        pull = self._by_part.get(event.key)
        if pull is None:
            return False
        part = pull.parts[event.key]
        if event.kind is not EventKind.PULL_PROGRESS:
            part.end = event
        if self._has_failed(pull):
            self._end_failed(pull)
        else:
            self._arrived(pull, part, event)
        return True

    def _new(self, whole: Whole, blocks: list[int], *, first_token: int, tokens: int, budget_s: float) -> StagedPull:
        now_s = self._now_s()
        pull = StagedPull(
            whole.key,
            blocks,
            granted=lambda: self._granted(pull),
            failed=lambda: self._end_failed(pull),
            whole=whole,
            first_token=first_token,
            tokens=tokens,
            began_s=now_s,
            deadline_s=now_s + budget_s,
        )
        return pull

    def _granted(self, pull: StagedPull) -> None:
        pull.has_slots = True
        self._start_complete(pull)

    def _start_complete(self, pull: StagedPull) -> None:
        """Ask the peers, once the pull has slots and all its parts."""
        if not pull.has_slots or len(pull.parts) < pull.whole.parts:
            return
        now_s = self._now_s()
        pull.waited_s = now_s - pull.began_s
        pull.started = True
        for key, part in pull.parts.items():
            try:
                self._agent.pull(
                    key,
                    part.endpoint,
                    first_token=pull.first_token,
                    tokens=pull.tokens,
                    blocks=pull.slots,
                    budget_s=max(pull.deadline_s - now_s, 0.0),
                )
            except (TransferFailed, ValueError) as error:
                self._refuse(pull, key, str(error))
                return

    def _refuse(self, pull: StagedPull, first: bytes, detail: str) -> None:
        """End the parts from `first` on, for which no peer was asked, and with them the pull."""
        keys = list(pull.parts)
        for key in keys[keys.index(first) :]:
            end = TransferEvent(kind=EventKind.PULL_FAILED, key=key, cause=Cause.REFUSED, detail=detail)
            pull.parts[key].end = end
        self._end_failed(pull)

    def _give_up(self, pull: StagedPull, cause: Cause, detail: str) -> None:
        """End a pull that the peers were not asked for."""
        self._end(
            pull,
            [TransferEvent(kind=EventKind.PULL_FAILED, key=key, cause=cause, detail=detail) for key in pull.parts],
        )

    def _arrived(self, pull: StagedPull, part: Part, event: TransferEvent) -> None:
        """Copy the layers that are in the slots in all parts now; tell their events once they are in the cache."""
        if event.restarts > part.restarts:
            # The slots have the KV of a newer generation now.
            part.restarts, pull.layers = event.restarts, 0
        part.layers = self._staging.layers if part.end is not None else event.layers
        if part.end is None:
            part.news.append(event)
        layers = min(part.layers for part in pull.parts.values())
        copies = self._staging.copies(pull, slice(None), pull.layers, layers, to_device=True)
        pull.layers = max(pull.layers, layers)
        news = [news for part in pull.parts.values() for news in part.news if news.layers <= layers]
        for part in pull.parts.values():
            part.news = [news for news in part.news if news.layers > layers]
        is_done = all(part.end is not None for part in pull.parts.values())
        self._staging.submit(pull, copies, partial(self._copied, pull, news, self._now_s(), is_done=is_done))

    def _copied(self, pull: StagedPull, news: list[TransferEvent], arrived_s: float, *, is_done: bool) -> None:
        for event in news:
            self._staging.tell(self._told(pull, event, arrived_s))
        if is_done:
            self._done(pull)
            ends = [part.end for part in pull.parts.values() if part.end is not None]
            self._end(pull, [self._told(pull, event, arrived_s) for event in ends])

    def _told(self, pull: StagedPull, event: TransferEvent, arrived_s: float) -> TransferEvent:
        return replace(
            event,
            backend=event.backend and f"{event.backend}+staged",
            waiting_s=event.waiting_s + pull.waited_s,
            moving_s=event.moving_s + self._now_s() - arrived_s,
        )

    def _has_failed(self, pull: StagedPull) -> bool:
        ends = [part.end for part in pull.parts.values() if part.end is not None]
        return bool(pull.failure) or any(end.kind is EventKind.PULL_FAILED for end in ends)

    def _end_failed(self, pull: StagedPull) -> None:
        """Cancel what still runs of a pull that fails. It ends with its last part: nothing writes its slots then."""
        ends: list[TransferEvent] = []
        for key, part in pull.parts.items():
            if part.end is None:
                self._agent.cancel_pull(key)
            else:
                ends.append(part.end)
        if len(ends) == len(pull.parts):
            self._end(pull, [_failure(pull, end) for end in ends])

    def _end(self, pull: StagedPull, last: Sequence[TransferEvent]) -> None:
        del self._pulls[pull.key]
        for key in pull.parts:
            del self._by_part[key]
        self._staging.end(pull, *last)


def _failure(pull: StagedPull, event: TransferEvent) -> TransferEvent:
    """Return the end of a part of a pull that failed, as this part's failure."""
    if pull.failure:
        return replace(event, kind=EventKind.PULL_FAILED, cause=Cause.COPY, detail=pull.failure)
    if event.kind is EventKind.PULL_FAILED:
        return event
    return replace(event, kind=EventKind.PULL_FAILED, cause=Cause.CANCELLED, detail="another part of the pull failed")
