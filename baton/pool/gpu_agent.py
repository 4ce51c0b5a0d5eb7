"""Hand-offs of a cache in GPU memory: other GPUs read it, where they can, and all other peers read a staged copy.

    source   the cache's blocks ──as they are──▶ GPUs of this host, by CUDA IPC
                                            ──▶ GPUs of other hosts, by GPUDirect, where both have RDMA adapters
             the cache's blocks ──copied to slots, once a peer asks for them──▶ other peers
    sink     tries the first way; takes the second where there is none, or where the handshake refuses it

`GpuAgent` is a `TransferAgent` around two: `direct`, whose pool is the cache, and a `StagedAgent`. Both offer each
lease. The first ask says which way the sink has chosen, and the other offer is withdrawn. On the direct way

- a peer reads what was posted once the work that was in the stream at the post has ended,
- the cache's blocks are leased until the pull has ended,
- a sink's blocks are written once the work that was in the sink's stream at the pull has ended.

A pull that should come straight from a GPU and does not is counted as a fallback; why any pull is staged stands in
`TransferEvent.declined`.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Final

from baton.errors import TransferFailed
from baton.pool.agent_events import AgentEvents
from baton.pool.gpu_offers import Offers, Way
from baton.pool.gpu_pulls import FAR_BACKEND, Pull, Pulls, join_endpoint
from baton.pool.memory import KvPool
from baton.pool.staged_copier import StagedCopier
from baton.pool.staging import StagedAgent, Stream
from baton.transfer import (
    AgentOptions,
    AgentStats,
    Cause,
    EventKind,
    NativeAgent,
    Pool,
    TransferEvent,
    TransferFaults,
    Whole,
)
from baton.transfer.device import CopyEnded

_log = logging.getLogger(__name__)

DIRECT_BACKENDS: Final = ("cuda-ipc", "cuda-put", FAR_BACKEND)
DIRECT_CHUNK_BYTES: Final = 8 << 20
"""Between two processes of an H200 a pull by cuda-ipc moves 13 GB/s in chunks of 1 MiB, and 106 GB/s in these."""


def direct_options(options: AgentOptions, *, adapters: bool) -> AgentOptions:
    """Return the options of an agent for the cache itself; `adapters`: whether this host has RDMA adapters."""
    backends = tuple(name for name in DIRECT_BACKENDS if adapters or name != FAR_BACKEND)
    return replace(options, port=0, rails=(), backends=backends, chunk_bytes=DIRECT_CHUNK_BYTES)


def boot_id() -> str:
    """Return a name of this host that no other has."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class GpuAgent:
    """See the module's docstring. Both agents tell of asks, have no pool yet, and belong to this one."""

    def __init__(
        self,
        direct: NativeAgent,
        staged: StagedAgent,
        *,
        stream: Stream = lambda: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stream`: see `StagedAgent`."""
        host = direct.options.host_id or boot_id()
        far = FAR_BACKEND in direct.options.backends
        self.endpoint = join_endpoint(staged.endpoint, host, direct.endpoint, far=far)
        self._direct = direct
        self._staged = staged
        self._stream = stream
        self._now_s = now_s
        self._lock = threading.Lock()
        self._events = AgentEvents()
        self._due: deque[Callable[[], None]] = deque()
        """Steps that the thread takes next; appended to by any thread, without the lock."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)
        self._offers = Offers(direct, staged, stream, self._events.tell)
        self._pulls = Pulls(direct, staged, host, self._events.tell, now_s, far=far)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="baton-gpu-agent", daemon=True)

    @property
    def memory(self) -> KvPool:
        return self._staged.memory

    @property
    def copier(self) -> StagedCopier:
        return self._staged.copier

    def set_pool(self, pool: Pool) -> None:
        self._staged.set_pool(pool)
        self._direct.set_pool(pool)
        self._thread.start()

    def fileno(self) -> int:
        return self._events.fileno()

    def poll(self) -> list[TransferEvent]:
        with self._lock:
            return self._events.take()

    # Source.

    def open_lease(
        self, key: bytes, *, tokens: int = 0, unclaimed_ttl_s: float | None = None, whole: Whole | None = None
    ) -> int:
        with self._lock:
            return self._offers.open(key, tokens=tokens, unclaimed_ttl_s=unclaimed_ttl_s, whole=whole)

    def extend_lease(self, key: bytes, generation: int, blocks: Sequence[int]) -> None:
        with self._lock:
            self._offers.extend(key, generation, blocks)

    def post_ready(self, key: bytes, generation: int, layer: int, tokens: int) -> None:
        with self._lock:
            self._offers.post_ready(key, generation, layer, tokens)

    def complete_lease(self, key: bytes, generation: int, tokens: int) -> None:
        with self._lock:
            self._offers.complete(key, generation, tokens)

    def revoke_lease(self, key: bytes, *, final: bool) -> None:
        with self._lock:
            self._offers.revoke(key, final=final)
            self._events.forget_staged(key)

    # Sink.

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
        pull = Pull(
            endpoint=endpoint,
            first_token=first_token,
            tokens=tokens,
            blocks=blocks,
            deadline_s=self._now_s() + budget_s,
            whole=whole,
        )
        with self._lock:
            if not self._pulls.begin(key, pull):
                return
            if self._stream() is None:
                self._pulls.start(key, pull)
                return
            try:
                self._staged.after_stream(partial(self._stream_ended, key, pull))
            except TransferFailed as failure:
                self._pulls.fail(key, pull, Cause.COPY, str(failure))

    def cancel_pull(self, key: bytes) -> None:
        with self._lock:
            self._pulls.cancel(key)

    def release(self, key: bytes, endpoint: str) -> None:
        self._staged.release(key, endpoint)

    def stats(self) -> AgentStats:
        """Return the figures of both agents. What both have of one lease or pull counts once."""
        with self._lock:
            direct, staged = self._direct.stats(), self._staged.stats()
            both = {field.name: getattr(direct, field.name) + getattr(staged, field.name) for field in fields(direct)}
            return replace(
                AgentStats(**both),
                leases=len(self._offers),
                pulls=len(self._pulls),
                pulls_failed=both["pulls_failed"] - self._pulls.refused,
                leases_expired=self._offers.expired,
                leases_revoked=self._offers.revoked,
                fallbacks=both["fallbacks"] + self._pulls.fallbacks,
            )

    def set_faults(self, faults: TransferFaults) -> None:
        self._direct.set_faults(faults)
        self._staged.set_faults(faults)

    def close(self) -> None:
        self._closing = True
        if self._thread.ident is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        self._direct.close()
        self._staged.close()
        with self._lock:
            self._take_news()

    # The thread.

    def _stream_ended(self, key: bytes, pull: Pull, ended: CopyEnded) -> None:
        """Start a pull, in the thread: the caller has the lock of the staged agent."""
        if ended.failure:
            self._due.append(partial(self._pulls.fail, key, pull, Cause.COPY, ended.failure))
        else:
            self._due.append(partial(self._pulls.start, key, pull))
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        news = select.poll()
        for descriptor in (self._direct.fileno(), self._staged.fileno(), self._wake):
            news.register(descriptor, select.POLLIN)
        while not self._closing:
            news.poll()
            with self._lock:
                self._take_news()

    def _take_news(self) -> None:
        if select.select([self._wake], [], [], 0)[0]:
            os.eventfd_read(self._wake)
        while self._due:
            self._guarded(self._due.popleft())
        for way, agent in ((Way.DIRECT, self._direct), (Way.STAGED, self._staged)):
            for event in agent.poll():
                self._guarded(partial(self._take, way, event))

    def _take(self, way: Way, event: TransferEvent) -> None:
        match event.kind:
            case EventKind.PULL_PROGRESS | EventKind.PULL_DONE | EventKind.PULL_FAILED:
                self._pulls.take(way, event)
            case _:
                self._offers.take(way, event)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:  # noqa: BLE001
            # The boundary of one event: whatever it was, the thread serves the others.
            _log.exception("one step of a hand-off failed")
