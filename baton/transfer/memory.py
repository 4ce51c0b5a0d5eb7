"""Transfer agents inside one process, without sockets: for tests and simulators.

A `MemoryFabric` makes agents that reach each other. Each has a core, the same state machine as native agents, which
decides everything about leases and pulls; the agent carries out the core's actions. Frames and chunks reach the other
side through the fabric's queue, in the order in which they were sent, without delay.

One thread per fabric processes the queue and wakes the cores in time; the owner of a fabric without a thread calls
`step` instead. Time comes from `now_s`, and nothing is random: equal calls give equal events.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from baton_native import core, crc32c

from baton.errors import TransferFailed
from baton.transfer.layout import Layout, Table, convert_tensor
from baton.transfer.layout import Pool as LayoutPool
from baton.transfer.native_values import (
    agent_stats,
    block_indexes,
    checked_key,
    native_faults,
    native_options,
    natural,
    transfer_event,
)
from baton.transfer.protocol import AgentOptions, AgentStats, Pool, TransferEvent, TransferFaults, Whole

BACKEND: Final = "memory"
_FRAME_LENGTH_BYTES: Final = 4
_INLINE: Final = -1
"""The slot of a chunk that travels among the frames."""


class MemoryFabric:
    """Makes agents, and delivers to each the events that others cause."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic, threaded: bool = True) -> None:
        self.now_s = now_s
        self.changed: Final = threading.Condition(threading.RLock())
        """Held around every step of a core; notified when the thread has something to do."""
        self.numbers: Final = count(1)
        """Numbers of agents; none is used twice."""
        self._agents: dict[str, MemoryAgent] = {}
        """Open agents, by address."""
        self._queue: deque[tuple[MemoryAgent, core.Event]] = deque()
        self._cuts: set[frozenset[str]] = set()
        self._threaded = threaded
        self._thread: threading.Thread | None = None

    def agent(self, options: AgentOptions | None = None) -> MemoryAgent:
        return MemoryAgent(self, options or AgentOptions())

    def cut(self, one: str, other: str, *, apart: bool = True) -> None:
        """Separate two endpoints, or join them again."""
        pair = frozenset((_address(one), _address(other)))
        with self.changed:
            if not apart:
                self._cuts.discard(pair)
                return
            self._cuts.add(pair)
            for end in [end for agent in self._agents.values() for end in agent.ends.values()]:
                if frozenset((end.agent.address, end.peer.agent.address)) == pair:
                    self.hang_up(end, "the agents were separated")
            self.changed.notify()

    def step(self) -> None:
        """Deliver queued events to agents, and wake those whose time has come, until nothing is left to do."""
        with self.changed:
            while True:
                while self._queue:
                    agent, event = self._queue.popleft()
                    agent.take(event)
                now_s = self.now_s()
                late = next((agent for agent in self._agents.values() if agent.wake_s <= now_s), None)
                if late is None:
                    return
                late.take()

    # For agents.

    def join(self, agent: MemoryAgent) -> None:
        with self.changed:
            self._agents[agent.address] = agent
            if self._threaded and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="memory transfer", daemon=True)
                self._thread.start()
            self.changed.notify()

    def leave(self, agent: MemoryAgent) -> threading.Thread | None:
        """Deliver an agent's last messages and its end; return the thread to join after the last agent."""
        del self._agents[agent.address]
        for end in list(agent.ends.values()):
            self.hang_up(end, "the agent was closed")
        self.step()
        self.changed.notify()
        if self._agents:
            return None
        thread, self._thread = self._thread, None
        return thread

    def tell(self, agent: MemoryAgent, event: core.Event) -> None:
        self._queue.append((agent, event))

    def connect(self, sink: MemoryAgent, connect: core.Connect) -> None:
        source = self._agents.get(connect.address)
        if source is None or frozenset((sink.address, connect.address)) in self._cuts:
            why = f"no agent answers at {connect.address}"
            self.tell(sink, core.Closed(connect.connection, why, refused=source is None))
            return
        ours, theirs = End(sink, connect.connection), End(source, next(source.connections))
        ours.peer, theirs.peer = theirs, ours
        sink.ends[ours.connection], source.ends[theirs.connection] = ours, theirs
        self.tell(source, core.Accepted(theirs.connection))
        self.tell(sink, core.Connected(ours.connection))

    def hang_up(self, end: End, why: str) -> None:
        """Close a connection on both sides. Frames that were sent before still arrive."""
        for side in (end, end.peer):
            if side.agent.ends.pop(side.connection, None) is not None:
                self.tell(side.agent, core.Closed(side.connection, why))

    def _run(self) -> None:
        with self.changed:
            while self._thread is threading.current_thread():
                self.step()
                wake_s = min(agent.wake_s for agent in self._agents.values())
                self.changed.wait(None if math.isinf(wake_s) else max(0.0, wake_s - self.now_s()))


@dataclass(slots=True, eq=False)
class End:
    """One agent's end of a connection."""

    agent: MemoryAgent
    connection: int
    peer: End = field(init=False)
    arrived: deque[bytes] = field(default_factory=deque[bytes])
    """Chunks that were announced to the core, or will be."""
    source_layout: Layout | None = None
    """Layout of the source's blocks, if they must be converted."""
    staged: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """Chunks to be converted, by the number of their first staged block; the core reuses the numbers."""


class MemoryAgent:
    """In-memory `TransferAgent` that behaves like `NativeAgent`; made by `MemoryFabric.agent`."""

    def __init__(self, fabric: MemoryFabric, options: AgentOptions) -> None:
        native = native_options(options)
        native.backends = [BACKEND]
        native.incarnation = number = next(fabric.numbers)
        self.address = f"memory-{number}:1"
        self.endpoint = f"{self.address}/{number:016x}"
        self.pool: Pool | None = None
        self.ends: dict[int, End] = {}
        """Ends by connection."""
        self.connections: Final = count(1, 2)
        """Ids of the connections that others open (odd); those that the core opens are even."""
        self._fabric = fabric
        self._core = core.Core(native)
        self._layout_pool: LayoutPool | None = None
        self._events: list[TransferEvent] = []
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # It stays open until the agent is collected, because closing the agent produces events.
        weakref.finalize(self, os.close, self._eventfd)
        self._closed = False
        fabric.join(self)

    def fileno(self) -> int:
        return self._eventfd

    def poll(self) -> list[TransferEvent]:
        with self._fabric.changed:
            events, self._events = self._events, []
            if events:
                os.eventfd_read(self._eventfd)
            return events

    def set_pool(self, pool: Pool) -> None:
        layers, layout_pool = len(pool.layer_addresses), None
        if pool.layout:
            layout = Layout.parse(pool.layout)
            layers = layout.layers
            layout_pool = LayoutPool(layout, pool.layer_addresses, pool.blocks, pool.block_stride_bytes)
        with self._fabric.changed:
            self._core.set_geometry(
                pool.fingerprint, layers, pool.blocks, pool.block_bytes, pool.block_tokens, pool.layout
            )
            self.pool, self._layout_pool = pool, layout_pool

    def open_lease(
        self, key: bytes, *, tokens: int = 0, unclaimed_ttl_s: float | None = None, whole: Whole | None = None
    ) -> int:
        with self._fabric.changed:
            self._command(core.OpenLease(checked_key(key), -1.0 if unclaimed_ttl_s is None else unclaimed_ttl_s))
            return self._core.generation(key)

    def extend_lease(self, key: bytes, generation: int, blocks: Sequence[int]) -> None:
        self._command(core.ExtendLease(checked_key(key), generation, block_indexes(blocks)))

    def post_ready(self, key: bytes, generation: int, layer: int, tokens: int) -> None:
        self._command(core.PostReady(checked_key(key), generation, layer, natural("tokens", tokens)))

    def complete_lease(self, key: bytes, generation: int, tokens: int) -> None:
        self._command(core.CompleteLease(checked_key(key), generation, natural("tokens", tokens)))

    def revoke_lease(self, key: bytes, *, final: bool) -> None:
        self._command(core.RevokeLease(checked_key(key), final))

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
        first_token, tokens = natural("first_token", first_token), natural("tokens", tokens)
        self._command(core.StartPull(checked_key(key), endpoint, first_token, tokens, block_indexes(blocks), budget_s))

    def cancel_pull(self, key: bytes) -> None:
        self._command(core.CancelPull(checked_key(key)))

    def release(self, key: bytes, endpoint: str) -> None:
        self._command(core.ReleaseLease(checked_key(key), endpoint))

    def stats(self) -> AgentStats:
        with self._fabric.changed:
            return agent_stats(self._core.stats())

    def set_faults(self, faults: TransferFaults) -> None:
        self._command(core.SetFaults(native_faults(faults)))

    def close(self) -> None:
        with self._fabric.changed:
            if self._closed:
                return
            self.take(core.Shutdown())
            thread = self._fabric.leave(self)
            self._closed = True
        if thread is not None:
            thread.join()

    def _command(self, command: core.Event) -> None:
        with self._fabric.changed:
            if self._closed:
                raise TransferFailed("the transfer agent is closed")
            self.take(command)
            self._fabric.changed.notify()

    # For the fabric, which holds its lock meanwhile.

    @property
    def wake_s(self) -> float:
        """Instant at which the core must be stepped even without an event."""
        return self._core.wake_s

    def take(self, *events: core.Event) -> None:
        """Step the core, and carry out its actions."""
        for action in self._core.step(self._fabric.now_s(), events):
            self._carry_out(action)

    def _carry_out(self, action: core.Action) -> None:
        match action:
            case core.Report():
                if not self._events:
                    os.eventfd_write(self._eventfd, 1)
                self._events.append(transfer_event(action))
            case core.Connect():
                self._fabric.connect(self, action)
            case core.StopPlacing():
                # Chunks are placed at once, so none is in progress.
                self._fabric.tell(self, core.PlacingStopped(action.pull))
            case _:
                # The core will be told of a closed connection.
                if (end := self.ends.get(action.connection)) is not None:
                    self._carry_out_on(end, action)

    def _carry_out_on(self, end: End, action: core.Action) -> None:
        tell, connection = self._fabric.tell, end.connection
        match action:
            case core.Send():
                frame = action.frame[_FRAME_LENGTH_BYTES:]
                tell(end.peer.agent, core.FrameArrived(end.peer.connection, frame))
            case core.Serve():
                self._serve(end, action)
            case core.Place():
                self._place(end, action)
            case core.Convert():
                self._convert(end, action)
            case core.Discard():
                end.arrived.popleft()
            case core.Stage():
                end.source_layout = Layout.parse(action.layout)
            case core.OfferBackend():
                tell(self, core.BackendOffered(connection, True, b""))
            case core.AcceptBackend():
                tell(self, core.BackendAccepted(connection, True, b""))
            case core.CheckBackend():
                tell(self, core.BackendChecked(connection, True))
            case core.Close():
                self._fabric.hang_up(end, action.detail)
            case _:
                pass  # Chunks are served at once and use no slots.

    def _serve(self, end: End, chunk: core.Serve) -> None:
        assert self.pool is not None
        data = b"".join(
            ctypes.string_at(address, self.pool.block_bytes)
            for address in _addresses(self.pool, chunk.layer, chunk.blocks)
        )
        sent = chunk.corrupted(data)
        crc = crc32c(sent if chunk.before_checksum else data)
        end.peer.arrived.append(sent)
        arrived = core.DataArrived(end.peer.connection, chunk.pull, chunk.sequence, len(sent))
        self._fabric.tell(end.peer.agent, arrived)
        self._fabric.tell(self, core.Served(end.connection, chunk.pull, chunk.sequence, _INLINE, crc))

    def _place(self, end: End, chunk: core.Place) -> None:
        assert self.pool is not None
        data = end.arrived.popleft()
        if end.source_layout is not None:
            end.staged[chunk.blocks[0]] = data
        else:
            size = self.pool.block_bytes
            for number, address in enumerate(_addresses(self.pool, chunk.layer, chunk.blocks)):
                ctypes.memmove(address, data[number * size : (number + 1) * size], size)
        self._fabric.tell(self, core.Placed(end.connection, chunk.pull, chunk.sequence, _INLINE, crc32c(data)))

    def _convert(self, end: End, chunk: core.Convert) -> None:
        layout = end.source_layout
        assert layout is not None
        assert self._layout_pool is not None
        data = end.staged.pop(chunk.staged[0])
        memory = ctypes.create_string_buffer(data, len(data))
        blocks = len(chunk.staged)
        staged = LayoutPool(
            layout, [ctypes.addressof(memory)] * (layout.layers * layout.tensors), blocks, layout.block_bytes
        )
        convert_tensor(
            staged,
            Table(range(blocks), chunk.staged_origin),
            self._layout_pool,
            Table(chunk.blocks, chunk.origin),
            chunk.first_token,
            chunk.tokens,
            chunk.layer,
        )
        self._fabric.tell(self, core.Converted(end.connection, chunk.pull, chunk.sequence))


def _addresses(pool: Pool, tensor: int, blocks: Sequence[int]) -> list[int]:
    base, stride = pool.layer_addresses[tensor], pool.block_stride_bytes
    return [base + block * stride for block in blocks]


def _address(endpoint: str) -> str:
    return endpoint.partition("/")[0]
