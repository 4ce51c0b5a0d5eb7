"""Directory of one KV pool: which slot holds which block. Pure: it moves no bytes and knows no engine.

A slot holds one engine block of all layers. Its key is the chained block id at the engine block's end
(`baton.pool.chain`), so a key stands for the whole prefix up to there.

    FREE ──reserve──▶ FILLING ──filled──▶ READY ──evicted by reserve──▶ FREE
                         └──abandon──▶ FREE     └─ pin: not evicted until every reader has unpinned it

A prefix is usable only without gaps, hence:

- `match` counts leading keys that are READY.
- A key is stored only while its predecessor is (FILLING or READY), and never at the cost of its own predecessors: of a
  prompt larger than the pool, the first blocks are kept.
- A use counts for the whole prefix, its last block first, so that a prefix outlasts what follows it. An eviction that
  still strands stored successors is counted: they are of no use until their predecessor is stored again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from baton.pool.policy import EvictionPolicy


class SlotState(Enum):
    FREE = auto()
    FILLING = auto()
    READY = auto()


@dataclass(slots=True)
class _Entry:
    slot: int
    parent: bytes | None
    ready: bool = False
    pins: int = 0


@dataclass(slots=True, kw_only=True)
class PoolCounts:
    """Events since the start, in slots."""

    stored: int = 0
    evicted: int = 0
    hits: int = 0
    """Slots that were pinned for a reader."""
    dropped: int = 0
    """Blocks that were not stored: nothing could be evicted, or their predecessor is not stored."""
    stranded: int = 0
    """Evictions of blocks whose successors were still stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChanges:
    """Keys that are READY now and were not at the last report, and the reverse."""

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class PoolDirectory:
    def __init__(self, slots: int, policy: EvictionPolicy[bytes]) -> None:
        self.slots = slots
        self.counts = PoolCounts()
        self._policy = policy
        """Holds the READY keys."""
        self._entries: dict[bytes, _Entry] = {}
        self._children: dict[bytes, int] = {}
        """Number of stored successors by key, whether that is stored or not."""
        self._free = list(range(slots - 1, -1, -1))
        self._pinned = 0
        self._ready = 0
        self._changed: dict[bytes, bool] = {}
        """Whether a key is READY now, for keys for which that has changed since `take_changes`."""

    @property
    def ready(self) -> int:
        return self._ready

    @property
    def pinned(self) -> int:
        """Slots with at least one reader."""
        return self._pinned

    @property
    def filling(self) -> int:
        return len(self._entries) - self._ready

    def state(self, key: bytes) -> SlotState:
        entry = self._entries.get(key)
        if entry is None:
            return SlotState.FREE
        return SlotState.READY if entry.ready else SlotState.FILLING

    # Readers.

    def match(self, chain: Sequence[bytes]) -> int:
        """Return how many leading keys of a chain can be read now."""
        for number, key in enumerate(chain):
            entry = self._entries.get(key)
            if entry is None or not entry.ready:
                return number
        return len(chain)

    def pin(self, chain: Sequence[bytes], first: int, end: int) -> tuple[int, ...]:
        """Return the slots of `chain[first:end]`, all READY, which stay until `unpin`.

        The whole prefix counts as used, as far as it is stored, its last block first.
        """
        self.touch(chain[:end])
        slots = self.hold(chain[first:end])
        self.counts.hits += len(slots)
        return slots

    def hold(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """Return the slots of READY keys, which stay until `unpin`, without counting this as a use."""
        for key in keys:
            entry = self._entries[key]
            self._pinned += entry.pins == 0
            entry.pins += 1
        return tuple(self._entries[key].slot for key in keys)

    def touch(self, chain: Sequence[bytes]) -> None:
        """Count a use of a prefix, as far as it is stored, its last block first."""
        for key in reversed(chain):
            if self.state(key) is SlotState.READY:
                self._policy.touch(key)

    def unpin(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            entry = self._entries[key]
            assert entry.pins > 0, "unpinned more often than pinned"
            entry.pins -= 1
            self._pinned -= entry.pins == 0

    # Writers.

    def reserve(self, chain: Sequence[bytes], first: int) -> tuple[tuple[int, int], ...]:
        """Return (index, slot) for each key of `chain[first:]` that is now FILLING and has to be written.

        Keys that are stored are left out. `chain` begins at the start of the prompt.
        """
        reserved: list[tuple[int, int]] = []
        protected, evictable = frozenset[bytes](), -1
        for index in range(first, len(chain)):
            key = chain[index]
            if key in self._entries:
                continue
            parent = chain[index - 1] if index else None
            if parent is not None and parent not in self._entries:
                break
            if not self._free:
                if evictable < 0:
                    protected = frozenset(chain)
                    evictable = self._ready - self._pinned - sum(map(self._is_evictable, protected))
                if evictable == 0:
                    break
                evictable -= 1
                self._evict(protected)
            slot = self._free.pop()
            self._entries[key] = _Entry(slot, parent)
            if parent is not None:
                self._children[parent] = self._children.get(parent, 0) + 1
            reserved.append((index, slot))
        else:
            return tuple(reserved)
        self.counts.dropped += sum(key not in self._entries for key in chain[index:])
        return tuple(reserved)

    def filled(self, keys: Sequence[bytes]) -> None:
        """Note that the slots of these FILLING keys are written. Of a chain, the last key is inserted first."""
        for key in reversed(keys):
            entry = self._entries[key]
            assert not entry.ready, "filled twice"
            entry.ready = True
            self._ready += 1
            self._policy.insert(key)
            self._note_change(key, ready=True)
        self.counts.stored += len(keys)

    def abandon(self, keys: Sequence[bytes]) -> None:
        """Free the slots of FILLING keys that will not be written, and that nothing writes any more."""
        for key in keys:
            assert not self._entries[key].ready, "abandoned what is READY"
            self._forget(key)

    def drop(self, key: bytes) -> None:
        """Free the slot of a READY key that nothing reads, for another reason than room."""
        assert self._is_evictable(key), "dropped what is in use"
        self._policy.remove(key)
        self._note_change(key, ready=False)
        self._ready -= 1
        self._forget(key)

    def restore(self, placed: Iterable[tuple[int, bytes, bytes]]) -> None:
        """Make (slot, key, parent) READY in an empty directory; `parent` is empty at the start of a prompt."""
        assert not self._entries, "restored into a directory in use"
        for slot, key, parent in placed:
            self._entries[key] = _Entry(slot, parent or None, ready=True)
            if parent:
                self._children[parent] = self._children.get(parent, 0) + 1
            self._policy.insert(key)
            self._note_change(key, ready=True)
        self._ready = len(self._entries)
        taken = {entry.slot for entry in self._entries.values()}
        self._free = [slot for slot in self._free if slot not in taken]

    def take_changes(self) -> PoolChanges:
        """Return what has changed since the last call."""
        changed, self._changed = self._changed, {}
        return PoolChanges(
            stored=tuple(key for key, ready in changed.items() if ready),
            removed=tuple(key for key, ready in changed.items() if not ready),
        )

    # Inside.

    def _is_evictable(self, key: bytes) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.ready and not entry.pins

    def _evict(self, protected: frozenset[bytes]) -> None:
        """Free one slot that is neither pinned nor `protected`; there is one."""
        victim = self._policy.evict(lambda key: key in protected or self._entries[key].pins > 0)
        assert victim is not None, "the policy lost a key"
        self.counts.stranded += victim in self._children
        self.counts.evicted += 1
        self._note_change(victim, ready=False)
        self._ready -= 1
        self._forget(victim)

    def _note_change(self, key: bytes, *, ready: bool) -> None:
        if self._changed.get(key, ready) is not ready:
            del self._changed[key]
        else:
            self._changed[key] = ready

    def _forget(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._free.append(entry.slot)
        if entry.parent is not None:
            self._children[entry.parent] -= 1
            if not self._children[entry.parent]:
                del self._children[entry.parent]
