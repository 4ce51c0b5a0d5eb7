"""A transfer agent that moves nothing: it records its calls and reports the test's events."""

from __future__ import annotations

import os
from collections.abc import Sequence

from baton.transfer import AgentStats, Cause, EventKind, Pool, TransferEvent, TransferFaults, Whole


class RecordingAgent:
    """Stands for `baton.transfer.TransferAgent`; `fails` names methods that raise."""

    endpoint = "recording"

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.fails: set[str] = set()
        self.generations: dict[bytes, int] = {}
        self.pulls: set[bytes] = set()
        self.wholes: dict[bytes, Whole | None] = {}
        """Wholes that leases and pulls are said to be parts of, by key."""
        self._events: list[TransferEvent] = []
        self._readable = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def tell(self, kind: EventKind, key: bytes, cause: Cause = Cause.NONE, layers: int = 0, moved: int = 0) -> None:
        self._events.append(TransferEvent(kind=kind, key=key, cause=cause, layers=layers, bytes=moved))
        os.eventfd_write(self._readable, 1)
        if kind in (EventKind.PULL_DONE, EventKind.PULL_FAILED):
            self.pulls.discard(key)

    def _called(self, name: str, *arguments: object) -> None:
        if name in self.fails:
            raise RuntimeError(f"{name} was told to fail")
        self.calls.append((name, *arguments))

    def fileno(self) -> int:
        return self._readable

    def poll(self) -> list[TransferEvent]:
        events, self._events = self._events, []
        if events:
            os.eventfd_read(self._readable)
        return events

    def set_pool(self, pool: Pool) -> None:
        self._called("set_pool", pool)

    def open_lease(
        self, key: bytes, *, tokens: int = 0, unclaimed_ttl_s: float | None = None, whole: Whole | None = None
    ) -> int:
        self._called("open_lease", key)
        self.wholes[key] = whole
        self.generations[key] = self.generations.get(key, 0) + 1
        return self.generations[key]

    def extend_lease(self, key: bytes, generation: int, blocks: Sequence[int]) -> None:
        self._called("extend_lease", key, generation, tuple(blocks))

    def post_ready(self, key: bytes, generation: int, layer: int, tokens: int) -> None:
        self._called("post_ready", key, generation, layer, tokens)

    def complete_lease(self, key: bytes, generation: int, tokens: int) -> None:
        self._called("complete_lease", key, generation, tokens)

    def revoke_lease(self, key: bytes, *, final: bool) -> None:
        self._called("revoke_lease", key, final)
        self.tell(EventKind.LEASE_ENDED, key, Cause.REVOKED)

    def pull(
        self,
        key: bytes,
        endpoint: str,
        *,
        first_token: int,
        tokens: int,
        blocks: Sequence[int],
        budget_s: float,
        whole: Whole | None = None,
    ) -> None:
        if endpoint == "unreadable":
            raise ValueError("an endpoint that makes no sense")
        self._called("pull", key, endpoint, first_token, tokens, tuple(blocks), budget_s)
        self.wholes[key] = whole
        self.pulls.add(key)

    def cancel_pull(self, key: bytes) -> None:
        self._called("cancel_pull", key)
        if key in self.pulls:
            self.tell(EventKind.PULL_FAILED, key, Cause.CANCELLED)

    def release(self, key: bytes, endpoint: str) -> None:
        self._called("release", key, endpoint)

    def set_faults(self, faults: TransferFaults) -> None:
        self._called("set_faults", faults)

    def stats(self) -> AgentStats:
        raise NotImplementedError

    def close(self) -> None:
        self._called("close")
        os.close(self._readable)
