"""The transfer agent of `native/transfer`: the one module that knows `baton_native`'s."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import baton_native

from baton.errors import ConfigurationError, TransferFailed
from baton.transfer.protocol import (
    KEY_BYTES,
    AgentOptions,
    AgentStats,
    Cause,
    EventKind,
    Faults,
    Pool,
    RailShare,
    SharedMemory,
    TransferEvent,
)

_log = logging.getLogger(__name__)

SLOW_BACKEND = "tcp"


class NativeAgent:
    """The transfer agent of `native/transfer`: a state machine in C++ with one thread of its own.

    Beyond the protocol: a cancelled pull ends its source's lease as LEASE_ENDED with cause CANCELLED, a
    pull that failed at the sink with the sink's cause; a pull that the source revoked starts again by
    itself and reports no layer twice. A `final` revocation, a release or a cancel is remembered for a
    minute, so it may come before the lease or the pull it is about. After `close`, and if its thread
    ever fails, methods raise TransferFailed; bad arguments raise ValueError.
    """

    def __init__(self, options: AgentOptions) -> None:
        native = baton_native.Options()
        native.secret = options.secret
        native.backends = list(options.backends)
        native.streams = _natural("streams", options.streams)
        native.lane_bytes = _natural("lane_bytes", options.lane_bytes)
        native.checksum = options.checksum
        native.verbs_library = options.verbs_library
        native.verbs_devices = options.verbs_devices
        native.ucx_library = options.ucx_library
        native.gpu_library = options.gpu_library
        native.lease_ttl_s = options.lease_ttl_s
        native.unclaimed_ttl_s = options.unclaimed_ttl_s
        native.wanted_timeout_s = options.wanted_timeout_s
        native.connect_timeout_s = options.connect_timeout_s
        native.stall_timeout_s = options.stall_timeout_s
        native.faults = _faults(options.faults)
        if not 0 <= options.port <= 65535:
            raise ValueError(f"{options.port} is no port")
        try:
            self._agent = baton_native.Agent(native, options.rails or (_address(options.host, options.port),))
        except RuntimeError as failure:
            raise ConfigurationError(f"the transfer agent does not start: {failure}") from failure
        self.endpoint = self._agent.endpoint
        self._announced: set[str] = set()

    def fileno(self) -> int:
        return self._agent.fileno()

    def poll(self) -> list[TransferEvent]:
        with _typed_failure():
            reports = self._agent.poll()
        events = [_event(report) for report in reports]
        for event in events:
            if event.backend and event.backend not in self._announced:
                self._announce(event)
        return events

    def _announce(self, event: TransferEvent) -> None:
        """Say which way KV comes, once for each: the slow one is never taken silently, nor by UCX."""
        self._announced.add(event.backend)
        slow = event.backend == SLOW_BACKEND or f"{SLOW_BACKEND}/" in event.declined  # As UCX names what it takes.
        level = logging.WARNING if slow and event.declined else logging.INFO
        _log.log(level, "KV comes over %s%s", event.backend, event.declined and f": {event.declined}")

    def set_pool(self, pool: Pool) -> None:
        with _typed_failure():
            self._agent.set_pool(
                list(pool.layer_addresses),
                _natural("blocks", pool.blocks),
                _natural("block_bytes", pool.block_bytes),
                _natural("block_stride_bytes", pool.block_stride_bytes),
                _natural("block_tokens", pool.block_tokens),
                pool.fingerprint,
                _region(pool),
                -1 if pool.device is None else _natural("device", pool.device),
                pool.layout,
            )

    def open_lease(self, key: bytes, *, unclaimed_ttl_s: float | None = None) -> int:
        with _typed_failure():
            return self._agent.open_lease(_checked(key), -1.0 if unclaimed_ttl_s is None else unclaimed_ttl_s)

    def extend_lease(self, key: bytes, generation: int, blocks: Sequence[int]) -> None:
        with _typed_failure():
            self._agent.extend_lease(_checked(key), generation, _indexes(blocks))

    def post_ready(self, key: bytes, generation: int, layer: int, tokens: int) -> None:
        with _typed_failure():
            self._agent.post_ready(_checked(key), generation, layer, _natural("tokens", tokens))

    def post_ready_after(self, key: bytes, generation: int, layer: int, tokens: int, *, stream: int) -> None:
        """As `post_ready`, of a pool in CUDA memory, once what is in the CUDA stream now has ended; returns at once.

        Sinks may ask at once, too: their GPU waits, not their host. `stream` is a cudaStream_t, which must not be being
        captured into a graph.
        """
        with _typed_failure():
            self._agent.post_ready_after(_checked(key), generation, layer, _natural("tokens", tokens), stream)

    def complete_lease(self, key: bytes, generation: int, tokens: int) -> None:
        with _typed_failure():
            self._agent.complete_lease(_checked(key), generation, _natural("tokens", tokens))

    def revoke_lease(self, key: bytes, *, final: bool) -> None:
        with _typed_failure():
            self._agent.revoke_lease(_checked(key), final)

    def pull(
        self, key: bytes, endpoint: str, *, first_token: int, tokens: int, blocks: Sequence[int], budget_s: float
    ) -> None:
        first_token, tokens = _natural("first_token", first_token), _natural("tokens", tokens)
        with _typed_failure():
            self._agent.pull(_checked(key), endpoint, first_token, tokens, _indexes(blocks), budget_s)

    def cancel_pull(self, key: bytes) -> None:
        with _typed_failure():
            self._agent.cancel_pull(_checked(key))

    def release(self, key: bytes, endpoint: str) -> None:
        with _typed_failure():
            self._agent.release(_checked(key), endpoint)

    def stats(self) -> AgentStats:
        stats = self._agent.stats()
        return AgentStats(
            leases=stats.leases,
            leased_blocks=stats.leased_blocks,
            pulls=stats.pulls,
            parked=stats.parked,
            pulled_bytes=stats.pulled_bytes,
            pulled_blocks=stats.pulled_blocks,
            served_bytes=stats.served_bytes,
            pulls_done=stats.pulls_done,
            pulls_failed=stats.pulls_failed,
            leases_expired=stats.leases_expired,
            leases_revoked=stats.leases_revoked,
            checksum_failures=stats.checksum_failures,
            fallbacks=stats.fallbacks,
            lanes_retired=stats.lanes_retired,
        )

    def rails(self) -> tuple[RailShare, ...]:
        """Return what each rail of each source has carried for this sink since the start."""
        return _rails(self._agent.stats().rails)

    def set_faults(self, faults: Faults) -> None:
        with _typed_failure():
            self._agent.set_faults(_faults(faults))

    def close(self) -> None:
        self._agent.close()


def share_memory(size: int) -> SharedMemory:
    """Reserve memory for a pool that peers on this host read directly. Raises ConfigurationError without memory."""
    try:
        return baton_native.Region(size)
    except RuntimeError as failure:
        raise ConfigurationError(f"there is no shared memory for the pool: {failure}") from failure


@contextmanager
def _typed_failure() -> Generator[None]:
    try:
        yield
    except RuntimeError as failure:
        raise TransferFailed(str(failure)) from failure


def _checked(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a lease key has {KEY_BYTES} bytes, not {len(key)}")
    return bytes(key)


def _region(pool: Pool) -> baton_native.Region | None:
    if pool.region is None or isinstance(pool.region, baton_native.Region):
        return pool.region
    raise ValueError("the pool's region was not made by share_memory")


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _natural(name: str, value: int) -> int:
    if not 0 <= value < 1 << 32:
        raise ValueError(f"{name} must be from 0 to 2**32 - 1, not {value}")
    return value


def _faults(faults: Faults) -> baton_native.Faults:
    return baton_native.Faults(
        faults.delay_s,
        _natural("corrupt_every", faults.corrupt_every),
        faults.corruption,
        faults.before_checksum,
        faults.silent,
    )


def _indexes(blocks: Sequence[int]) -> list[int]:
    return [_natural("a block index", int(block)) for block in blocks]


def _event(report: baton_native.Report) -> TransferEvent:
    return TransferEvent(
        kind=EventKind(report.kind),
        key=report.key,
        cause=Cause(report.cause),
        detail=report.detail,
        layers=report.layers,
        bytes=report.bytes,
        tokens=report.tokens,
        waiting_s=report.waiting_s,
        moving_s=report.moving_s,
        backend=report.backend,
        declined=report.declined,
        restarts=report.restarts,
        rails=_rails(report.rails),
    )


def _rails(shares: Sequence[baton_native.RailShare]) -> tuple[RailShare, ...]:
    return tuple(
        RailShare(
            rail=share.rail,
            bytes=share.bytes,
            chunks=share.chunks,
            retired=share.retired,
            bytes_per_s=share.bytes_per_s,
        )
        for share in shares
    )
