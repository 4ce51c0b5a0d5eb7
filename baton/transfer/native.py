"""The transfer agent of `native/transfer`, with its own thread and sockets."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import baton_native

from baton.errors import ConfigurationError, TransferFailed
from baton.transfer.native_values import (
    agent_stats,
    block_indexes,
    checked_key,
    native_faults,
    native_options,
    natural,
    rail_shares,
    transfer_event,
)
from baton.transfer.protocol import (
    AgentOptions,
    AgentStats,
    Pool,
    RailShare,
    SharedMemory,
    TransferEvent,
    TransferFaults,
    Whole,
)

_log = logging.getLogger(__name__)

SLOW_BACKEND = "tcp"


class NativeAgent:
    """The transfer agent of `native/transfer`: a state machine in C++ with one thread of its own.

    Beyond the protocol: a cancelled pull ends its source's lease as LEASE_ENDED with cause CANCELLED; a
    pull that failed at the sink ends it with the sink's cause. A pull whose lease was revoked restarts by
    itself and reports no layer twice. A `final` revocation, a release or a cancel is remembered for a
    minute, so it may come before its lease or pull. After `close`, and if its thread ever fails, methods
    raise TransferFailed; bad arguments raise ValueError, but bad options, which users give, ConfigurationError.
    """

    def __init__(self, options: AgentOptions) -> None:
        try:
            if not 0 <= options.port <= 65535:
                raise ValueError(f"{options.port} is no port")
            self._agent = baton_native.Agent(
                native_options(options), options.rails or (_address(options.host, options.port),)
            )
        except (RuntimeError, ValueError) as failure:
            raise ConfigurationError(f"the transfer agent does not start: {failure}") from failure
        self.endpoint = self._agent.endpoint
        self.options = options
        self._announced: set[str] = set()

    def fileno(self) -> int:
        return self._agent.fileno()

    def poll(self) -> list[TransferEvent]:
        with _typed_failure():
            reports = self._agent.poll()
        events = [transfer_event(report) for report in reports]
        for event in events:
            if event.backend and event.backend not in self._announced:
                self._announce(event)
        return events

    def _announce(self, event: TransferEvent) -> None:
        """Log each backend on its first use. A fallback to TCP is a warning, also when UCX chose it."""
        self._announced.add(event.backend)
        slow = event.backend == SLOW_BACKEND or f"{SLOW_BACKEND}/" in event.declined  # In UCX's notation.
        level = logging.WARNING if slow and event.declined else logging.INFO
        _log.log(level, "KV comes over %s%s", event.backend, event.declined and f": {event.declined}")

    def set_pool(self, pool: Pool) -> None:
        with _typed_failure():
            self._agent.set_pool(
                list(pool.layer_addresses),
                natural("blocks", pool.blocks),
                natural("block_bytes", pool.block_bytes),
                natural("block_stride_bytes", pool.block_stride_bytes),
                natural("block_tokens", pool.block_tokens),
                pool.fingerprint,
                _region(pool),
                -1 if pool.device is None else natural("device", pool.device),
                pool.layout,
            )

    def open_lease(
        self, key: bytes, *, tokens: int = 0, unclaimed_ttl_s: float | None = None, whole: Whole | None = None
    ) -> int:
        with _typed_failure():
            return self._agent.open_lease(checked_key(key), -1.0 if unclaimed_ttl_s is None else unclaimed_ttl_s)

    def extend_lease(self, key: bytes, generation: int, blocks: Sequence[int]) -> None:
        with _typed_failure():
            self._agent.extend_lease(checked_key(key), generation, block_indexes(blocks))

    def post_ready(self, key: bytes, generation: int, layer: int, tokens: int) -> None:
        with _typed_failure():
            self._agent.post_ready(checked_key(key), generation, layer, natural("tokens", tokens))

    def post_ready_after(self, key: bytes, generation: int, layer: int, tokens: int, *, stream: int) -> None:
        """`post_ready` for a pool in CUDA memory, after the work now in the CUDA stream has ended; returns at once.

        Sinks may pull at once, too: their GPU waits, not their host. `stream` is a cudaStream_t that is not being
        captured into a graph.
        """
        with _typed_failure():
            self._agent.post_ready_after(checked_key(key), generation, layer, natural("tokens", tokens), stream)

    def complete_lease(self, key: bytes, generation: int, tokens: int) -> None:
        with _typed_failure():
            self._agent.complete_lease(checked_key(key), generation, natural("tokens", tokens))

    def revoke_lease(self, key: bytes, *, final: bool) -> None:
        with _typed_failure():
            self._agent.revoke_lease(checked_key(key), final)

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
        with _typed_failure():
            self._agent.pull(checked_key(key), endpoint, first_token, tokens, block_indexes(blocks), budget_s)

    def cancel_pull(self, key: bytes) -> None:
        with _typed_failure():
            self._agent.cancel_pull(checked_key(key))

    def release(self, key: bytes, endpoint: str) -> None:
        with _typed_failure():
            self._agent.release(checked_key(key), endpoint)

    def stats(self) -> AgentStats:
        return agent_stats(self._agent.stats())

    def rails(self) -> tuple[RailShare, ...]:
        """Return what each rail of each source has carried for this sink since the start."""
        return rail_shares(self._agent.stats().rails)

    def set_faults(self, faults: TransferFaults) -> None:
        with _typed_failure():
            self._agent.set_faults(native_faults(faults))

    def close(self) -> None:
        self._agent.close()


def share_memory(size: int) -> SharedMemory:
    """Reserve memory for a pool that peers on this host read directly. Raises ConfigurationError if none is left."""
    try:
        return baton_native.Region(size)
    except RuntimeError as failure:
        raise ConfigurationError(f"there is no shared memory for the pool: {failure}") from failure


def checksum_bytes(data: bytes) -> int:
    """Return the CRC-32C of some bytes."""
    return baton_native.crc32c(data)


def checksum_memory(address: int, size: int) -> int:
    """Return the CRC-32C of memory of this process, computed without the GIL."""
    return baton_native.crc32c_at(address, size)


@contextmanager
def _typed_failure() -> Generator[None]:
    try:
        yield
    except RuntimeError as failure:
        raise TransferFailed(str(failure)) from failure


def _region(pool: Pool) -> baton_native.Region | None:
    if pool.region is None or isinstance(pool.region, baton_native.Region):
        return pool.region
    raise ValueError("the pool's region was not made by share_memory")


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
