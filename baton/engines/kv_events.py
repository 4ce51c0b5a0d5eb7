"""An engine's KV events: received and decoded on a thread of their own, so that token streams never wait for them.

vLLM and SGLang publish alike over ZMQ: three frames (topic, sequence from 0 as 8 bytes big-endian, MessagePack
`[timestamp, events, rank]`). Each event is a map with a `type`. Sources: `vllm/distributed/kv_events.py` (0.32),
`sglang/srt/disaggregation/kv_events.py` (0.5.23).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

import msgspec
import zmq
import zmq.utils.monitor

from baton.connectors.pool_events import FILE_MEDIUM, POOL_MEDIUM
from baton.engines.engine import (
    EngineBlockEvent,
    EngineBlocksCleared,
    EngineBlocksRemoved,
    EngineBlocksStored,
    EngineEventBatch,
)
from baton.errors import ConfigurationError, EngineFailed
from baton.messages.index import Tier

_log = logging.getLogger(__name__)

BATCHES_MAX: Final = 10_000
"""Bound of the batches that wait for the consumer. Beyond it the newest are dropped, a gap in the sequence."""

_TIERS: Final = {None: Tier.DEVICE, "GPU": Tier.DEVICE, POOL_MEDIUM: Tier.POOL, FILE_MEDIUM: Tier.FILE}
"""Tier of each medium; `GPU` is the engine's own cache in both engines, on a CPU too. Others are ignored."""

_HASH_BITS: Final = 64


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    extra_keys: list[tuple[object, ...] | None] | None = None
    """Further keys of the blocks, vLLM's field; a cache salt is among those of a prompt's first block only."""
    cache_salt: str | None = None
    """The cache salt, SGLang's field."""


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[bytes | int]
    medium: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]


_decoder = msgspec.msgpack.Decoder(_Batch)


def decode_batch(sequence: bytes, payload: bytes) -> EngineEventBatch:
    """Return one published batch. Raises msgspec.DecodeError if the format has changed."""
    batch = _decoder.decode(payload)
    events = tuple(event for published in batch.events if (event := _event(published)) is not None)
    return EngineEventBatch(sequence=int.from_bytes(sequence, "big") + 1, events=events)


def _event(published: _Stored | _Removed | _Cleared) -> EngineBlockEvent | None:
    match published:
        case _Cleared():
            # Engines clear their own cache only.
            return EngineBlocksCleared(tier=Tier.DEVICE)
        case _Stored(medium=medium) | _Removed(medium=medium) if medium not in _TIERS:
            return None
        case _Removed(block_hashes=hashes, medium=medium):
            return EngineBlocksRemoved(hashes=tuple(map(_opaque, hashes)), tier=_TIERS[medium])
        case _Stored():
            parent = published.parent_block_hash
            return EngineBlocksStored(
                parent=None if parent is None else _opaque(parent),
                hashes=tuple(map(_opaque, published.block_hashes)),
                tokens=tuple(published.token_ids),
                block_tokens=published.block_size,
                cache_salt=published.cache_salt or _salt(published.extra_keys),
                tier=_TIERS[published.medium],
            )


def _opaque(block_hash: bytes | int) -> bytes:
    # SGLang's numbers are signed, vLLM's are not.
    return block_hash if isinstance(block_hash, bytes) else (block_hash % (1 << _HASH_BITS)).to_bytes(8, "big")


def _salt(extra_keys: list[tuple[object, ...] | None] | None) -> str:
    first = extra_keys[0] if extra_keys else None
    return next((key for key in first or () if isinstance(key, str)), "")


class KvEventListener:
    """Receives one engine's events. `start` and `events` belong to one event loop."""

    def __init__(self, engine: str, endpoint: str, *, initial_batches: int = 0) -> None:
        """Make a listener. `initial_batches`: how many the engine publishes as it starts, which may come too early."""
        self._engine = engine
        self._initial_batches = initial_batches
        self._missed: int | None = None
        """Batches that came before this listened; None until it has heard one."""
        self._endpoint = endpoint
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._connected = threading.Event()
        self._batches: deque[EngineEventBatch] = deque()
        self._wake = asyncio.Event()
        self._closed = False
        self._ended = False
        self._failure = ""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="baton-kv-events", daemon=True)

    def start(self) -> None:
        """Listen; before the engine binds its end, so that its first event is not missed."""
        self._thread.start()

    async def connected(self, timeout_s: float) -> None:
        """Wait for the engine's publisher. Raises ConfigurationError if it does not connect in time."""
        if not await asyncio.to_thread(self._connected.wait, timeout_s):
            raise ConfigurationError(
                f"{self._engine}'s KV events did not appear at {self._endpoint} within {timeout_s:g} s"
            )

    async def events(self) -> AsyncIterator[EngineEventBatch]:
        """Yield batches until `close`, then raise EngineFailed."""
        while True:
            while self._batches:
                yield self._batches.popleft()
            if self._ended:
                raise EngineFailed(self._failure or "the engine has ended, and its KV events with it")
            self._wake.clear()
            # Nothing can come between the check and the wait: deliveries set the event on this same loop.
            if not self._batches:
                await self._wake.wait()

    def close(self) -> None:
        """Stop the thread and let the consumer end. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._end()
        if self._thread.is_alive():
            os.eventfd_write(self._stop_fd, 1)
            self._thread.join()
        os.close(self._stop_fd)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
            subscriber.set_hwm(0)
            subscriber.subscribe(b"")
            monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            subscriber.connect(self._endpoint)
            poller = zmq.Poller()
            for source in (subscriber, monitor, self._stop_fd):
                poller.register(source, zmq.POLLIN)
            try:
                self._receive(poller, subscriber, monitor)
            except (msgspec.DecodeError, ValueError) as error:
                self._failure = f"{self._engine} published KV events that this version of Baton cannot read: {error}"
                _log.exception("KV events stopped")
                self._loop.call_soon_threadsafe(self._end)
            finally:
                subscriber.disable_monitor()
                monitor.close(linger=0)

    def _receive(self, poller: zmq.Poller, subscriber: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        while True:
            ready = dict(poller.poll())
            if self._stop_fd in ready:
                return
            if monitor in ready:
                zmq.utils.monitor.recv_monitor_message(monitor)
                self._connected.set()
            if subscriber in ready:
                _topic, sequence, payload = subscriber.recv_multipart()
                self._deliver(decode_batch(sequence, payload))

    def _deliver(self, batch: EngineEventBatch) -> None:
        if self._missed is None:
            self._missed = min(batch.sequence - 1, self._initial_batches)
        batch = replace(batch, sequence=batch.sequence - self._missed)
        if len(self._batches) >= BATCHES_MAX:
            _log.warning("dropped KV event batch %d: the consumer is too slow", batch.sequence)
            return
        self._batches.append(batch)
        # One wake-up for all batches that come until the loop runs.
        if len(self._batches) == 1:
            self._loop.call_soon_threadsafe(self._wake.set)

    def _end(self) -> None:
        self._ended = True
        self._wake.set()
