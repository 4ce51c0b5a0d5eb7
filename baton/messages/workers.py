"""Membership: heartbeats and goodbyes of workers and gateways."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from baton.messages.base import PARAMETERS_MAX, Message, ParameterName, Part, WorkerAddress

RANKS_MAX: Final = 256
"""Tensor-parallel ranks of an engine."""
PEERS_MAX: Final = 16
"""Peers whose bandwidth a heartbeat states."""


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Fingerprint(Part, frozen=True, kw_only=True):
    """Order-independent fingerprint of a set of block ids. Equal fingerprints mean equal sets; collisions are
    negligibly rare."""

    blocks: int = 0
    ids: bytes = bytes(16)
    """Sum of the ids as numbers, modulo 2 to the power of 128, all little-endian."""

    @classmethod
    def of(cls, ids_sum: int, blocks: int) -> Fingerprint:
        return cls(blocks=blocks, ids=(ids_sum % (1 << 128)).to_bytes(16, "little"))


class StepFit(Part, frozen=True, kw_only=True):
    """Seconds that a step of an engine takes, as the worker measured them, see `baton/worker/rates.py`."""

    prompt_step_s: float
    """A step that computes a part of a prompt."""
    prompt_token_s: float
    """Each prompt token computed."""
    prompt_pair_s: float
    """Each unit of end² − start² of a prompt computed from token `start` to token `end`."""
    decode_step_s: float
    """A step in which sequences run."""
    sequence_s: float
    """Each sequence that runs."""
    kv_s: float
    """In proportion to the share of the KV cache in use, in a step in which sequences run."""
    spread: float = 0.0
    """Standard deviation of one sample from these rates, relative to its prediction."""
    samples: int = 0
    """Number of samples; 0: the rates are a guess."""

    def token_interval_s(self, sequences: int, kv_share: float) -> float:
        """Return the time of a step in which this many sequences run and no prompt is computed."""
        return self.decode_step_s + self.sequence_s * sequences + self.kv_s * kv_share


class TransferFit(Part, frozen=True, kw_only=True):
    """Measured bandwidth of pulls from one peer."""

    peer: str
    """Worker from which the KV was pulled."""
    backend: str
    """Backend that was used last."""
    bytes_per_s: float
    spread: float = 0.0
    samples: int = 0


class PromotionFit(Part, frozen=True, kw_only=True):
    """Measured bandwidth of promotions from the worker's KV pool to its device."""

    bytes_per_s: float
    spread: float = 0.0
    samples: int = 0
    """Number of samples; 0: the bandwidth is a guess."""


class Heartbeat(Message, tag="heartbeat", frozen=True, kw_only=True):
    """A worker's description and load, on `subjects.HEARTBEAT`, several times a second."""

    address: WorkerAddress
    role: Role
    model: str
    """Model name that clients use."""
    model_path: str
    """Folder or hub id from which the gateway loads the tokenizer."""
    model_digest: str
    """Hex digest over configuration and weights: the root of block identity."""
    kv_identity: str = ""
    """Identity of the worker's KV, see `baton.identity`. KV moves between workers with equal identities; empty:
    `model_digest` is compared instead."""
    engine: str
    engine_kind: Annotated[str, Meta(max_length=64)] = ""
    """Digest over the engine's version and options: what one worker of a kind refuses, all do. Empty: a kind of its
    own."""
    parameters: Annotated[tuple[ParameterName, ...], Meta(max_length=PARAMETERS_MAX)] = ()
    """`Sampling.parameters` that the engine supports."""
    block_tokens: int
    """Size of a canonical block (the index's unit), in tokens."""
    context_tokens_max: int
    running: int = 0
    waiting: int = 0
    overbooked: int = 0
    """Attempts that wait for room, and hold neither a slot nor KV."""
    overbooked_kv_tokens: int = 0
    """KV that they will take."""
    pulling: int = 0
    """Part of `running`: attempts whose KV has not arrived yet."""
    pulling_kv_blocks: int = 0
    """Part of `kv_blocks_used` that they reserve."""
    running_max: int
    kv_blocks_used: int = 0
    kv_blocks_total: int
    kv_shared_share: float = 0.0
    """Share of what recent prompts found in the cache that running attempts held, so that it took no room."""
    engine_block_tokens: int
    """Size of the engine's own block, in tokens: the unit of `kv_blocks_*`."""
    prefill_tokens_queued: int = 0
    """Prompt tokens accepted and not yet computed, without those expected in the cache."""
    prefill_pairs_queued: int = 0
    """Sum of end² − start² over the same prompts, see `StepFit`."""
    prefill_elapsed_s: float = 0.0
    """Time for which the oldest of them has been computed, at most its predicted time."""
    step_tokens_max: int
    """Prompt tokens that the engine computes in one step."""
    steps: StepFit
    transfers: Annotated[tuple[TransferFit, ...], Meta(max_length=PEERS_MAX)] = ()
    """Bandwidths of the peers that were pulled from last."""
    promotion: PromotionFit | None = None
    """None: the worker has no KV pool."""
    pool_tokens_free: int = 0
    """Tokens that the KV pool can take before it evicts."""
    loading: PromotionFit | None = None
    """Measured bandwidth of reads from the pool's file into the pool; None: there is no file."""
    kv_bytes_per_token: int
    computing: int = 0
    """Attempts that the engine has to advance: none that wait for room or for KV."""
    progress_tokens: int = 0
    """Tokens computed and generated so far. If it stands still while attempts are computing, the engine is stuck."""
    completed: int = 0
    """Attempts that ended well so far."""
    attempts: tuple[tuple[str, int], ...] = ()
    """(request, attempt) of each attempt that this worker holds."""
    events_sequence: int = 0
    """Sequence of the newest `KvEvents` sent, so that the index detects a lost tail."""
    held: Fingerprint | None = None
    """Fingerprint of all blocks held on the device after event `held_sequence`, which may not have been sent yet."""
    pooled: Fingerprint = Fingerprint()
    """The same of the blocks in the worker's pool."""
    filed: Fingerprint = Fingerprint()
    """The same of the blocks in the pool's file."""
    held_sequence: int = 0
    draining: bool = False
    next_role: Role | None = None
    """Role that a draining worker takes next; None: it leaves."""
    leaves_in_s: float = 0.0
    """Time until a draining worker leaves, or takes its next role: answers that would end later are moved."""

    @property
    def fingerprints(self) -> tuple[Fingerprint, ...] | None:
        """Fingerprints by tier; None: not known."""
        return None if self.held is None else (self.held, self.pooled, self.filed)

    def token_interval_s(self) -> float:
        """Return the token interval of the sequences that run now, without prompts."""
        kv_share = self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total > 0 else 1.0
        return self.steps.token_interval_s(max(1, self.running), kv_share)


class Goodbye(Message, tag="goodbye", frozen=True, kw_only=True):
    """A worker leaves on purpose; its blocks and attempts are gone."""

    address: WorkerAddress


class ChangeRole(Message, tag="change_role", frozen=True, kw_only=True):
    """Supervisor, or `baton roles`, to one worker: take this role.

    Answered by `RoleChange`, or by `Refused` with Conflict, InvalidRequest or Unavailable.
    """

    generation: int
    role_epoch: int
    """`role_epoch` of the worker as the sender knows it: an order that is out of date is refused."""
    role: Role


class RoleChange(Message, tag="role_change", frozen=True, kw_only=True):
    """Answer to `ChangeRole`: the worker has this role, or will have it once attempts of the old one have ended."""

    role: Role
    role_epoch: int
    """`role_epoch` that belongs to the role."""


class GatewayBeat(Message, tag="gateway_beat", frozen=True, kw_only=True):
    """A gateway's heartbeat, each second, on `subjects.GATEWAY_BEAT`. Workers abort the attempts of a gateway that
    is silent for 5 s."""

    gateway: str
