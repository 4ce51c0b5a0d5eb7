"""Protocol of transfer agents: leases on the source side, layer-wise pulls on the sink side.

There is one agent per engine rank. On the **source** side (prefill) an agent opens a lease per attempt:
an append-only list of blocks of its pool, and per layer the number of tokens that are ready. On the
**sink** side (decode) an agent pulls a lease's blocks layer by layer, as they become ready, into
blocks of its own pool; only these reads ever write the sink's blocks. Generation and checksum are
checked after the bytes have arrived. Agents talk to each other directly, not over the bus.

Threads: every method returns at once and may be called from any thread; the agent moves bytes on its
own thread, without the GIL. Results come as events (`poll`), announced by `fileno`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Protocol

from baton.errors import LayoutMismatch, ModelMismatch, PeerUnreachable, TransferFailed

KEY_BYTES = 16


def lease_key(request: str, attempt: int, tokens: Sequence[int] = ()) -> bytes:
    """Return the key under which prefill leases this attempt's KV and decode asks for it.

    The key covers the whole prompt, so a mix-up anywhere never finds the KV of another prompt.
    """
    name = blake2b(f"{request}/{attempt}\0".encode(), digest_size=KEY_BYTES)
    name.update(array("q", tokens))
    return name.digest()


def rank_key(key: bytes, source_rank: int, sink_rank: int) -> bytes:
    """Return the key of one pair of ranks, used when one side has more ranks than the other.

    A lease ends with its pull, so a source's rank opens one lease for each rank that reads it.
    """
    return blake2b(f"{source_rank}/{sink_rank}".encode(), key=key, digest_size=KEY_BYTES).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """Hand-off of one rank's blocks with several of the peer's ranks, each of which has a key of its own (`rank_key`).

    Agents that copy blocks copy them once for all parts; the others do not need it.
    """

    key: bytes
    parts: int


class SharedMemory(Protocol):
    """Memory of a pool that other processes of this host can map. It lives as long as this object or its pool."""

    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A paged KV cache in this process. Block b of layer l lies at `layer_addresses[l] + b * block_stride_bytes`."""

    layer_addresses: tuple[int, ...]
    """Virtual addresses, in the model's layer order; where `layout` is split, each layer's K and then its V.

    The memory must outlive the agent.
    """
    blocks: int
    block_bytes: int
    """Bytes of one block at one address: K and V of a layer, or one of them, all heads of this rank."""
    block_stride_bytes: int
    block_tokens: int
    fingerprint: str
    """Meaning of the KV, beyond `layout`: the text of a `baton.identity.KvIdentity`.

    Agents with different fingerprints refuse each other with cause MODEL, naming the words that differ.
    """
    device: int | None = None
    """CUDA device of the memory; None: host memory. A pool on a device moves by cuda-ipc, cuda-put and gpudirect
    only. Within one process, its memory must also outlive the agents that pull from this one."""
    region: SharedMemory | None = None
    """Region from `share_memory`, if all layers lie in it: peers on this host then read it directly."""
    layout: str = ""
    """Content of a block: the text of a `baton.transfer.layout.Layout`. Pools with different layouts exchange what can
    be converted, and refuse the rest with cause LAYOUT. Without a layout, blocks of equal sizes are taken as equal."""


class Corruption(StrEnum):
    FLIP = "flip"
    """One bit is flipped."""
    ZERO = "zero"
    SHIFT = "shift"
    """All bytes rotate by 64, or by half of them if there are no more than 64; the first come last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFaults:
    """Injected faults, for tests and benchmarks. All off by default."""

    delay_s: float = 0.0
    """Each pull's first bytes are held back at the source for this long."""
    corrupt_every: int = 0
    """Every n-th data chunk arrives with other bytes than were sent. 0: none."""
    corruption: Corruption = Corruption.FLIP
    before_checksum: bool = False
    """Corrupt before the source computes its checksum, as if its pool held the wrong bytes: undetectable. Only where
    the source copies the bytes (shm, tcp); elsewhere the checksum itself is falsified."""
    silent: bool = False
    """The sink sends no keep-alives, so that its leases expire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""
    rails: tuple[str, ...] = ()
    """Addresses to listen on instead of `host` and `port`, each "host:port[@label][~distance]".

    A pull is spread over the nearest rails (distance 0 to 255, default 0) that work; farther ones step in when those
    are lost. A rail with a label is reached from the sink's own rail of that label, if it has one.
    """
    streams: int = 1
    """Connections to each rail of a source over which large pulls are spread; tcp and verbs only."""
    lane_bytes: int = 4 << 20
    """A pull gets one connection more, up to all of them, for each further `lane_bytes`."""
    chunk_bytes: int = 1 << 20
    """The most that moves at a time: of one layer, and at least a block. The same at both ends."""
    secret: str = ""
    """Shared key; a peer that cannot prove it can neither read nor write."""
    backends: tuple[str, ...] = ("direct", "shm", "cma", "verbs", "tcp")
    """Backends in order of preference; the handshake takes the first that works between both processes.

    direct: the sink maps the source's `Pool.region`; shm: a ring of shared memory; cma: the sink reads the source's
    memory through the kernel, which other processes of this user then may, too; verbs: RDMA adapters read; tcp.
    Pools in CUDA memory: cuda-ipc, on one host, the sink's GPU reads the source's blocks; cuda-put, on one host, the
    source's GPU writes them into slots of the sink's; gpudirect, RDMA adapters read from GPU to GPU. Used only if named
    here: ucx, UCX with its own choice of transports; it trusts every peer that reaches it.
    """
    host_id: str = ""
    """Name of this host that no other has, by which the handshake knows what cannot work; empty: its boot id."""
    verbs_library: str = "libibverbs.so.1"
    """Library loaded when the pool is set, like `ucx_library`; if it is missing, its backend is declined."""
    verbs_devices: str = ""
    """RDMA devices: name, name:port or name:port:index of its GID, with commas, used in turn; empty: all that are
    up."""
    ucx_library: str = "libucp.so.0"
    """Library of UCX, which is configured by its own variables, such as UCX_TLS."""
    gpu_library: str = ""
    """CUDA part of baton_native; empty: the one that its build made, if it found nvcc."""
    checksum: bool = True
    tells_asks: bool = False
    """Tell of LEASE_ASKED."""
    lease_ttl_s: float = 5.0
    """A lease expires this long after the last keep-alive of its sink."""
    unclaimed_ttl_s: float = 30.0
    """A lease that no sink ever asked for expires after this."""
    wanted_timeout_s: float = 10.0
    """A pull fails when its source neither opens nor refuses the lease for this long."""
    connect_timeout_s: float = 1.0
    stall_timeout_s: float = 10.0
    """A pull fails when an open lease makes no progress (no new ready tokens, no bytes, no keep-alive
    answer) for this long."""
    faults: TransferFaults = TransferFaults()


@dataclass(frozen=True, slots=True, kw_only=True)
class RailShare:
    """Traffic of one rail of a source for a sink: in one pull, or since the agent's start."""

    rail: str
    """Label or address of the rail."""
    bytes: int
    chunks: int
    retired: int
    """Connections that were lost, or given up because they hung."""
    bytes_per_s: float
    """Rate last measured on one connection; 0: not yet measured."""


class EventKind(StrEnum):
    PULL_PROGRESS = "pull_progress"
    """Sink: layers 0 to `layers` - 1 have arrived whole and are verified. At most one per layer."""
    PULL_DONE = "pull_done"
    """Sink: everything has arrived and is verified. The lease was released at the source."""
    PULL_FAILED = "pull_failed"
    """Sink: the pull failed and nothing writes the destination blocks any more; `cause` and `detail` say why."""
    LEASE_ASKED = "lease_asked"
    """Source: a sink asks for the lease; once for each generation, if the agent `tells_asks`."""
    LEASE_RELEASED = "lease_released"
    """Source: the sink is done, the blocks may be reused."""
    LEASE_STAGED = "lease_staged"
    """Source: the whole lease was copied to memory of the agent. The pool's blocks may be reused; the lease goes on."""
    LEASE_ENDED = "lease_ended"
    """Source: expired (`cause` = expired) or revoked; the blocks may be reused."""


class Cause(StrEnum):
    NONE = "none"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    UNREACHABLE = "unreachable"
    """No connection to the source, or it was lost and could not be made again."""
    REFUSED = "refused"
    """Secret or lengths do not match; `detail` names both sides."""
    REVOKED = "revoked"
    """The source revoked the lease and did not open a new generation before the deadline."""
    EXPIRED = "expired"
    CHECKSUM = "checksum"
    STALLED = "stalled"
    LAYOUT = "layout"
    """One KV layout cannot be converted into the other; `detail` names both in full."""
    MODEL = "model"
    """The KV does not mean the same on both sides; `detail` names what differs."""
    COPY = "copy"
    """KV could not be copied between the pool and host memory, see `baton.pool.staging`."""


def pull_failure(cause: Cause, detail: str) -> TransferFailed:
    """Return the error for a pull that failed for this cause."""
    match cause:
        case Cause.UNREACHABLE:
            return PeerUnreachable(detail)
        case Cause.LAYOUT:
            return LayoutMismatch(detail)
        case Cause.MODEL:
            return ModelMismatch(detail)
        case _:
            return TransferFailed(detail)


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
    declined: str = ""
    """Preferred backends that do not work between the two, and why; and the transports of `ucx`, if it was taken."""
    restarts: int = 0
    """Number of restarts of the pull because the source's generation rose."""
    rails: tuple[RailShare, ...] = ()
    """Rails that carried the pull's bytes, including those of a revoked generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStats:
    leases: int
    """Source: open leases."""
    leased_blocks: int
    pulls: int
    """Sink: running pulls."""
    parked: int
    """Source: leases asked for and not opened yet."""
    pulled_bytes: int
    pulled_blocks: int
    """Pulled blocks, counted per layer: one block of a model with L layers counts L."""
    served_bytes: int
    pulls_done: int
    pulls_failed: int
    leases_expired: int
    leases_revoked: int
    checksum_failures: int
    fallbacks: int = 0
    """Pulls that did not use the first backend of the list, because it does not work between the two."""
    lanes_retired: int = 0
    """Connections to sources that were lost, or given up because they hung."""


class TransferAgent(Protocol):
    """Agent of one engine rank, see the module's docstring. Keys have `KEY_BYTES` bytes; unknown keys are ignored, as
    messages may cross."""

    endpoint: str
    """Endpoint for other agents; opaque."""

    def fileno(self) -> int:
        """Return an eventfd that is readable while `poll` has something to return."""
        ...

    def poll(self) -> list[TransferEvent]:
        """Take all events since the last call."""
        ...

    def set_pool(self, pool: Pool) -> None:
        """Set the memory that leases and pulls refer to; once, before either."""
        ...

    # Source.

    def open_lease(
        self, key: bytes, *, tokens: int = 0, unclaimed_ttl_s: float | None = None, whole: Whole | None = None
    ) -> int:
        """Open a lease, or raise the generation of one that was revoked; return its generation, from 1.

        `tokens`: its length once it is complete, for agents that reserve memory for it; 0: not known. `whole`: leases
        of one whole have the same blocks, are ready alike, and are revoked together.
        """
        ...

    def extend_lease(self, key: bytes, generation: int, blocks: Sequence[int]) -> None:
        """Append blocks of the pool to the lease. Ignored for an older generation."""
        ...

    def post_ready(self, key: bytes, generation: int, layer: int, tokens: int) -> None:
        """Report that the first `tokens` tokens of `layer` are in the lease's blocks; only grows. -1: all layers."""
        ...

    def complete_lease(self, key: bytes, generation: int, tokens: int) -> None:
        """Set the number of tokens of the whole lease; a sink that wants more is refused."""
        ...

    def revoke_lease(self, key: bytes, *, final: bool) -> None:
        """Revoke the present generation, before its blocks are overwritten. Returns once no reader can
        accept bytes that change after this. `final`: no new generation will come; sinks fail at once."""
        ...

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
        """Fill `blocks` of the pool with the lease's KV for tokens [first_token, tokens).

        `first_token` is a multiple of this pool's block size, whatever the source's is; `blocks[0]` receives the
        tokens from there on. If both layouts are alike, whole blocks move, including the rest of the last one;
        otherwise exactly these tokens are written, for the heads that both ranks hold. Ends with exactly one
        PULL_DONE or PULL_FAILED. `whole`: all parts of a whole are pulled, into the same blocks.
        """
        ...

    def cancel_pull(self, key: bytes) -> None:
        """Stop a pull and tell its source; PULL_FAILED with cause CANCELLED follows once nothing writes any more."""
        ...

    def release(self, key: bytes, endpoint: str) -> None:
        """Tell a source that its lease is not needed (all of its tokens were cached here)."""
        ...

    def stats(self) -> AgentStats: ...

    def set_faults(self, faults: TransferFaults) -> None:
        """Inject these faults from now on, for tests and benchmarks; `TransferFaults()` ends them."""
        ...

    def close(self) -> None:
        """Stop the thread and close connections; open pulls fail, open leases end."""
        ...
