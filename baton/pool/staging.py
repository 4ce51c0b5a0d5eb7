"""Hand-offs of a cache that peers do not read: an agent that leases and pulls slots of host memory instead.

    source   the cache's blocks ──copied to the host──▶ slots, posted as ready ──▶ peers
    sink     peers ──▶ slots, verified ──copied to the device──▶ the cache's blocks, told as arrived

`StagedAgent` is a `TransferAgent` for the cache, around one for the slots. What it tells follows the *end* of copies:

- A layer is posted as ready once its blocks are in the slots. When the whole lease is, LEASE_STAGED says that the
  cache's blocks may be reused; the lease goes on with the slots.
- A layer has arrived, and a pull is done, once it is in the cache. A pull that fails or is cancelled ends once no copy
  writes its blocks any more.
- Slots are used again once no copy and no peer uses them.

A last block that is not full is copied when the lease is complete, so no block is copied twice, and blocks that
several ranks of a peer read or fill are copied once for all of them (`Whole`). A lease or pull that finds too few free
slots waits for them, in order; its peer waits with it, within the pull's time limits.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from baton.errors import ConfigurationError, MalformedMessage, TransferFailed
from baton.pool.agent_events import AgentEvents
from baton.pool.block_copies import BlockCopies
from baton.pool.memory import KvPool
from baton.pool.slot_queue import SlotQueue
from baton.pool.staged_copier import StagedCopier
from baton.pool.staged_flows import Flow, Staging
from baton.pool.staged_leases import StagedLease, StagedLeases
from baton.pool.staged_pulls import StagedPulls
from baton.transfer import (
    AgentStats,
    Cause,
    EventKind,
    Pool,
    TransferAgent,
    TransferEvent,
    TransferFaults,
    Whole,
    share_memory,
)
from baton.transfer.device import Copy, CopyEnded, CopyEngine
from baton.transfer.layout import read_layout

_log = logging.getLogger(__name__)

CHECK_S: Final = 0.1
"""Interval at which deadlines, and devices that failed silently, are looked for."""

_MARK_BYTES: Final = 16

Stream = Callable[[], int | None]
"""Returns the stream in which the caller's engine works; see `CopyEngine.submit`."""


class StagedAgent:
    """See the module's docstring. `agent` has no pool yet; `copies` and it belong to this one, which closes them."""

    def __init__(
        self,
        agent: TransferAgent,
        copies: CopyEngine,
        slots: int,
        *,
        pool_bytes: int = 0,
        on_ask: bool = False,
        stream: Stream = lambda: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_ask`: leases are staged once a peer asks for them, of which `agent` tells."""
        self.endpoint = agent.endpoint
        self._agent = agent
        self._copies = copies
        self.slots = slots
        self._pool_bytes = pool_bytes
        self._on_ask = on_ask
        self._stream = stream
        self._now_s = now_s
        self._lock = threading.Lock()
        self._events = AgentEvents()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="baton-staging", daemon=True)

    def set_pool(self, pool: Pool) -> None:
        """Reserve the slots. Raises ConfigurationError if there is no memory for them, or it cannot be pinned.

        If that is so only with the KV pool, there is none.
        """
        if self._thread.ident is not None:
            raise ValueError("the pool is set already")
        tensors = len(pool.layer_addresses)
        try:
            layers = read_layout(pool.layout).layers if pool.layout else tensors
        except MalformedMessage as malformed:
            raise ValueError(str(malformed)) from malformed
        self.memory = self._reserve(replace(pool, device=None))
        region = self.memory.pool.region
        assert region is not None
        cells = self.memory.cells
        self._mark = share_memory(mmap.PAGESIZE)
        self._copies.register(self._mark.address, self._mark.bytes)
        self._block_copies = BlockCopies(self._copies, pool, self.memory.pool)
        self._first = pool.layer_addresses[0]
        queue: SlotQueue[Flow] = SlotQueue(cells)
        self._staging = Staging(pool, layers, queue, self._block_copies, self._events.tell)
        self._leases = StagedLeases(self._agent, self._staging, self._stream, self._lease_ends, on_ask=self._on_ask)
        self.copier = StagedCopier(
            self._lock, self._block_copies, cells, self._leases.get, self._staging.let_go, self._stream
        )
        self._pulls = StagedPulls(self._agent, self._staging, self.copier.pulled, self._now_s)
        self._agent.set_pool(self.memory.pool)
        mib = region.bytes >> 20
        _log.info(
            "KV is handed off staged, through %d slots beside %d of the KV pool (%d MiB of host memory)",
            self.slots,
            self.memory.slots,
            mib,
        )
        self._thread.start()

    def _reserve(self, cache: Pool) -> KvPool:
        if self._pool_bytes:
            try:
                return self._pinned(KvPool(cache, self._pool_bytes, spare=self.slots))
            except ConfigurationError as refusal:
                _log.warning("this engine runs without a KV pool: %s", refusal)
        return self._pinned(KvPool(cache, 0, spare=self.slots))

    def _pinned(self, memory: KvPool) -> KvPool:
        region = memory.pool.region
        assert region is not None
        try:
            self._copies.register(region.address, region.bytes)
        except TransferFailed as failure:
            # A device's copies of memory that is not pinned would stop the engine until they end.
            raise ConfigurationError(
                f"{region.bytes} bytes of host memory, through which KV is staged, cannot be pinned: {failure.detail} "
                "(kv_staging_tokens takes less; kv_path=direct or handoff=false takes none)",
                param="kv_staging_tokens",
            ) from failure
        return memory

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
            if (slots := self._staging.blocks_of(tokens)) > self.slots:
                raise TransferFailed(f"{tokens} tokens need {slots} slots to be staged, and there are {self.slots}")
            generation = self._agent.open_lease(key, tokens=tokens, unclaimed_ttl_s=unclaimed_ttl_s)
            self._leases.open(key, generation, whole.key if whole else key, slots)
            return generation

    def extend_lease(self, key: bytes, generation: int, blocks: Sequence[int]) -> None:
        with self._lock:
            self._leases.extend(key, generation, blocks)

    def post_ready(self, key: bytes, generation: int, layer: int, tokens: int) -> None:
        with self._lock:
            self._leases.post_ready(key, generation, layer, tokens)

    def complete_lease(self, key: bytes, generation: int, tokens: int) -> None:
        with self._lock:
            self._leases.complete(key, generation, tokens)

    def revoke_lease(self, key: bytes, *, final: bool) -> None:
        """See `TransferAgent`. Copies that still read the blocks fill slots which no peer is told of."""
        with self._lock:
            self._agent.revoke_lease(key, final=final)
            self._events.forget_staged(key)
            self._leases.leave(key)

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
        """See `TransferAgent`. Whole blocks are copied, so pulls that fill parts of the same ones need a `whole`."""
        with self._lock:
            self._pulls.begin(
                key,
                endpoint,
                first_token=first_token,
                tokens=tokens,
                blocks=blocks,
                budget_s=budget_s,
                after=self._stream(),
                whole=whole or Whole(key=key, parts=1),
            )

    def cancel_pull(self, key: bytes) -> None:
        with self._lock:
            if not self._pulls.cancel(key):
                self._agent.cancel_pull(key)

    def after_stream(self, ended: Callable[[CopyEnded], None]) -> None:
        """Call `ended`, in the agent's thread and under its lock, once the work that is in the stream now has ended.

        Raises TransferFailed. A copy of a few bytes marks the end.
        """
        mark = Copy(to=self._mark.address, source=self._first, size=_MARK_BYTES)
        with self._lock:
            list(self._block_copies.submit([mark], after=self._stream(), ended=ended))

    def release(self, key: bytes, endpoint: str) -> None:
        self._agent.release(key, endpoint)

    def stats(self) -> AgentStats:
        return self._agent.stats()

    def set_faults(self, faults: TransferFaults) -> None:
        self._agent.set_faults(faults)

    def close(self) -> None:
        self._closing = True
        if self._thread.ident is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        self._agent.close()
        self._copies.close()

    # All that follows runs under the lock.

    def _lease_ends(self, lease: StagedLease) -> None:
        self.copier.lease_ends(lease)

    # The thread.

    def _run(self) -> None:
        news = select.poll()
        for descriptor in (self._agent.fileno(), self._copies.fileno(), self._wake):
            news.register(descriptor, select.POLLIN)
        while not self._closing:
            news.poll(CHECK_S * 1000)
            with self._lock:
                self._guarded(self._take_news)
                self._guarded(self._pulls.check_deadlines)

    def _take_news(self) -> None:
        self._block_copies.take_ended()
        for event in self._agent.poll():
            self._guarded(partial(self._take, event))

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:  # noqa: BLE001
            # The boundary of one event: whatever it was, the thread serves the others.
            _log.exception("one step of a staged hand-off failed")

    def _take(self, event: TransferEvent) -> None:
        match event.kind:
            case EventKind.PULL_PROGRESS | EventKind.PULL_DONE | EventKind.PULL_FAILED:
                if not self._pulls.take(event):
                    self._events.tell(event)
            # A lease's end that follows from a revocation has ended it here already.
            case EventKind.LEASE_RELEASED | EventKind.LEASE_ENDED if event.cause is not Cause.REVOKED:
                if self._leases.reads(event.key):
                    self._leases.leave(event.key, event)
                else:
                    self._events.tell(event)
            case EventKind.LEASE_ASKED:
                self._leases.asked(event.key)
                self._events.tell(event)
            case _:
                self._events.tell(event)
