"""The transfer agent's protocol inside one process: for tests and the simulator, without the native library.

A `MemoryFabric` connects the agents that it made. Bytes are really copied between the pools, with the
same watermarks, generations, deadlines and releases as between native agents, so an engine cannot
tell them apart. One thread per fabric does what an agent's own thread would; `cut` separates two agents.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from zlib import crc32

from baton.transfer import AgentOptions, AgentStats, Cause, EventKind, Faults, Pool, TransferEvent

_TICK_S: Final = 0.02
"""How late a deadline may be noticed."""
_ENDED_MAX: Final = 4096
BACKEND: Final = "memory"


@dataclass(slots=True)
class _Lease:
    generation: int
    opened_s: float
    open: bool = False
    unclaimed_ttl_s: float = 0.0
    blocks: list[int] = field(default_factory=list[int])
    ready_tokens: list[int] = field(default_factory=list[int])
    """Per layer."""
    complete_tokens: int | None = None
    asked_s: float | None = None
    """When a sink last said that it wants the lease."""


@dataclass(frozen=True, slots=True)
class _Ended:
    cause: Cause
    """NONE: the sink released it."""
    generation: int
    opened: bool
    """False: a sink was done with the lease before it was opened, which ends it as soon as it is."""


@dataclass(slots=True)
class _Pull:
    endpoint: str
    first_token: int
    tokens: int
    blocks: tuple[int, ...]
    asked_s: float
    deadline_s: float
    generation: int = 0
    begun_s: float | None = None
    moved_tokens: list[int] = field(default_factory=list[int])
    """Per layer, counted from the context's start."""
    layers_reported: int = 0
    bytes: int = 0
    moving_s: float = 0.0
    restarts: int = 0
    cancelled: bool = False


class MemoryFabric:
    """Makes agents that reach each other, and moves their bytes on a thread of its own.

    Without the thread, call `step` to let whatever can happen by `now_s` happen.
    """

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic, threaded: bool = True) -> None:
        self.now_s = now_s
        self.changed = threading.Condition(threading.RLock())
        self.agents: dict[str, MemoryAgent] = {}
        self._made = 0
        self._cuts: set[frozenset[str]] = set()
        self._threaded = threaded
        self._thread: threading.Thread | None = None

    def agent(self, options: AgentOptions | None = None) -> MemoryAgent:
        with self.changed:
            self._made += 1
            agent = MemoryAgent(self, f"memory://{self._made}", options or AgentOptions())
            self.agents[agent.endpoint] = agent
            if self._threaded and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="memory transfer", daemon=True)
                self._thread.start()
            return agent

    def cut(self, one: str, other: str, *, apart: bool = True) -> None:
        """Separate two endpoints, or join them again."""
        with self.changed:
            (self._cuts.add if apart else self._cuts.discard)(frozenset((one, other)))
            self.changed.notify_all()

    def reach(self, one: str, other: str) -> MemoryAgent | None:
        """Return the agent at `other` if `one` can reach it."""
        return None if frozenset((one, other)) in self._cuts else self.agents.get(other)

    def step(self) -> None:
        """Move what is ready, and end what is past its time."""
        with self.changed:
            for agent in list(self.agents.values()):
                agent.step(self.now_s())

    def forget(self, agent: MemoryAgent) -> threading.Thread | None:
        """Remove a closed agent; return the thread to join where it was the last one."""
        with self.changed:
            self.agents.pop(agent.endpoint, None)
            self.changed.notify_all()
            thread = None if self.agents else self._thread
            if thread is not None:
                self._thread = None
            return thread

    def _run(self) -> None:
        with self.changed:
            while self._thread is threading.current_thread():
                self.step()
                busy = any(agent.is_busy for agent in self.agents.values())
                self.changed.wait(_TICK_S if busy else None)


class MemoryAgent:
    """See `TransferAgent`; made by `MemoryFabric.agent`."""

    def __init__(self, fabric: MemoryFabric, endpoint: str, options: AgentOptions) -> None:
        self.endpoint = endpoint
        self._fabric = fabric
        self._options = options
        self._faults = options.faults
        self.pool: Pool | None = None
        self._leases: dict[bytes, _Lease] = {}
        self._ended: dict[bytes, _Ended] = {}
        """The newest leases that are over, so that a late sink need not wait."""
        self._pulls: dict[bytes, _Pull] = {}
        self._events: list[TransferEvent] = []
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._chunks_served = 0
        self._closed = False
        self._stats = AgentStats(
            leases=0,
            leased_blocks=0,
            pulls=0,
            parked=0,
            pulled_bytes=0,
            pulled_blocks=0,
            served_bytes=0,
            pulls_done=0,
            pulls_failed=0,
            leases_expired=0,
            leases_revoked=0,
            checksum_failures=0,
        )

    @property
    def is_busy(self) -> bool:
        return bool(self._pulls or self._leases)

    def fileno(self) -> int:
        return self._eventfd

    def poll(self) -> list[TransferEvent]:
        with self._fabric.changed:
            events, self._events = self._events, []
            if events and not self._closed:
                os.eventfd_read(self._eventfd)
            return events

    def set_pool(self, pool: Pool) -> None:
        with self._fabric.changed:
            assert self.pool is None, "the pool is named once"
            self.pool = pool

    # Source.

    def open_lease(self, key: bytes, *, unclaimed_ttl_s: float | None = None) -> int:
        with self._fabric.changed:
            assert self.pool is not None, "the pool is named before the first lease"
            lease = self._leases.get(key)
            ended = self._ended.pop(key, None)
            if lease is None:
                generation = ended.generation + 1 if ended else 1
                lease = self._leases[key] = _Lease(generation, opened_s=self._fabric.now_s())
            assert not lease.open, "this lease is open already"
            lease.open = True
            lease.unclaimed_ttl_s = self._options.unclaimed_ttl_s if unclaimed_ttl_s is None else unclaimed_ttl_s
            lease.ready_tokens = [0] * len(self.pool.layer_addresses)
            if ended is not None and not ended.opened:
                self._end_lease(key, ended.cause)
            self._fabric.changed.notify_all()
            return lease.generation

    def extend_lease(self, key: bytes, generation: int, blocks: Sequence[int]) -> None:
        with self._fabric.changed:
            lease = self._current(key, generation)
            if lease is not None:
                lease.blocks.extend(blocks)

    def post_ready(self, key: bytes, generation: int, layer: int, tokens: int) -> None:
        with self._fabric.changed:
            lease = self._current(key, generation)
            if lease is not None:
                for number in range(len(lease.ready_tokens)) if layer < 0 else (layer,):
                    lease.ready_tokens[number] = max(lease.ready_tokens[number], tokens)
                self._fabric.changed.notify_all()

    def complete_lease(self, key: bytes, generation: int, tokens: int) -> None:
        with self._fabric.changed:
            lease = self._current(key, generation)
            if lease is not None:
                lease.complete_tokens = tokens
                self._fabric.changed.notify_all()

    def revoke_lease(self, key: bytes, *, final: bool) -> None:
        with self._fabric.changed:
            lease = self._leases.get(key)
            if lease is not None and (lease.open or final):
                self._count(leases_revoked=1)
                lease.open = False
                lease.generation += 1
                lease.blocks.clear()
                lease.complete_tokens = None
            if final and lease is not None:
                self._end_lease(key, Cause.REVOKED)
            elif final and key not in self._ended:
                self._remember(key, _Ended(Cause.REVOKED, 0, opened=True))
            self._fabric.changed.notify_all()

    # Sink.

    def pull(
        self, key: bytes, endpoint: str, *, first_token: int, tokens: int, blocks: Sequence[int], budget_s: float
    ) -> None:
        with self._fabric.changed:
            assert self.pool is not None, "the pool is named before the first pull"
            assert first_token % self.pool.block_tokens == 0, "a pull begins at a block"
            now_s = self._fabric.now_s()
            pull = _Pull(endpoint, first_token, tokens, tuple(blocks), now_s, now_s + budget_s)
            pull.moved_tokens = [first_token] * len(self.pool.layer_addresses)
            self._pulls[key] = pull
            self._fabric.changed.notify_all()

    def cancel_pull(self, key: bytes) -> None:
        with self._fabric.changed:
            pull = self._pulls.get(key)
            if pull is not None:
                pull.cancelled = True
                self._fabric.changed.notify_all()

    def release(self, key: bytes, endpoint: str) -> None:
        with self._fabric.changed:
            source = self._fabric.reach(self.endpoint, endpoint)
            if source is not None:
                source.take_release(key, Cause.NONE)

    def stats(self) -> AgentStats:
        with self._fabric.changed:
            opened = [lease for lease in self._leases.values() if lease.open]
            sinks = self._fabric.agents.values()
            wanted = [key for sink in sinks for key, pull in sink._pulls.items() if pull.endpoint == self.endpoint]
            return replace(
                self._stats,
                leases=len(opened),
                leased_blocks=sum(len(lease.blocks) for lease in opened),
                pulls=len(self._pulls),
                parked=sum(1 for key in wanted if key not in self._leases),
            )

    def set_faults(self, faults: Faults) -> None:
        with self._fabric.changed:
            self._faults = faults

    def close(self) -> None:
        with self._fabric.changed:
            if self._closed:
                return
            self._closed = True
            for key in list(self._pulls):
                self._fail(key, Cause.CANCELLED, "the agent was closed")
            for key in list(self._leases):
                self._end_lease(key, Cause.REVOKED)
        thread = self._fabric.forget(self)
        if thread is not None:
            thread.join()
        os.close(self._eventfd)

    # What the agent's own thread does. The fabric's lock is held in all that follows.

    def step(self, now_s: float) -> None:
        for key in list(self._pulls):
            self._step_pull(key, self._pulls[key], now_s)
        for key, lease in list(self._leases.items()):
            since_s = lease.opened_s if lease.asked_s is None else lease.asked_s
            ttl_s = lease.unclaimed_ttl_s if lease.asked_s is None else self._options.lease_ttl_s
            if now_s > since_s + ttl_s:
                self._count(leases_expired=1)
                self._end_lease(key, Cause.EXPIRED)

    def take_release(self, key: bytes, cause: Cause) -> None:
        """The sink is done with a lease, or gave it up; that may cross the lease's opening."""
        if key in self._leases:
            self._end_lease(key, cause)
        elif key not in self._ended:
            self._remember(key, _Ended(cause, 0, opened=False))

    def _step_pull(self, key: bytes, pull: _Pull, now_s: float) -> None:
        source = self._fabric.reach(self.endpoint, pull.endpoint)
        if pull.cancelled:
            self._fail(key, Cause.CANCELLED, "cancelled by the engine")
        elif now_s > pull.deadline_s:
            self._fail(key, Cause.DEADLINE, "the budget is spent")
        elif source is None:
            self._fail(key, Cause.UNREACHABLE, f"no agent answers at {pull.endpoint}")
        elif refusal := self._refusal(source):
            self._fail(key, Cause.REFUSED, refusal)
        elif ended := source._ended.get(key):
            cause = Cause.EXPIRED if ended.cause is Cause.NONE else ended.cause
            self._fail(key, cause, "the lease is over at its source")
        else:
            self._move(key, pull, source, now_s)

    def _refusal(self, source: MemoryAgent) -> str:
        """Return why two agents cannot work together, naming both sides."""
        if source._options.secret != self._options.secret:
            return f"{source.endpoint} and {self.endpoint} do not share a secret"
        if source.pool is None or self.pool is None:
            return ""
        theirs, ours = (f"{pool.fingerprint}, blocks of {pool.block_tokens}" for pool in (source.pool, self.pool))
        return "" if theirs == ours else f"the source has {theirs}, the sink {ours}"

    def _move(self, key: bytes, pull: _Pull, source: MemoryAgent, now_s: float) -> None:
        lease = source._leases.get(key)
        if lease is None or not lease.open:
            if lease is not None:
                lease.asked_s = now_s
            if now_s > pull.asked_s + self._options.wanted_timeout_s:
                self._fail(key, Cause.STALLED, "the source neither opened nor refused the lease")
            return
        lease.asked_s = now_s
        if pull.generation != lease.generation:
            if pull.generation:
                pull.restarts += 1
                pull.moved_tokens = [pull.first_token] * len(pull.moved_tokens)
            pull.generation, pull.begun_s = lease.generation, now_s
        pull.asked_s = now_s
        if lease.complete_tokens is not None and pull.tokens > lease.complete_tokens:
            self._fail(
                key, Cause.REFUSED, f"the source has {lease.complete_tokens} tokens, the sink wants {pull.tokens}"
            )
            return
        if pull.begun_s is not None and now_s < pull.begun_s + source._faults.delay_s:
            return
        started_s = time.perf_counter()
        intact = all(self._copy_layer(layer, pull, lease, source) for layer in range(len(pull.moved_tokens)))
        pull.moving_s += time.perf_counter() - started_s
        if not intact:
            self._count(checksum_failures=1)
            self._fail(key, Cause.CHECKSUM, "a block arrived with other bytes than were sent")
            return
        self._report(key, pull, source, now_s)

    def _copy_layer(self, layer: int, pull: _Pull, lease: _Lease, source: MemoryAgent) -> bool:
        """Copy the whole blocks of a layer that are ready and not here yet; False where the checksum is wrong."""
        assert self.pool is not None and source.pool is not None
        size, moved = self.pool.block_tokens, pull.moved_tokens[layer]
        ready = min(lease.ready_tokens[layer], pull.tokens)
        # Of a block that is not full yet nothing is taken, unless it is the last.
        end = ready if ready == pull.tokens else ready // size * size
        for token in range(moved, end, size):
            origin = lease.blocks[token // size]
            target = pull.blocks[(token - pull.first_token) // size]
            data = bytearray(
                ctypes.string_at(
                    source.pool.layer_addresses[layer] + origin * source.pool.block_stride_bytes,
                    source.pool.block_bytes,
                )
            )
            checksum = crc32(data)
            source._chunks_served += 1
            if source._faults.corrupt_every and source._chunks_served % source._faults.corrupt_every == 0:
                data[0] ^= 1
            if self._options.checksum and crc32(data) != checksum:
                return False
            address = self.pool.layer_addresses[layer] + target * self.pool.block_stride_bytes
            ctypes.memmove(address, bytes(data), len(data))
            pull.bytes += len(data)
            self._count(pulled_bytes=len(data), pulled_blocks=1)
            source._count(served_bytes=len(data))
        pull.moved_tokens[layer] = max(moved, end)
        return True

    def _report(self, key: bytes, pull: _Pull, source: MemoryAgent, now_s: float) -> None:
        whole = 0
        while whole < len(pull.moved_tokens) and pull.moved_tokens[whole] >= pull.tokens:
            whole += 1
        while pull.layers_reported < whole:
            pull.layers_reported += 1
            self._emit(TransferEvent(kind=EventKind.PULL_PROGRESS, key=key, layers=pull.layers_reported))
        if whole < len(pull.moved_tokens):
            return
        del self._pulls[key]
        self._count(pulls_done=1)
        source.take_release(key, Cause.NONE)
        self._emit(
            TransferEvent(
                kind=EventKind.PULL_DONE,
                key=key,
                layers=whole,
                bytes=pull.bytes,
                tokens=pull.tokens - pull.first_token,
                moving_s=pull.moving_s,
                backend=BACKEND,
                restarts=pull.restarts,
            )
        )

    def _current(self, key: bytes, generation: int) -> _Lease | None:
        lease = self._leases.get(key)
        return lease if lease is not None and lease.open and lease.generation == generation else None

    def _fail(self, key: bytes, cause: Cause, detail: str) -> None:
        pull = self._pulls.pop(key)
        source = self._fabric.reach(self.endpoint, pull.endpoint)
        if source is not None and cause is not Cause.REFUSED:
            source.take_release(key, cause)
        self._count(pulls_failed=1)
        self._emit(TransferEvent(kind=EventKind.PULL_FAILED, key=key, cause=cause, detail=detail))

    def _end_lease(self, key: bytes, cause: Cause) -> None:
        lease = self._leases.pop(key)
        self._remember(key, _Ended(cause, lease.generation, opened=True))
        kind = EventKind.LEASE_RELEASED if cause is Cause.NONE else EventKind.LEASE_ENDED
        self._emit(TransferEvent(kind=kind, key=key, cause=cause))

    def _remember(self, key: bytes, ended: _Ended) -> None:
        self._ended[key] = ended
        if len(self._ended) > _ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    def _emit(self, event: TransferEvent) -> None:
        if not self._events and not self._closed:
            os.eventfd_write(self._eventfd, 1)
        self._events.append(event)

    def _count(self, **added: int) -> None:
        current = {name: getattr(self._stats, name) + count for name, count in added.items()}
        self._stats = replace(self._stats, **current)
