"""The order in which held requests are judged: priority classes, fair shares of tenants, earliest deadline. Pure.

    class 0 ──▶ tenant furthest behind ──▶ its request that is due first          class 1 ──▶ …          class 2 ──▶ …

A lower class comes first. A request moves up one class each `age_s`, so no class starves. Within a class, the tenant
that was given the fewest tokens comes next, and within a tenant the request with the earliest deadline. The order is a
preference: what it names first may be unable to start anywhere while later requests can, so any entry may be taken.

Tenants share by deficits, kept as virtual time: an account per tenant counts the tokens that were placed for it. A
tenant that had nothing waiting joins at the level of the account charged last, without credit for the time before.
Two tenants with waiting requests differ by at most one request, as in deficit round robin, without a quantum to choose.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

Key = tuple[str, int]
"""(request, attempt)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A request that waits for a placement. Times are instants of the scheduler's clock."""

    key: Key
    tenant: str
    priority: int
    """Class at the start; 0 comes first."""
    due_s: float
    """Instant by which it must be placed to meet its objective, as predicted."""
    tokens: int
    """Prompt and output, as charged to its tenant."""
    since_s: float
    until_s: float
    """Instant at which it is given up."""


class Queue:
    """Waiting requests, at most `entries_max`."""

    def __init__(self, *, entries_max: int, age_s: float) -> None:
        self._entries_max = entries_max
        self._age_s = age_s
        self._entries: dict[Key, Entry] = {}
        self._classes: dict[Key, int] = {}
        """Present class of each entry."""
        self._order: dict[int, dict[str, list[tuple[float, Key]]]] = {}
        """Class → tenant → its entries by deadline. Nothing in it is empty."""
        self._counts = Counter[str]()
        """Entries by tenant."""
        self._spent: dict[str, float] = {}
        """Accounts, in tokens of virtual time."""
        self._level = 0.0
        """Account of the tenant charged last, before that charge."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def accounts(self) -> int:
        return len(self._spent)

    def get(self, key: Key) -> Entry | None:
        return self._entries.get(key)

    def add(self, entry: Entry) -> Entry | None:
        """Add a new entry. In a full queue, one of the tenant with the most entries has to go, and is returned."""
        assert entry.key not in self._entries, "an entry is added twice"
        displaced: Entry | None = None
        if len(self._entries) >= self._entries_max:
            displaced = self._to_displace(entry)
            if displaced is entry:
                return entry
            self.remove(displaced.key)
        if not self._counts[entry.tenant]:
            self._spent[entry.tenant] = max(self._spent.get(entry.tenant, 0.0), self._level)
        self._entries[entry.key] = entry
        self._counts[entry.tenant] += 1
        self._insert(entry, entry.priority)
        return displaced

    def remove(self, key: Key) -> Entry | None:
        """Remove an entry that is not placed, if it is there."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self._unlink(entry)
        self._counts[entry.tenant] -= 1
        if not self._counts[entry.tenant]:
            del self._counts[entry.tenant]
        if not self._entries:
            # Shares are those of one time of overload; no tenant is charged for capacity that was free.
            self._spent.clear()
            self._level = 0.0
        return entry

    def take(self, key: Key) -> Entry:
        """Remove an entry that is placed, and charge its tenant."""
        entry = self._entries[key]
        self.charge(entry.tenant, entry.tokens)
        self.remove(key)
        return entry

    def charge(self, tenant: str, tokens: int) -> None:
        """Count a placement of this tenant, also one by another scheduler."""
        if not self._entries or (tenant not in self._spent and len(self._spent) >= 2 * self._entries_max):
            return
        floor = 0.0 if self._counts[tenant] else self._level
        spent = max(self._spent.get(tenant, 0.0), floor)
        self._level = max(self._level, spent)
        self._spent[tenant] = spent + tokens

    def order(self) -> Iterator[Entry]:
        """Yield all entries in order, as if each were taken in turn. The queue must not change meanwhile."""
        spent = dict(self._spent)
        for present in sorted(self._order):
            lanes = {tenant: iter(lane) for tenant, lane in self._order[present].items()}
            # Ties go to the earlier deadline; keys are unique, so nothing after them is compared.
            heads = [(spent[tenant], *next(lane), tenant) for tenant, lane in lanes.items()]
            heapify(heads)
            while heads:
                _, _, key, tenant = heads[0]
                entry = self._entries[key]
                yield entry
                spent[tenant] += entry.tokens
                if (following := next(lanes[tenant], None)) is None:
                    heappop(heads)
                else:
                    heapreplace(heads, (spent[tenant], *following, tenant))

    def tick(self, now_s: float) -> list[Entry]:
        """Move old entries up, and remove and return those whose time is up; call it several times a second."""
        for entry in self:
            present = self._classes[entry.key]
            aged = max(0, entry.priority - int((now_s - entry.since_s) / self._age_s))
            if aged < present:
                self._unlink(entry)
                self._insert(entry, aged)
        for tenant in [tenant for tenant, spent in self._spent.items() if spent <= self._level]:
            if not self._counts[tenant]:
                del self._spent[tenant]
        over = [entry for entry in self if entry.until_s <= now_s]
        for entry in over:
            self.remove(entry.key)
        return over

    def _to_displace(self, entry: Entry) -> Entry:
        """Return the entry to give up for a new one, or the new one itself."""
        counts = self._counts
        tenant = max(counts, key=lambda name: (counts[name], name))
        last_class = max(each for each, lanes in self._order.items() if tenant in lanes)
        last = self._entries[self._order[last_class][tenant][-1][1]]
        has_fewer = counts[entry.tenant] + 1 < counts[tenant]
        is_first = entry.tenant == tenant and entry.priority < last_class
        return last if has_fewer or is_first else entry

    def _insert(self, entry: Entry, present: int) -> None:
        self._classes[entry.key] = present
        insort(self._order.setdefault(present, {}).setdefault(entry.tenant, []), (entry.due_s, entry.key))

    def _unlink(self, entry: Entry) -> None:
        present = self._classes.pop(entry.key)
        lanes = self._order[present]
        lane = lanes[entry.tenant]
        del lane[bisect_left(lane, (entry.due_s, entry.key))]
        if not lane:
            del lanes[entry.tenant]
            if not lanes:
                del self._order[present]
