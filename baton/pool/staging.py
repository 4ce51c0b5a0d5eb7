"""Hand-offs of a cache that peers do not read: an agent that leases and pulls slots of host memory instead.

    source   the cache's blocks ──copied to the host──▶ slots, posted as ready ──▶ peers
    sink     peers ──▶ slots, verified ──copied to the device──▶ the cache's blocks, told as arrived

`StagedAgent` is a `TransferAgent` for the cache, around one for the slots. What it tells follows the *end* of copies:

- A layer is posted as ready once its blocks are in the slots. When the whole lease is, LEASE_STAGED says that the
  cache's blocks may be reused; the lease goes on with the slots.
- A layer has arrived, and a pull is done, once it is in the cache. A pull that fails or is cancelled ends once no copy
  writes its blocks any more.
- Slots are used again once no copy and no peer uses them.

A last block that is not full is copied when the lease is complete, so no block is copied twice. A lease or pull that
finds too few free slots waits for them, in order; its peer waits with it, within the pull's time limits.
"""

from __future__ import annotations

import logging
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
from baton.pool.block_copies import BlockCopies
from baton.pool.memory import KvPool
from baton.pool.slot_queue import SlotQueue
from baton.pool.staged_copier import StagedCopier
from baton.pool.staged_flows import StagedLease, StagedPull, Step
from baton.transfer import AgentStats, Cause, EventKind, Pool, TransferAgent, TransferEvent, TransferFaults
from baton.transfer.device import Copy, CopyEnded, CopyEngine
from baton.transfer.layout import read_layout

_log = logging.getLogger(__name__)

ALL_LAYERS: Final = -1
CHECK_S: Final = 0.1
"""Interval at which deadlines, and devices that failed silently, are looked for."""

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
        stream: Stream = lambda: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.endpoint = agent.endpoint
        self._agent = agent
        self._copies = copies
        self.slots = slots
        self._pool_bytes = pool_bytes
        self._stream = stream
        self._now_s = now_s
        self._lock = threading.Lock()
        self._leases: dict[bytes, StagedLease] = {}
        self._pulls: dict[bytes, StagedPull] = {}
        self._events: list[TransferEvent] = []
        self._readable = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        for descriptor in (self._readable, self._wake):
            weakref.finalize(self, os.close, descriptor)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="baton-staging", daemon=True)

    def set_pool(self, pool: Pool) -> None:
        """Reserve the slots. Raises ConfigurationError if there is no memory for them."""
        if self._thread.ident is not None:
            raise ValueError("the pool is set already")
        tensors = len(pool.layer_addresses)
        try:
            self._layers = read_layout(pool.layout).layers if pool.layout else tensors
        except MalformedMessage as malformed:
            raise ValueError(str(malformed)) from malformed
        self._cache = pool
        self.memory = self._reserve(replace(pool, device=None))
        region = self.memory.pool.region
        assert region is not None
        cells = self.memory.cells
        self._queue: SlotQueue[StagedLease | StagedPull] = SlotQueue(cells)
        self._tensors_per_layer = tensors // self._layers
        self._copies.register(region.address, region.bytes)
        self._block_copies = BlockCopies(self._copies, pool, self.memory.pool)
        self.copier = StagedCopier(self._lock, self._block_copies, cells, self._leases.get, self._stream)
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
                return KvPool(cache, self._pool_bytes, spare=self.slots)
            except ConfigurationError as refusal:
                _log.warning("this engine runs without a KV pool: %s", refusal)
        return KvPool(cache, 0, spare=self.slots)

    def fileno(self) -> int:
        return self._readable

    def poll(self) -> list[TransferEvent]:
        with self._lock:
            events, self._events = self._events, []
            if events:
                os.eventfd_read(self._readable)
            return events

    # Source.

    def open_lease(self, key: bytes, *, tokens: int = 0, unclaimed_ttl_s: float | None = None) -> int:
        with self._lock:
            if (slots := self._blocks_of(tokens)) > self.slots:
                raise TransferFailed(f"{tokens} tokens need {slots} slots to be staged, and there are {self.slots}")
            generation = self._agent.open_lease(key, tokens=tokens, unclaimed_ttl_s=unclaimed_ttl_s)
            none = [0] * self._layers
            lease = StagedLease(key, [], generation=generation, ready=none, copied=list(none))
            self._leases[key] = lease
            self._ask(lease, slots)
            return generation

    def extend_lease(self, key: bytes, generation: int, blocks: Sequence[int]) -> None:
        self._check_blocks(blocks)
        with self._lock:
            if lease := self._current(key, generation):
                lease.blocks.extend(blocks)
                self._ask(lease, len(lease.blocks) - lease.asked)
                self._lease_slots(lease)

    def post_ready(self, key: bytes, generation: int, layer: int, tokens: int) -> None:
        with self._lock:
            if lease := self._current(key, generation):
                if not ALL_LAYERS <= layer < self._layers:
                    raise ValueError(f"there is no layer {layer}")
                if not 0 <= tokens <= len(lease.blocks) * self._cache.block_tokens:
                    raise ValueError(f"{tokens} tokens cannot be ready in {len(lease.blocks)} blocks")
                for each in range(self._layers) if layer == ALL_LAYERS else (layer,):
                    lease.ready[each] = max(lease.ready[each], tokens)
                lease.after = self._stream()
                self._copy_ready(lease)

    def complete_lease(self, key: bytes, generation: int, tokens: int) -> None:
        with self._lock:
            if lease := self._current(key, generation):
                if self._blocks_of(tokens) > len(lease.blocks):
                    raise ValueError(f"{tokens} tokens do not fit into {len(lease.blocks)} blocks")
                lease.tokens = tokens
                self._lease_slots(lease)
                self._copy_ready(lease)

    def revoke_lease(self, key: bytes, *, final: bool) -> None:
        """See `TransferAgent`. Copies that still read the blocks fill slots which no peer is told of."""
        with self._lock:
            self._agent.revoke_lease(key, final=final)
            self._events = [
                event for event in self._events if event.key != key or event.kind is not EventKind.LEASE_STAGED
            ]
            if lease := self._leases.pop(key, None):
                self._end(lease)

    # Sink.

    def pull(
        self, key: bytes, endpoint: str, *, first_token: int, tokens: int, blocks: Sequence[int], budget_s: float
    ) -> None:
        """See `TransferAgent`. Whole blocks are copied, so several pulls cannot fill parts of the same blocks."""
        self._check_blocks(blocks)
        with self._lock:
            if key in self._pulls:
                raise ValueError("this key is pulled already")
            now_s = self._now_s()
            pull = self._pulls[key] = StagedPull(
                key,
                list(blocks),
                endpoint=endpoint,
                first_token=first_token,
                tokens=tokens,
                began_s=now_s,
                deadline_s=now_s + budget_s,
                after=self._stream(),
            )
            try:
                self._ask(pull, len(blocks))
            except Exception:
                self._pulls.pop(key, None)
                raise

    def cancel_pull(self, key: bytes) -> None:
        with self._lock:
            pull = self._pulls.get(key)
            if pull is None or pull.started:
                self._agent.cancel_pull(key)
            else:
                self._give_up(pull, Cause.CANCELLED, "it waited for slots")

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

    # Slots. All that follows runs under the lock.

    def _ask(self, flow: StagedLease | StagedPull, slots: int) -> None:
        if slots <= 0 and isinstance(flow, StagedLease):
            return
        self._queue.ask(flow, slots)
        if isinstance(flow, StagedLease):
            flow.asked += slots
        self._grant()

    def _grant(self) -> None:
        while granted := self._queue.grant():
            flow, slots = granted
            flow.slots += slots
            if isinstance(flow, StagedLease):
                self._lease_slots(flow)
                self._copy_ready(flow)
            else:
                self._start(flow)

    # Leases.

    def _current(self, key: bytes, generation: int) -> StagedLease | None:
        lease = self._leases.get(key)
        return lease if lease is not None and lease.generation == generation else None

    def _lease_slots(self, lease: StagedLease) -> None:
        """Tell the peers of the slots for the lease's blocks, as far as there are any, and of its length."""
        end = min(len(lease.slots), len(lease.blocks))
        if end > lease.leased:
            self._agent.extend_lease(lease.key, lease.generation, lease.slots[lease.leased : end])
            lease.leased = end
        if lease.tokens and end == len(lease.blocks):
            self._agent.complete_lease(lease.key, lease.generation, lease.tokens)

    def _copy_ready(self, lease: StagedLease) -> None:
        """Copy what is in the cache and was not copied yet, once there are slots for all blocks so far."""
        if lease.leased < len(lease.blocks) or lease.over:
            return
        copies: list[Copy] = []
        posts: list[tuple[int, int]] = []
        for layer, tokens in enumerate(lease.ready):
            # What follows in a block that is not full is written beside a copy of it.
            whole = tokens if 0 < lease.tokens <= tokens else tokens - tokens % self._cache.block_tokens
            if whole > lease.copied[layer]:
                first, end = lease.copied[layer] // self._cache.block_tokens, self._blocks_of(whole)
                copies += self._block_copies.between(
                    lease.blocks[first:end], lease.slots[first:end], self._tensors(layer, layer + 1), to_device=False
                )
                lease.copied[layer] = whole
                posts.append((layer, whole))
        is_staged = 0 < lease.tokens <= min(lease.copied) and not lease.is_staged
        lease.is_staged |= is_staged
        if not posts and not is_staged:
            return
        if len(posts) == self._layers and len({tokens for _, tokens in posts}) == 1:
            posts = [(ALL_LAYERS, posts[0][1])]
        self._submit(lease, copies, partial(self._post, lease, posts, is_staged=is_staged))

    def _post(self, lease: StagedLease, posts: list[tuple[int, int]], *, is_staged: bool) -> None:
        for layer, tokens in posts:
            self._agent.post_ready(lease.key, lease.generation, layer, tokens)
        if is_staged:
            self._tell(TransferEvent(kind=EventKind.LEASE_STAGED, key=lease.key, tokens=lease.tokens))

    # Pulls.

    def _start(self, pull: StagedPull) -> None:
        now_s = self._now_s()
        pull.waited_s = now_s - pull.began_s
        pull.started = True
        try:
            self._agent.pull(
                pull.key,
                pull.endpoint,
                first_token=pull.first_token,
                tokens=pull.tokens,
                blocks=pull.slots,
                budget_s=max(pull.deadline_s - now_s, 0.0),
            )
        except (TransferFailed, ValueError) as error:
            self._give_up(pull, Cause.REFUSED, str(error))

    def _give_up(self, pull: StagedPull, cause: Cause, detail: str) -> None:
        """End a pull that the peer was not asked for."""
        self._end(pull, TransferEvent(kind=EventKind.PULL_FAILED, key=pull.key, cause=cause, detail=detail))

    def _arrived(self, pull: StagedPull, event: TransferEvent) -> None:
        """Copy the layers that are in the slots now; tell the event once they are in the cache."""
        if event.restarts > pull.restarts:
            # The slots have the KV of a newer generation now.
            pull.restarts, pull.layers = event.restarts, 0
        layers = self._layers if event.kind is EventKind.PULL_DONE else event.layers
        tensors = self._tensors(pull.layers, layers)
        copies = list(self._block_copies.between(pull.blocks, pull.slots, tensors, to_device=True))
        pull.layers = max(pull.layers, layers)
        pull.done = event if event.kind is EventKind.PULL_DONE else None
        self._submit(pull, copies, partial(self._tell_pull, pull, event, self._now_s()))

    def _tell_pull(self, pull: StagedPull, event: TransferEvent, arrived_s: float) -> None:
        told = replace(
            event,
            backend=event.backend and f"{event.backend}+staged",
            waiting_s=event.waiting_s + pull.waited_s,
            moving_s=event.moving_s + self._now_s() - arrived_s,
        )
        if event.kind is EventKind.PULL_PROGRESS:
            self._tell(told)
        else:
            self.copier.pulled(pull)
            self._end(pull, told)

    # Both.

    def _submit(self, flow: StagedLease | StagedPull, copies: Sequence[Copy], then: Callable[[], None]) -> None:
        """Start copies; call `then` once they and all before them have ended, unless the flow fails or is over."""
        step = Step(then)
        flow.steps.append(step)
        try:
            for ticket in self._block_copies.submit(copies, after=flow.after, ended=partial(self._copied, flow, step)):
                step.tickets.add(ticket)
                flow.batches += 1
        except (TransferFailed, ValueError) as error:
            self._fail(flow, str(error))
        self._advance(flow)

    def _advance(self, flow: StagedLease | StagedPull) -> None:
        while flow.steps and not flow.steps[0].tickets:
            flow.steps.popleft().then()
        if flow.over and not flow.batches and not flow.closed:
            flow.closed = True
            if flow.last is not None:
                self._tell(flow.last)
            self._queue.give_back(flow.slots)
            self._grant()

    def _fail(self, flow: StagedLease | StagedPull, reason: str) -> None:
        """End a lease or pull because a copy of it failed."""
        if flow.over or flow.failure:
            return
        _log.error("a hand-off's copy failed: %s", reason)
        flow.failure = reason
        flow.steps.clear()
        if isinstance(flow, StagedLease):
            del self._leases[flow.key]
            self._agent.revoke_lease(flow.key, final=True)
            event = TransferEvent(kind=EventKind.LEASE_ENDED, key=flow.key, cause=Cause.COPY, detail=reason)
            self._end(flow, event)
        elif flow.done is not None:
            self._end(flow, _failed(flow, flow.done))
        else:
            self._agent.cancel_pull(flow.key)

    def _end(self, flow: StagedLease | StagedPull, last: TransferEvent | None = None) -> None:
        """Let nothing new begin; tell `last` and free the slots once no copy is under way."""
        if isinstance(flow, StagedLease) and not flow.failure:
            self.copier.lease_ends(flow)
        flow.over, flow.last = True, last
        flow.steps.clear()
        if isinstance(flow, StagedPull):
            self._pulls.pop(flow.key, None)
        if self._queue.leave(flow):
            self._grant()
        self._advance(flow)

    def _tell(self, event: TransferEvent) -> None:
        self._events.append(event)
        os.eventfd_write(self._readable, 1)

    def _tensors(self, first_layer: int, end_layer: int) -> range:
        return range(first_layer * self._tensors_per_layer, end_layer * self._tensors_per_layer)

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._cache.block_tokens)

    def _check_blocks(self, blocks: Sequence[int]) -> None:
        if any(not 0 <= block < self._cache.blocks for block in blocks):
            raise ValueError(f"a block lies outside the pool of {self._cache.blocks} blocks")

    # The thread.

    def _run(self) -> None:
        news = select.poll()
        for descriptor in (self._agent.fileno(), self._copies.fileno(), self._wake):
            news.register(descriptor, select.POLLIN)
        while not self._closing:
            news.poll(CHECK_S * 1000)
            with self._lock:
                self._guarded(self._take_news)
                self._guarded(self._check_deadlines)

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

    def _copied(self, flow: StagedLease | StagedPull, step: Step, ended: CopyEnded) -> None:
        flow.batches -= 1
        step.tickets.discard(ended.ticket)
        if ended.failure:
            self._fail(flow, ended.failure)
        self._advance(flow)

    def _take(self, event: TransferEvent) -> None:
        pull, lease = self._pulls.get(event.key), self._leases.get(event.key)
        match event.kind:
            case EventKind.PULL_FAILED if pull is not None:
                self._end(pull, _failed(pull, event))
            case EventKind.PULL_DONE if pull is not None and pull.failure:
                self._end(pull, _failed(pull, event))
            case EventKind.PULL_PROGRESS | EventKind.PULL_DONE if pull is not None:
                self._arrived(pull, event)
            case EventKind.LEASE_RELEASED | EventKind.LEASE_ENDED if lease is not None and not _asked_for(event):
                del self._leases[event.key]
                self._end(lease, event)
            case _:
                self._tell(event)

    def _check_deadlines(self) -> None:
        now_s = self._now_s()
        for pull in [pull for pull in self._pulls.values() if not pull.started and now_s >= pull.deadline_s]:
            self._give_up(pull, Cause.DEADLINE, "it waited for slots")


def _asked_for(event: TransferEvent) -> bool:
    """Whether a lease's end follows from a revocation, which has ended it here already."""
    return event.cause is Cause.REVOKED


def _failed(pull: StagedPull, event: TransferEvent) -> TransferEvent:
    """Return the event of a pull's end, as a failure if a copy of it failed."""
    if not pull.failure:
        return event
    return replace(event, kind=EventKind.PULL_FAILED, cause=Cause.COPY, detail=pull.failure)
