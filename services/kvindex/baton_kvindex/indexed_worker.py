"""One generation of one worker as the index follows it: a pure state machine.

    SYNCED ───── a reason ─────▶ NEEDED ──── due ────▶ RUNNING
      ▲  ▲                        │   ▲                 │   │
      │  └─ late events came: ────┘   └───── failed ────┘   │
      │     joined, behind                                  │
      └──────────────────────── pages ──────────────────────┘

    SYNCED   all events that arrived are applied
    NEEDED   something is missing or wrong, so a resync is needed: the worker's shadow map must be read. Events are
             still applied
    RUNNING  the map is being read. Events wait and are applied on top of it

Events are applied in order, each once: an older sequence is dropped, one too far ahead waits for a resync. An event
that needs cold blocks waits for their reload, in any state, and all later events wait behind it.
Storing and removing are idempotent, and the last event on a block wins. So the map may be read while the worker
changes: all events after its first page's sequence are applied again.
A heartbeat names the newest event that was sent; if that does not arrive within `behind_s`, it is lost. A heartbeat
also carries a fingerprint of all that the worker holds after one of its events, which is compared once exactly that
event is applied.
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
"""Most doublings of the back-off between resyncs of one worker while fingerprints keep differing."""
WAITING_BYTES_MAX: Final = 16 << 20
"""Most memory of one worker's waiting events, overhead included."""
MESSAGE_BYTES, EVENT_BYTES = 400, 150

HELD_IS_WHOLE: Final = frozenset({None, ResyncReason.JOINED, ResyncReason.BEHIND, ResyncReason.GAP})
"""Resync reasons for which the blocks held here are still those of the worker after `sequence`."""
EVENTS_END: Final = frozenset({ResyncReason.JOINED, ResyncReason.BEHIND})
"""Resync reasons that end without a resync once the missing events arrive."""


class SyncState(enum.StrEnum):
    SYNCED = "synced"
    NEEDED = "needed"
    RUNNING = "running"


class IndexedWorker:
    """State of one generation; `sequence` is its newest event that is applied or part of a resync."""

    def __init__(self, name: str, state: WorkerState, settings: IndexSettings, counters: Counters) -> None:
        self.name = name
        self.generation = state.generation
        self.model_digest = state.model_digest
        self.sequence = state.sequence
        self.state = SyncState.SYNCED
        self.reason: ResyncReason | None = None
        """Reason of the resync that is needed or running."""
        self.agreed_sequence = -1
        """Newest event after which the fingerprints agreed; -1: never yet, or not since they differed."""
        self.drifts = 0
        """Fingerprints that differed since they last agreed."""
        self.audit = Audit()
        self._settings = settings
        self._counters = counters
        self._is_heard = False
        self._resync_from_s = 0.0
        """Earliest start of the next resync."""
        self._named_sequence = 0
        """Outstanding event that a heartbeat named at `_named_s`; 0: none."""
        self._named_s = 0.0
        self._claim: tuple[Fingerprint, ...] | None = None
        """Fingerprints of all tiers that a heartbeat claims for event `_claim_sequence`, until compared."""
        self._claim_sequence = 0
        self._block_tokens = 0
        """Tokens of an engine block or a canonical block, whichever is larger."""
        self._waiting = deque[KvEvents]()
        self._waiting_bytes = 0
        self._is_reloading = False

    # ------------------------------------------------------------ state

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(worker=self.name, generation=self.generation)

    @property
    def is_settled(self) -> bool:
        """Whether no resync is awaited: a worker without a heartbeat cannot be resynced and counts as settled."""
        return self.state is SyncState.SYNCED or not self._is_heard

    @property
    def sound_sequence(self) -> int:
        """`sequence`, or 0 if the blocks held here are not those that the worker held after it."""
        return self.sequence if self.reason in HELD_IS_WHOLE else 0

    @property
    def fingerprint_is_due(self) -> bool:
        """Whether the claimed fingerprint is for exactly the events that are applied now."""
        # During a reload, part of the next event may be applied already.
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
            self._claim = heartbeat.fingerprints
            self._claim_sequence = heartbeat.held_sequence

    def on_tick(self, now_s: float) -> None:
        """Detect that the newest events are lost. Called many times a second."""
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
        """Queue a message; `next_events` then returns what can be applied."""
        if message.sequence <= self.sequence:
            self._counters.duplicates += 1
            return
        if self._waiting:
            self._waiting_bytes += _bytes_of(message)
        if self._waiting_bytes > WAITING_BYTES_MAX:
            # After the resync, the gap that this leaves causes another one.
            self._waiting.clear()
            self._waiting_bytes = 0
        self._waiting.append(message)

    def next_events(self) -> KvEvents | None:
        """Return the message to apply now, or None. Each message must end in `on_applied` or `on_cold`."""
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
        """Note that a message was applied; `reason` is set if part of it was invalid."""
        self.sequence = message.sequence
        if reason is not None:
            self._need_resync(reason)
        elif self.reason in EVENTS_END and self.sequence >= self._named_sequence:
            self._end_resync()

    def on_cold(self, rest: KvEvents) -> None:
        """Wait for the reload that the rest of a message needs."""
        self._waiting.appendleft(rest)
        self._is_reloading = True

    def on_reloaded(self) -> None:
        self._is_reloading = False

    # ------------------------------------------------------------ resync

    def start_resync(self, now_s: float) -> bool:
        """Return whether to read the shadow map now; the read must end in `on_pages` or `on_resync_failed`."""
        if self.state is not SyncState.NEEDED or not self._is_heard or now_s < self._resync_from_s:
            return False
        self.state = SyncState.RUNNING
        # Without back-off, a fingerprint that stays wrong would resync a large worker for ever.
        waits = 2 ** min(self.drifts, DRIFT_DOUBLINGS_MAX)
        self._resync_from_s = now_s + self._settings.resync_interval_s * waits
        return True

    def on_pages(self, sequence: int) -> None:
        """Note that the shadow map has replaced all that was held here; `sequence` is its newest event."""
        self.sequence = sequence
        self._end_resync()

    def on_resync_failed(self) -> None:
        """Retry later, unless the missing events arrive meanwhile."""
        self.state = SyncState.NEEDED

    def on_fingerprint(self, held: tuple[Fingerprint, ...]) -> bool:
        """Compare the fingerprints of all tiers, as held here, with the worker's; return whether they agree."""
        if held == self._claim:
            self._claim = None
            self.agreed_sequence, self.drifts = self.sequence, 0
            return True
        # The claim stays, to be compared after the resync.
        self.agreed_sequence = -1
        self.drifts += 1
        self._need_resync(ResyncReason.DRIFT)
        return False

    def on_audited(self, audited: Audited) -> bool:
        """Compare hits with predictions; return whether they fall lastingly short."""
        falls_short = self.audit.note(audited.predicted_tokens, audited.cached_tokens, self._block_tokens)
        if falls_short:
            self._need_resync(ResyncReason.AUDIT)
        return falls_short

    def on_cold_lost(self) -> None:
        """Note that cold blocks of this worker are lost."""
        self._need_resync(ResyncReason.COLD)

    def _need_resync(self, reason: ResyncReason) -> None:
        """Request a resync. One that is needed or running serves this reason too, unless late events may end it."""
        if self.reason is None or (self.reason in EVENTS_END and reason not in EVENTS_END):
            self.reason = reason
            self._counters.resyncs[reason] += 1
        if self.state is SyncState.SYNCED:
            self.state = SyncState.NEEDED

    def _end_resync(self) -> None:
        self.state, self.reason = SyncState.SYNCED, None


def _bytes_of(message: KvEvents) -> int:
    """Return the approximate memory of a message."""
    runs = (event for event in message.events if not isinstance(event, BlocksCleared))
    return MESSAGE_BYTES + EVENT_BYTES * len(message.events) + sum(len(run.blocks) for run in runs)
