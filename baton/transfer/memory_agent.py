"""One agent of a `MemoryFabric`: both sides of the transfer protocol, with copies instead of a network."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Condition, Thread
from typing import Final, Protocol

from baton.errors import TransferFailed
from baton.transfer.memory_leases import Lease, Leases
from baton.transfer.memory_state import (
    Pull,
    check_blocks,
    check_layout,
    convert_block,
    is_alike,
    layers_of,
    read_block,
    refusal,
    tensors_of,
    write_block,
)
from baton.transfer.protocol import KEY_BYTES, AgentOptions, AgentStats, Cause, EventKind, Faults, Pool, TransferEvent

BACKEND: Final = "memory"
SCHEME: Final = "memory://"
_KEEP_ALIVES_PER_TTL: Final = 3
_NO_STATS: Final = AgentStats(
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


class Fabric(Protocol):
    """What an agent knows of the fabric that made it: a clock, a lock, and the other agents."""

    @property
    def now_s(self) -> Callable[[], float]: ...
    @property
    def changed(self) -> Condition: ...
    @property
    def agents(self) -> Mapping[str, MemoryAgent]: ...
    def reach(self, one: str, other: str) -> MemoryAgent | None: ...
    def forget(self, agent: MemoryAgent) -> Thread | None: ...


class MemoryAgent:
    """See `TransferAgent` and `NativeAgent`; made by `MemoryFabric.agent`."""

    def __init__(self, fabric: Fabric, endpoint: str, options: AgentOptions) -> None:
        self.endpoint = endpoint
        self.pool: Pool | None = None
        self._fabric = fabric
        self._options = options
        self._faults = options.faults
        self._leases = Leases(self._on_lease_end)
        self._pulls: dict[bytes, Pull] = {}
        self._events: list[TransferEvent] = []
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._chunks_served = 0
        self._closed = False
        self._stats = _NO_STATS

    @property
    def is_busy(self) -> bool:
        return bool(self._pulls or self._leases.held)

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
            if self.pool is not None:
                raise ValueError("the pool is set already")
            check_layout(pool)
            self.pool = pool

    # Source.

    def open_lease(self, key: bytes, *, unclaimed_ttl_s: float | None = None) -> int:
        with self._fabric.changed:
            pool = self._ready_pool(key)
            generation = self._leases.open(
                key,
                self._fabric.now_s(),
                layers=layers_of(pool),
                unclaimed_ttl_s=self._options.unclaimed_ttl_s if unclaimed_ttl_s is None else unclaimed_ttl_s,
            )
            self._fabric.changed.notify_all()
            return generation

    def extend_lease(self, key: bytes, generation: int, blocks: Sequence[int]) -> None:
        with self._fabric.changed:
            check_blocks(tuple(blocks), self._ready_pool(key))
            lease = self._leases.current(key, generation)
            if lease is not None:
                lease.blocks.extend(blocks)

    def post_ready(self, key: bytes, generation: int, layer: int, tokens: int) -> None:
        with self._fabric.changed:
            pool = self._ready_pool(key)
            if not -1 <= layer < layers_of(pool):
                raise ValueError(f"layer {layer} is not one of the pool's {layers_of(pool)} layers")
            lease = self._leases.current(key, generation)
            if lease is None:
                return
            if tokens > len(lease.blocks) * pool.block_tokens:
                raise ValueError(f"{tokens} tokens cannot be ready in the {len(lease.blocks)} blocks of this lease")
            for number in range(len(lease.ready_tokens)) if layer < 0 else (layer,):
                lease.ready_tokens[number] = max(lease.ready_tokens[number], tokens)
            self._fabric.changed.notify_all()

    def complete_lease(self, key: bytes, generation: int, tokens: int) -> None:
        with self._fabric.changed:
            lease = self._leases.current(key, generation)
            if lease is not None:
                lease.complete_tokens = tokens
                self._fabric.changed.notify_all()

    def revoke_lease(self, key: bytes, *, final: bool) -> None:
        # Bytes are copied under the same lock, so nobody reads while this runs.
        with self._fabric.changed:
            self._check_open()
            if self._leases.revoke(key, final=final):
                self._count(leases_revoked=1)
            self._fabric.changed.notify_all()

    # Sink.

    def pull(
        self, key: bytes, endpoint: str, *, first_token: int, tokens: int, blocks: Sequence[int], budget_s: float
    ) -> None:
        with self._fabric.changed:
            pool = self._ready_pool(key)
            _check_endpoint(endpoint)
            check_blocks(tuple(blocks), pool)
            needed = -(-tokens // pool.block_tokens) - first_token // pool.block_tokens
            if first_token % pool.block_tokens or len(blocks) != needed or needed < 1:
                raise ValueError(f"tokens {first_token} to {tokens} do not fit {len(blocks)} blocks")
            if key in self._pulls:
                raise ValueError("this pull is running already")
            now_s = self._fabric.now_s()
            moved = [first_token] * layers_of(pool)
            self._pulls[key] = Pull(
                endpoint,
                first_token,
                tokens,
                tuple(blocks),
                now_s,
                now_s + budget_s,
                moved,
                kept_alive_s=now_s,
                began_s=now_s,
            )
            self._fabric.changed.notify_all()

    def cancel_pull(self, key: bytes) -> None:
        with self._fabric.changed:
            pull = self._pulls.get(key)
            if pull is not None:
                pull.cancelled = True
                self._fabric.changed.notify_all()

    def release(self, key: bytes, endpoint: str) -> None:
        with self._fabric.changed:
            self._check_open()
            _check_endpoint(endpoint)
            source = self._fabric.reach(self.endpoint, endpoint)
            if source is not None:
                source._leases.release(key, Cause.NONE)

    def stats(self) -> AgentStats:
        with self._fabric.changed:
            opened = [lease for lease in self._leases.held.values() if lease.open]
            now_s = self._fabric.now_s()
            parked = [
                key
                for sink in self._fabric.agents.values()
                for key, pull in sink._pulls.items()
                if pull.endpoint == self.endpoint and now_s < pull.kept_alive_s + self._options.lease_ttl_s
            ]
            return replace(
                self._stats,
                leases=len(self._leases.held),
                leased_blocks=sum(len(lease.blocks) for lease in opened),
                pulls=len(self._pulls),
                parked=sum(1 for key in parked if key not in self._leases.held),
            )

    def set_faults(self, faults: Faults) -> None:
        with self._fabric.changed:
            self._faults = faults

    def close(self) -> None:
        with self._fabric.changed:
            if self._closed:
                return
            for key in list(self._pulls):
                self._fail(key, Cause.CANCELLED, "the agent was closed")
            for key in list(self._leases.held):
                self._leases.end(key, Cause.CANCELLED)
            self._closed = True
        thread = self._fabric.forget(self)
        if thread is not None:
            thread.join()
        os.close(self._eventfd)

    # What a native agent's own thread does. The fabric's lock is held in all that follows.

    def step(self, now_s: float) -> None:
        for key, pull in list(self._pulls.items()):
            self._step_pull(key, pull, now_s)
        if expired := self._leases.expire(now_s, self._options.lease_ttl_s):
            self._count(leases_expired=expired)

    def _step_pull(self, key: bytes, pull: Pull, now_s: float) -> None:
        source = self._fabric.reach(self.endpoint, pull.endpoint)
        if pull.cancelled:
            self._fail(key, Cause.CANCELLED, "cancelled by the engine")
        elif source is None:
            self._fail(key, Cause.UNREACHABLE, f"no agent answers at {pull.endpoint}")
        elif source._options.secret != self._options.secret:
            self._fail(key, Cause.REFUSED, f"{source.endpoint} and {self.endpoint} do not share a secret", held=False)
        elif ended := source._leases.ended.get(key):
            cause = Cause.EXPIRED if ended.cause is Cause.NONE else ended.cause
            self._fail(key, cause, "the lease is over at its source")
        elif now_s >= pull.deadline_s:
            lease = source._leases.held.get(key)
            revoked = lease is not None and not lease.open
            self._fail(key, Cause.REVOKED if revoked else Cause.DEADLINE, "the budget is spent")
        else:
            cause, why = (Cause.NONE, "") if source.pool is None else refusal(source.pool, self._ready_pool(key))
            if cause is not Cause.NONE:
                self._fail(key, cause, why, held=False)
            else:
                self._follow(key, pull, source, now_s)

    def _follow(self, key: bytes, pull: Pull, source: MemoryAgent, now_s: float) -> None:
        """Keep the lease alive, and move what is ready."""
        interval_s = source._options.lease_ttl_s / _KEEP_ALIVES_PER_TTL
        keeps_alive = now_s >= pull.kept_alive_s + interval_s and not self._faults.silent
        if keeps_alive:
            pull.kept_alive_s = now_s
        lease = source._leases.held.get(key)
        if lease is not None and (keeps_alive or lease.claimed_s is None):
            lease.claimed_s = now_s
        if lease is None or not lease.open:
            if pull.generation:
                pull.restart()
            if lease is None and now_s >= pull.wanted_s + self._options.wanted_timeout_s:
                self._fail(key, Cause.STALLED, "the source neither opened nor refused the lease")
            return
        if pull.generation != lease.generation:
            if pull.generation:
                pull.restart()
            pull.generation = lease.generation
        pull.wanted_s = now_s
        if lease.complete_tokens is not None and pull.tokens > lease.complete_tokens:
            self._fail(
                key, Cause.REFUSED, f"the sink wants {pull.tokens} tokens, the whole lease has {lease.complete_tokens}"
            )
        elif self._may_serve(pull, lease, source, now_s):
            self._move(key, pull, lease, source)

    def _may_serve(self, pull: Pull, lease: Lease, source: MemoryAgent, now_s: float) -> bool:
        if pull.serve_after_s is None and max(lease.ready_tokens) > 0:
            pull.serve_after_s = now_s + source._faults.delay_s
        return pull.serve_after_s is not None and now_s >= pull.serve_after_s

    def _move(self, key: bytes, pull: Pull, lease: Lease, source: MemoryAgent) -> None:
        started_s = time.perf_counter()
        intact = all(self._copy_layer(layer, pull, lease, source) for layer in range(len(pull.moved_tokens)))
        pull.moving_s += time.perf_counter() - started_s
        if not intact:
            self._count(checksum_failures=1)
            self._fail(key, Cause.CHECKSUM, "a block arrived with other bytes than were sent")
            return
        whole = pull.layers_whole()
        while pull.layers_reported < whole:
            pull.layers_reported += 1
            self._emit_figures(EventKind.PULL_PROGRESS, key, pull)
        if whole == len(pull.moved_tokens):
            self._finish(key, pull, source)

    def _copy_layer(self, layer: int, pull: Pull, lease: Lease, source: MemoryAgent) -> bool:
        """Copy the whole blocks of a layer that are ready and not here yet; False where a checksum is wrong."""
        assert self.pool is not None
        assert source.pool is not None
        size, moved = source.pool.block_tokens, pull.moved_tokens[layer]
        ready = min(lease.ready_tokens[layer], pull.tokens)
        # Of a block that is not full yet nothing is taken, unless it is the last.
        end = ready if ready == pull.tokens else ready // size * size
        if end <= moved:
            return True
        alike = is_alike(source.pool, self.pool)
        for token in range(moved // size * size, end, size):
            source._chunks_served += 1
            every = source._faults.corrupt_every
            faults = source._faults if every > 0 and source._chunks_served % every == 0 else None
            data = read_block(
                source.pool, lease.blocks[token // size], layer, faults=faults, check=self._options.checksum
            )
            if data is None:
                return False
            if alike:
                write_block(data, self.pool, pull.blocks[(token - pull.first_token) // size], layer)
            else:
                convert_block(data, source.pool, token, self.pool, pull, layer)
            pull.bytes += len(data)
            self._count(pulled_bytes=len(data), pulled_blocks=tensors_of(source.pool))
            source._count(served_bytes=len(data))
        pull.moved_tokens[layer] = end
        return True

    def _finish(self, key: bytes, pull: Pull, source: MemoryAgent) -> None:
        del self._pulls[key]
        self._count(pulls_done=1)
        source._leases.release(key, Cause.NONE)
        self._emit_figures(EventKind.PULL_DONE, key, pull)

    def _emit_figures(self, kind: EventKind, key: bytes, pull: Pull) -> None:
        self._emit(
            TransferEvent(
                kind=kind,
                key=key,
                layers=pull.layers_reported,
                bytes=pull.bytes,
                tokens=pull.tokens - pull.first_token,
                waiting_s=max(0.0, self._fabric.now_s() - pull.began_s - pull.moving_s),
                moving_s=pull.moving_s,
                backend=BACKEND,
                restarts=pull.restarts,
            )
        )

    def _check_open(self) -> None:
        if self._closed:
            raise TransferFailed("the transfer agent is closed")

    def _ready_pool(self, key: bytes) -> Pool:
        self._check_open()
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        if self.pool is None:
            raise ValueError("call set_pool first")
        return self.pool

    def _fail(self, key: bytes, cause: Cause, detail: str, *, held: bool = True) -> None:
        pull = self._pulls.pop(key)
        source = self._fabric.reach(self.endpoint, pull.endpoint)
        if source is not None and held:
            source._leases.release(key, cause)
        self._count(pulls_failed=1)
        self._emit(TransferEvent(kind=EventKind.PULL_FAILED, key=key, cause=cause, detail=detail))

    def _on_lease_end(self, key: bytes, cause: Cause) -> None:
        kind = EventKind.LEASE_RELEASED if cause is Cause.NONE else EventKind.LEASE_ENDED
        self._emit(TransferEvent(kind=kind, key=key, cause=cause))

    def _emit(self, event: TransferEvent) -> None:
        if not self._events and not self._closed:
            os.eventfd_write(self._eventfd, 1)
        self._events.append(event)

    def _count(self, **added: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + n for name, n in added.items()})


def _check_endpoint(endpoint: str) -> None:
    if not endpoint.startswith(SCHEME):
        raise ValueError(f"{endpoint!r} is not an endpoint of an agent")
