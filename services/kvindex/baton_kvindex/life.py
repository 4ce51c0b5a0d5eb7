"""What the follower knows of one life of one worker."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.messages import Fingerprint, Heartbeat, KvEvents
from baton_kvindex.audit import Audit
from baton_kvindex.cold import Cold


class Resync(enum.StrEnum):
    NO = "no"
    NEEDED = "needed"
    RUNNING = "running"


@dataclass(slots=True)
class Life:
    """`heard_s` is the last heartbeat, or when anything first named the worker."""

    generation: int
    model_digest: str
    heard_s: float
    sequence: int = 0
    live: bool = False
    expected: int = 0
    """An event that a heartbeat named, at `expected_since_s`; 0: none is outstanding."""
    expected_since_s: float = 0.0
    resync: Resync = Resync.NO
    resync_from_s: float = 0.0
    """When the next resync may start."""
    must_read: bool = False
    """No event that may come makes up for the resync that is needed."""
    doubted: bool = False
    """An event made no sense, so what is held is wrong somewhere: nothing more is applied before the resync."""
    waiting: list[KvEvents] = field(default_factory=list[KvEvents])
    recall: Cold | None = None
    """What the first of `waiting` needs, and is being fetched."""
    claimed: Fingerprint | None = None
    """What a heartbeat said that the worker holds after event `claimed_sequence`, which is still to be compared."""
    claimed_sequence: int = 0
    agreed_sequence: int = -1
    """The newest event after which both held the same; -1: not in this life, or not since they differed."""
    drifts: int = 0
    """Since both last held the same."""
    audit: Audit = field(default_factory=Audit)
    block_tokens: int = 0
    """Of a block, the engine's or ours, whichever is longer."""

    def on_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> None:
        self.heard_s = now_s
        self.block_tokens = max(heartbeat.block_tokens, heartbeat.engine_block_tokens)
        if not self.live:
            self.live = True
            if heartbeat.events_sequence and not self.sequence:
                self.resync = Resync.NEEDED
        if self.sequence >= self.expected:
            self.expected = heartbeat.events_sequence if heartbeat.events_sequence > self.sequence else 0
            self.expected_since_s = now_s
        if self.claimed is None or self.sequence >= self.claimed_sequence:
            self.claimed, self.claimed_sequence = heartbeat.held, heartbeat.held_sequence

    def read_anew(self) -> None:
        """Demand a resync that no event makes up for; one that runs may have begun too early to be that."""
        self.must_read = True
        if self.resync is Resync.NO:
            self.resync = Resync.NEEDED

    def can_compare(self) -> bool:
        """Whether the claim speaks of exactly what is held here now."""
        # While something is being fetched, a part of the next event may have been applied.
        is_sound = self.resync is Resync.NO and not self.doubted and self.recall is None
        return self.claimed is not None and self.sequence == self.claimed_sequence and is_sound
