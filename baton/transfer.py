"""Moving KV blocks between engines: the one module that knows `baton_native`'s transfer agent.

One agent per engine rank. On the **source** side (prefill) an agent opens a lease per attempt: an
append-only list of blocks of its pool, and per layer the number of tokens that are ready. On the
**sink** side (decode) an agent pulls a lease's blocks layer by layer, as they become ready, into
blocks of its own pool; only these reads ever write the sink's blocks. Generation and checksum are
checked after the bytes arrived. Agents talk to each other directly, not over the bus.

Threads: every method returns at once and may be called from any thread; the agent moves bytes on its
own thread, without the GIL. Results come as events (`poll`), announced by `fileno`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Protocol

import baton_native

from baton.errors import ConfigurationError, TransferFailed

KEY_BYTES = 16


def lease_key(request: str, attempt: int) -> bytes:
    """Return the key under which prefill leases this attempt's KV and decode asks for it."""
    return blake2b(f"{request}/{attempt}".encode(), digest_size=KEY_BYTES).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A paged KV cache in this process. Block b of layer l lies at `layer_addresses[l] + b * block_stride_bytes`."""

    layer_addresses: tuple[int, ...]
    """Virtual addresses, in the model's layer order. The memory must outlive the agent."""
    blocks: int
    block_bytes: int
    """Of one layer's block: K and V, all heads of this rank."""
    block_stride_bytes: int
    block_tokens: int
    fingerprint: str
    """Model digest, dtype and inner layout. Agents with different fingerprints refuse each other, naming both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Injected faults, for tests and benchmarks. All off by default."""

    delay_s: float = 0.0
    """Each pull's first bytes are held back at the source for this long."""
    corrupt_every: int = 0
    """Flip one bit of every n-th data chunk, after its checksum was taken. 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""
    secret: str = ""
    """Shared key; a peer that cannot prove it can neither read nor write."""
    backends: tuple[str, ...] = ("shm", "tcp")
    """In order of preference; the handshake takes the first that works between both hosts."""
    checksum: bool = True
    lease_ttl_s: float = 5.0
    """A lease dies this long after the last keep-alive of a sink that wants it."""
    unclaimed_ttl_s: float = 30.0
    """A lease that nobody ever asked for dies after this."""
    wanted_timeout_s: float = 10.0
    """A pull fails when its source neither opens nor refuses the lease for this long."""
    connect_timeout_s: float = 1.0
    stall_timeout_s: float = 10.0
    """A pull fails when an open lease makes no progress (no new ready tokens, no bytes, no keep-alive
    answer) for this long."""
    faults: Faults = Faults()


class EventKind(StrEnum):
    PULL_PROGRESS = "pull_progress"
    """Sink: layers 0 to `layers` - 1 have arrived and verified, whole. At most one per layer."""
    PULL_DONE = "pull_done"
    """Sink: everything arrived and verified. The lease was released at the source."""
    PULL_FAILED = "pull_failed"
    """Sink: nothing writes the destination blocks any more; `cause` and `detail` say why."""
    LEASE_RELEASED = "lease_released"
    """Source: the sink is done, the blocks may be reused."""
    LEASE_ENDED = "lease_ended"
    """Source: expired (`cause` = expired) or revoked; the blocks may be reused."""


class Cause(StrEnum):
    NONE = "none"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    UNREACHABLE = "unreachable"
    """No connection to the source, or it was lost and could not be made again."""
    REFUSED = "refused"
    """Secret, fingerprint or lengths do not match; `detail` names both sides."""
    REVOKED = "revoked"
    """The source gave the lease up and did not open a new generation before the deadline."""
    EXPIRED = "expired"
    CHECKSUM = "checksum"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEvent:
    kind: EventKind
    key: bytes
    cause: Cause = Cause.NONE
    detail: str = ""
    layers: int = 0
    bytes: int = 0
    tokens: int = 0
    waiting_s: float = 0.0
    """Time in which nothing was ready to move."""
    moving_s: float = 0.0
    backend: str = ""
    restarts: int = 0
    """How often the pull began again because the source's generation rose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStats:
    leases: int
    """Open now, at the source."""
    leased_blocks: int
    pulls: int
    """Running now, at the sink."""
    parked: int
    """Asked for, not opened yet, at the source."""
    pulled_bytes: int
    pulled_blocks: int
    """Counted per layer: one block of a model with L layers counts L."""
    served_bytes: int
    pulls_done: int
    pulls_failed: int
    leases_expired: int
    leases_revoked: int
    checksum_failures: int


class TransferAgent(Protocol):
    """See the module's text. Keys have `KEY_BYTES` bytes; unknown keys are ignored, as messages may cross."""

    endpoint: str
    """How other agents reach this one; opaque."""

    def fileno(self) -> int:
        """Return an eventfd that is readable while `poll` has something to return."""
        ...

    def poll(self) -> list[TransferEvent]:
        """Take all events since the last call."""
        ...

    def set_pool(self, pool: Pool) -> None:
        """Name the memory that leases and pulls speak of; once, before either."""
        ...

    # Source.

    def open_lease(self, key: bytes, *, unclaimed_ttl_s: float | None = None) -> int:
        """Open a lease, or raise the generation of one that was revoked; return its generation, from 1."""
        ...

    def extend_lease(self, key: bytes, generation: int, blocks: Sequence[int]) -> None:
        """Append blocks of the pool. Ignored for an older generation."""
        ...

    def post_ready(self, key: bytes, generation: int, layer: int, tokens: int) -> None:
        """Say that the first `tokens` tokens of `layer` lie in the lease's blocks; only ever grows. -1: all layers."""
        ...

    def complete_lease(self, key: bytes, generation: int, tokens: int) -> None:
        """Say how many tokens the whole lease has; a sink that wants more is refused."""
        ...

    def revoke_lease(self, key: bytes, *, final: bool) -> None:
        """Give up the present generation, before its blocks are overwritten. Returns once no reader can
        take bytes that change after this for good. `final`: no new generation will come; sinks fail at once."""
        ...

    # Sink.

    def pull(
        self, key: bytes, endpoint: str, *, first_token: int, tokens: int, blocks: Sequence[int], budget_s: float
    ) -> None:
        """Fill `blocks` of the pool with the lease's KV for tokens [first_token, tokens).

        `first_token` is a multiple of the block size; `blocks[0]` receives the source's block at that
        token. Ends with exactly one PULL_DONE or PULL_FAILED.
        """
        ...

    def cancel_pull(self, key: bytes) -> None:
        """Stop a pull and tell its source; PULL_FAILED with cause CANCELLED follows once nothing writes any more."""
        ...

    def release(self, key: bytes, endpoint: str) -> None:
        """Tell a source that its lease is not needed (all of it was cached here)."""
        ...

    def stats(self) -> AgentStats: ...

    def set_faults(self, faults: Faults) -> None:
        """Inject these faults from now on, for tests and benchmarks; `Faults()` ends them."""
        ...

    def close(self) -> None:
        """Stop the thread, close connections; open pulls fail, open leases end."""
        ...


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
        native.checksum = options.checksum
        native.lease_ttl_s = options.lease_ttl_s
        native.unclaimed_ttl_s = options.unclaimed_ttl_s
        native.wanted_timeout_s = options.wanted_timeout_s
        native.connect_timeout_s = options.connect_timeout_s
        native.stall_timeout_s = options.stall_timeout_s
        native.delay_s = options.faults.delay_s
        native.corrupt_every = options.faults.corrupt_every
        if not 0 <= options.port <= 65535:
            raise ValueError(f"{options.port} is no port")
        try:
            self._agent = baton_native.Agent(native, options.host, options.port)
        except RuntimeError as failure:
            raise ConfigurationError(f"the transfer agent does not start: {failure}") from failure
        self.endpoint = self._agent.endpoint

    def fileno(self) -> int:
        return self._agent.fileno()

    def poll(self) -> list[TransferEvent]:
        with _typed_failure():
            reports = self._agent.poll()
        return [_event(report) for report in reports]

    def set_pool(self, pool: Pool) -> None:
        with _typed_failure():
            self._agent.set_pool(
                list(pool.layer_addresses),
                _natural("blocks", pool.blocks),
                _natural("block_bytes", pool.block_bytes),
                _natural("block_stride_bytes", pool.block_stride_bytes),
                _natural("block_tokens", pool.block_tokens),
                pool.fingerprint,
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
        )

    def set_faults(self, faults: Faults) -> None:
        with _typed_failure():
            self._agent.set_faults(faults.delay_s, _natural("corrupt_every", faults.corrupt_every))

    def close(self) -> None:
        self._agent.close()


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


def _natural(name: str, value: int) -> int:
    if not 0 <= value < 1 << 32:
        raise ValueError(f"{name} must be from 0 to 2**32 - 1, not {value}")
    return value


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
        restarts=report.restarts,
    )
