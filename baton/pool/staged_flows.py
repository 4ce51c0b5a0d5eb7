"""What is under way in a `StagedAgent`: leases and pulls, with their slots and copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.transfer import TransferEvent


@dataclass(slots=True, eq=False)
class Step:
    """What is done once these copies have ended, and all steps before this one are done."""

    then: Callable[[], None]
    tickets: set[int] = field(default_factory=set[int])


@dataclass(slots=True, eq=False)
class Flow:
    """One generation of a lease, or one pull."""

    key: bytes
    blocks: list[int]
    """The cache's blocks; block i is staged in slot i."""
    slots: list[int] = field(default_factory=list[int])
    """Cells of host memory."""
    after: int | None = None
    """Stream that last wrote or used the blocks."""
    steps: deque[Step] = field(default_factory=deque[Step])
    batches: int = 0
    """Batches of copies under way."""
    over: bool = False
    last: TransferEvent | None = None
    """Event of the end, told once no batch is under way."""
    closed: bool = False
    """Whether that is done, and the slots are free."""
    failure: str = ""


@dataclass(slots=True, eq=False, kw_only=True)
class StagedLease(Flow):
    generation: int
    ready: list[int]
    """Tokens in the cache, by layer."""
    copied: list[int]
    """Tokens whose copies were started, by layer."""
    asked: int = 0
    """Slots asked for."""
    leased: int = 0
    """Slots that peers were told of."""
    tokens: int = 0
    """Length of the whole lease; 0: not known yet."""
    is_staged: bool = False
    """Whether the copies of all of it were started."""

    def copied_blocks(self, block_tokens: int) -> dict[int, int]:
        """Return the cells of blocks that are full and whose copies were started, in all layers."""
        full = min(self.copied) // block_tokens
        return dict(zip(self.blocks[:full], self.slots, strict=False))


@dataclass(slots=True, eq=False, kw_only=True)
class StagedPull(Flow):
    endpoint: str
    first_token: int
    tokens: int
    began_s: float
    deadline_s: float
    layers: int = 0
    """Layers whose copies were started."""
    restarts: int = 0
    done: TransferEvent | None = None
    """PULL_DONE, once all KV is in the slots."""
    started: bool = False
    """Whether it has its slots, and the peer is asked."""
    waited_s: float = 0.0
    """Time in which it waited for slots."""
