"""One life of one worker, as the index follows it: a pure state machine that owns its fields.

    SYNCED ───── a reason ─────▶ NEEDED ──── due ────▶ RUNNING
      ▲  ▲                        │   ▲                 │   │
      │  └─ late events came: ────┘   └───── failed ────┘   │
      │     joined, behind                                  │
      └──────────────────────── pages ──────────────────────┘

    SYNCED   all that the worker said was applied
    NEEDED   something is missing or wrong, so the worker's shadow map is to be read: a resync. Events are applied on
    RUNNING  the map is being read, and events wait: they are applied on top of it

Events are applied in order, each once: an older sequence is dropped, one too far ahead waits for a resync. An event
that needs cold blocks waits for their reload, in any state, and all that come after it wait behind it.
Storing and removing are idempotent and the last word on a block wins. So the map may be read while the worker
changes: everything after its first page's sequence is applied again.
Heartbeats name the newest event that was sent; one that does not come within `behind_s` is lost. They also carry a
fingerprint of all that the worker holds after one of its events, which is compared once exactly that event is applied.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Final

from baton.messages.base import WorkerAddress
from baton.messages.index import BlocksCleared, KvEvents
from baton.messages.placement import Audited
from baton.messages.workers import Fingerprint, Heartbeat
from baton_kvindex.audit import Audit
from baton_kvindex.config import IndexSettings
from baton_kvindex.counters import Counters, ResyncReason
from baton_kvindex.durable import WorkerState

DRIFT_DOUBLINGS_MAX: Final = 6
"""Doublings of the time between two resyncs of one worker, while they do not help."""
WAITING_BYTES_MAX: Final = 16 << 20
"""Events of one worker that wait behind another, with what they take beside their ids."""
MESSAGE_BYTES, EVENT_BYTES = 400, 150

HELD_IS_WHOLE: Final = frozenset({None, ResyncReason.JOINED, ResyncReason.BEHIND, ResyncReason.GAP})
"""What is held here is what the worker held after `sequence`."""
EVENTS_END: Final = frozenset({ResyncReason.JOINED, ResyncReason.BEHIND})
"""The resync is needed no more once the events that are missing have come."""


class SyncState(enum.StrEnum):
    SYNCED = "synced"
    NEEDED = "needed"
    RUNNING = "running"


class IndexedWorker:
    """`sequence` is the newest event of which what is held here takes account."""

    def __init__(self, name: str, state: WorkerState, settings: IndexSettings, counters: Counters) -> None:
        self.name = name
        self.generation = state.generation
        self.model_digest = state.model_digest
        self.sequence = state.sequence
        self.state = SyncState.SYNCED
        self.reason: ResyncReason | None = None
        """Why a resync is needed or running."""
        self.agreed_sequence = -1
        """The newest event after which both held the same; -1: not in this life, or not since they differed."""
        self.drifts = 0
        """Fingerprints that differed since both last held the same."""
        self.audit = Audit()
        self._settings = settings
        self._counters = counters
        self._is_heard = False
        self._resync_from_s = 0.0
        """When the next resync may start."""
        self._named_sequence = 0
        """An event that a heartbeat named, at `_named_s`; 0: none is outstanding."""
        self._named_s = 0.0
        self._claim: Fingerprint | None = None
        """What a heartbeat said that the worker holds after event `_claim_sequence`, until it is compared."""
        self._claim_sequence = 0
        self._block_tokens = 0
        """Size of a block, the engine's or ours, whichever is larger."""
        self._waiting = deque[KvEvents]()
        self._waiting_bytes = 0
        self._is_reloading = False

    # ------------------------------------------------------------ what is known

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(worker=self.name, generation=self.generation)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is missing that this worker would answer for: a worker that was not heard answers nothing."""
        return self.state is SyncState.SYNCED or not self._is_heard

    @property
    def sound_sequence(self) -> int:
        """`sequence`, or 0 where what is held here is not what the worker held after that event."""
        return self.sequence if self.reason in HELD_IS_WHOLE else 0

    @property
    def fingerprint_is_due(self) -> bool:
        """Whether the worker's claim speaks of exactly what is held here now."""
        # During a reload, a part of the next event may have been applied.
        is_whole = self.state is SyncState.SYNCED and not self._is_reloading
        return is_whole and self._claim is not None and self.sequence == self._claim_sequence

    # ------------------------------------------------------------ heartbeats and time

    def on_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> None:
        self._block_tokens = max(heartbeat.block_tokens, heartbeat.engine_block_tokens)
        if not self._is_heard:
            self._is_heard = True
            if heartbeat.events_sequence and not self.sequence:
                self._need_resync(ResyncReason.JOINED)
        if self.sequence >= self._named_sequence:
            self._named_sequence = heartbeat.events_sequence if heartbeat.events_sequence > self.sequence else 0
            self._named_s = now_s
        if self._claim is None or self.sequence >= self._claim_sequence:
            self._claim, self._claim_sequence = heartbeat.held, heartbeat.held_sequence

    def on_tick(self, now_s: float) -> None:
        """Find events that were lost at the tail. Called many times a second."""
        if self._is_reloading:
            self._named_s = now_s
        elif self._named_sequence > self.sequence and now_s - self._named_s > self._settings.behind_s:
            self._named_s = now_s
            self._need_resync(ResyncReason.BEHIND)

    def extend_deadlines(self, pause_s: float, now_s: float) -> None:
        """Move all deadlines by a pause of this process."""
        self._named_s = min(now_s, self._named_s + pause_s)

    # ------------------------------------------------------------ events

    def on_events(self, message: KvEvents) -> None:
        """Take a message; what can be applied is then found by `next_events`."""
        if message.sequence <= self.sequence:
            self._counters.duplicates += 1
            return
        if self._waiting:
            self._waiting_bytes += _bytes_of(message)
        if self._waiting_bytes > WAITING_BYTES_MAX:
            # The gap that this leaves is seen after the resync, which is then repeated.
            self._waiting.clear()
            self._waiting_bytes = 0
        self._waiting.append(message)

    def next_events(self) -> KvEvents | None:
        """Return the message to apply now, which must end in `on_applied` or `on_cold`; None: there is none."""
        while self._waiting and self.state is not SyncState.RUNNING and not self._is_reloading:
            sequence = self._waiting[0].sequence
            if sequence > self.sequence + 1:
                if self.state is SyncState.SYNCED:
                    self._need_resync(ResyncReason.GAP)
                return None
            message = self._waiting.popleft()
            if not self._waiting:
                self._waiting_bytes = 0
            if sequence == self.sequence + 1:
                return message
            self._counters.duplicates += 1
        return None

    def on_applied(self, message: KvEvents, reason: ResyncReason | None) -> None:
        """Note that a message was applied; `reason`: not all of it made sense."""
        self.sequence = message.sequence
        if reason is not None:
            self._need_resync(reason)
        elif self.reason in EVENTS_END and self.sequence >= self._named_sequence:
            self._end_resync()

    def on_cold(self, rest: KvEvents) -> None:
        """Wait for a reload, which this rest of a message needs."""
        self._waiting.appendleft(rest)
        self._is_reloading = True

    def on_reloaded(self) -> None:
        self._is_reloading = False

    # ------------------------------------------------------------ resync

    def start_resync(self, now_s: float) -> bool:
        """Return whether the shadow map is to be read now; that must end in `on_pages` or `on_resync_failed`."""
        if self.state is not SyncState.NEEDED or not self._is_heard or now_s < self._resync_from_s:
            return False
        self.state = SyncState.RUNNING
        # A fingerprint that stays wrong would have a large worker read for ever.
        waits = 2 ** min(self.drifts, DRIFT_DOUBLINGS_MAX)
        self._resync_from_s = now_s + self._settings.resync_interval_s * waits
        return True

    def on_pages(self, sequence: int) -> None:
        """Note that all that was held here is replaced by the worker's map, of which this is the newest event."""
        self.sequence = sequence
        self._end_resync()

    def on_resync_failed(self) -> None:
        """Try again later, unless what came meanwhile makes up for it."""
        self.state = SyncState.NEEDED

    def on_fingerprint(self, held: Fingerprint) -> bool:
        """Compare what is held here with what the worker said; return whether it is the same."""
        if held == self._claim:
            self._claim = None
            self.agreed_sequence, self.drifts = self.sequence, 0
            return True
        # The claim stays, for what the resync brings.
        self.agreed_sequence = -1
        self.drifts += 1
        self._need_resync(ResyncReason.DRIFT)
        return False

    def on_audited(self, audited: Audited) -> bool:
        """Compare hits with what was promised of them; return whether they fall short lastingly."""
        falls_short = self.audit.note(audited.predicted_tokens, audited.cached_tokens, self._block_tokens)
        if falls_short:
            self._need_resync(ResyncReason.AUDIT)
        return falls_short

    def on_cold_lost(self) -> None:
        """Note that blocks of this worker were cold and are nowhere any more."""
        self._need_resync(ResyncReason.COLD)

    def _need_resync(self, reason: ResyncReason) -> None:
        """Demand a resync. One that is needed or running serves this reason, too, unless late events may end it."""
        if self.reason is None or (self.reason in EVENTS_END and reason not in EVENTS_END):
            self.reason = reason
            self._counters.resyncs[reason] += 1
        if self.state is SyncState.SYNCED:
            self.state = SyncState.NEEDED

    def _end_resync(self) -> None:
        self.state, self.reason = SyncState.SYNCED, None


def _bytes_of(message: KvEvents) -> int:
    """Return about what a message takes in memory."""
    runs = (event for event in message.events if not isinstance(event, BlocksCleared))
    return MESSAGE_BYTES + EVENT_BYTES * len(message.events) + sum(len(run.blocks) for run in runs)
