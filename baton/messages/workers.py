"""Membership: what workers and gateways tell of themselves."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from baton.messages.base import PARAMETERS_MAX, Message, ParameterName, Part, WorkerAddress

RANKS_MAX: Final = 256
"""Tensor-parallel ranks of an engine."""


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Fingerprint(Part, frozen=True, kw_only=True):
    """What a set of block ids comes to, in whatever order: equal ones mean equal sets, but by a freak of chance."""

    blocks: int = 0
    ids: bytes = bytes(16)
    """The sum of the ids as numbers, modulo 2 to the 128, all little-endian."""

    @classmethod
    def of(cls, ids_sum: int, blocks: int) -> Fingerprint:
        return cls(blocks=blocks, ids=(ids_sum % (1 << 128)).to_bytes(16, "little"))


class Heartbeat(Message, tag="heartbeat", frozen=True, kw_only=True):
    """What a worker says of itself, on `subjects.HEARTBEAT`, several times a second."""

    address: WorkerAddress
    role: Role
    model: str
    """The name that clients use."""
    model_path: str
    """Where the gateway finds the tokenizer: a folder or a hub id."""
    model_digest: str
    """Hex digest over configuration and weights: the root of block identity."""
    kv_identity: str = ""
    """See `baton.identity`: KV is handed over between workers of which it is equal; empty: the digest stands for it."""
    engine: str
    engine_kind: Annotated[str, Meta(max_length=64)] = ""
    """Digest over the engine's version and options: what one worker of a kind refuses, all do. Empty: unlike any."""
    parameters: Annotated[tuple[ParameterName, ...], Meta(max_length=PARAMETERS_MAX)] = ()
    """Keys of `Sampling.extensions` that the engine takes."""
    block_tokens: int
    """Size of a canonical block (the index's unit), in tokens."""
    context_tokens_max: int
    running: int = 0
    waiting: int = 0
    running_max: int
    kv_blocks_used: int = 0
    kv_blocks_total: int
    engine_block_tokens: int
    """Size of the engine's own block, in tokens: the unit of `kv_blocks_*`."""
    prefill_tokens_queued: int = 0
    """Prompt tokens accepted and still to be computed, without those that are taken to be cached."""
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    """Of one sequence at the present batch size: the inverse of the token interval."""
    transfer_bytes_per_s: float
    kv_bytes_per_token: int
    attempts: tuple[tuple[str, int], ...] = ()
    """(request, attempt) of everything this worker holds."""
    events_sequence: int = 0
    """Sequence of the newest `KvEvents` sent, so that the index sees a lost tail."""
    held: Fingerprint | None = None
    """Of all blocks that the worker holds after event `held_sequence`, which may not have been sent yet."""
    held_sequence: int = 0
    draining: bool = False
    leaves_in_s: float = 0.0
    """While draining: after this what still runs here is ended."""


class Goodbye(Message, tag="goodbye", frozen=True, kw_only=True):
    """A worker leaves on purpose; what it held is gone."""

    address: WorkerAddress


class GatewayBeat(Message, tag="gateway_beat", frozen=True, kw_only=True):
    """Each second, on `subjects.GATEWAY_BEAT`. Workers abort what belongs to a gateway silent for 5 s."""

    gateway: str
