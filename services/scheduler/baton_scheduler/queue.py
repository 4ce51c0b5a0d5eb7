"""The order in which held requests are judged: priority classes, fair shares of tenants, earliest deadline. Pure.

    class 0 ──▶ tenant furthest behind ──▶ its request that is due first          class 1 ──▶ …          class 2 ──▶ …

A lower class comes first. A request moves up one class each `age_s`, as far as the class of new requests: none starves,
and none overtakes other tenants' shares by waiting. Within a class, the tenant that was given the fewest tokens for its
weight comes next, and within a tenant the request with the earliest deadline. The order is a preference: what it names
first may be unable to start anywhere while later requests can, so any entry may be taken.

Tenants share by deficits, kept as virtual time: an account per tenant counts the tokens that were placed for it,
divided by its weight. Two tenants with waiting requests differ by at most one request, as in deficit round robin,
without a quantum to choose. The level is the account charged last. A tenant that had nothing waiting joins with what it
has left of its share within `CREDIT_S`, at the level of that long ago: one that asks for less than its share comes
before one that floods, however often its queue is empty.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from math import exp, inf
from typing import Final

from baton.messages.placement import PRIORITY_NEW

REMEMBER_S: Final = 10.0
"""Time for which a tenant without waiting requests is remembered, and all of them once nothing waits."""
CREDIT_S: Final = 10.0
"""Time for which a tenant may claim what it left of its share: long enough that a flood gains nothing by pauses of
the others, short enough that a tenant that was away takes no more than that."""
LEVEL_S: Final = 0.5
"""Interval at which the level is noted."""
ROOM_SHARE: Final = 0.5
"""Largest share of the workers, and of their token intervals, that tenants leave to others."""
ROOM_SHARE_MIN: Final = 0.01
"""Smallest one, for others that were given nothing of late: one worker of a hundred."""


@dataclass(frozen=True, slots=True)
class Recent:
    """What a tenant was given of late."""

    tokens: float
    """They fade within `REMEMBER_S`."""
    weight: float


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
    model: str = ""
    tokens: int
    """Prompt and output."""
    weight: float = 1.0
    """Share of its tenant, relative to those of others."""
    since_s: float
    until_s: float
    """Instant at which it is given up."""

    @property
    def charge(self) -> float:
        """Virtual time that its tenant is charged."""
        return self.tokens / self.weight


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
        self._weights: dict[str, float] = {}
        """Weights of the tenants with entries."""
        self._spent: dict[str, float] = {}
        """Accounts, in virtual time."""
        self._charged_s: dict[str, float] = {}
        """Instants at which accounts were charged last, as of `tick`."""
        self._now_s = 0.0
        self._level = 0.0
        """Account of the tenant charged last, before that charge."""
        self._levels: deque[tuple[float, float]] = deque()
        """Levels and their instants, the oldest one `CREDIT_S` ago or more if there is such a one."""
        self._recent: dict[str, Recent] = {}
        """What tenants with accounts were given of late."""
        self._empty_since_s = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def accounts(self) -> int:
        return len(self._spent)

    def get(self, key: Key) -> Entry | None:
        return self._entries.get(key)

    def room_to_leave(self, tenant: str) -> float:
        """Return the share to leave to others, of the workers and of their time, when a request of a tenant is placed.

        It follows the others' part of the tokens of late, and is 0 unless the tenant floods: it had more than its share
        by weight, and no tenant that waits, too, was given less. What is refused at once does not wait, and counts.
        """
        if not self._had_more_than_its_share(tenant):
            return 0.0
        others = [spent for other, spent in self._spent.items() if other != tenant and self._counts[other]]
        if others and min(others) >= self._spent[tenant]:
            return 0.0
        total = sum(recent.tokens for recent in self._recent.values())
        return max(ROOM_SHARE_MIN, ROOM_SHARE * (1 - self._recent[tenant].tokens / total))

    def _had_more_than_its_share(self, tenant: str) -> bool:
        if tenant not in self._recent:
            return False
        mine, all_ = self._recent[tenant], self._recent.values()
        return mine.tokens * sum(each.weight for each in all_) > mine.weight * sum(each.tokens for each in all_)

    def add(self, entry: Entry) -> Entry | None:
        """Add a new entry. In a full queue, one of the tenant with the most for its weight goes, and is returned."""
        assert entry.key not in self._entries, "an entry is added twice"
        displaced: Entry | None = None
        if len(self._entries) >= self._entries_max:
            displaced = self._to_displace(entry)
            if displaced is entry:
                return entry
            self.remove(displaced.key)
        if not self._counts[entry.tenant]:
            self._spent[entry.tenant] = self._account(entry.tenant)
        self._entries[entry.key] = entry
        self._counts[entry.tenant] += 1
        self._weights[entry.tenant] = entry.weight
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
            del self._counts[entry.tenant], self._weights[entry.tenant]
        if not self._entries:
            self._empty_since_s = self._now_s
        return entry

    def take(self, key: Key) -> Entry:
        """Remove an entry that is placed, and charge its tenant."""
        entry = self._entries[key]
        self.charge(entry.tenant, entry.tokens, entry.weight)
        self.remove(key)
        return entry

    def charge(self, tenant: str, tokens: int, weight: float = 1.0) -> None:
        """Count a placement of this tenant that was not in the queue, also one by another scheduler."""
        if not self._entries or (tenant not in self._spent and len(self._spent) >= 2 * self._entries_max):
            return
        spent = self._account(tenant)
        self._level = max(self._level, spent)
        self._spent[tenant] = spent + tokens / weight
        before = self._recent.get(tenant)
        self._recent[tenant] = Recent(tokens + (before.tokens if before else 0.0), weight)
        self._charged_s[tenant] = self._now_s

    def is_behind_others(self, tenant: str, priority: int) -> bool:
        """Return whether a new request of this tenant would come after one of another tenant."""
        spent = self._account(tenant)
        return any(
            present < priority or self._spent[other] < spent
            for present, lanes in self._order.items()
            if present <= priority
            for other in lanes
            if other != tenant
        )

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
                spent[tenant] += entry.charge
                if (following := next(lanes[tenant], None)) is None:
                    heappop(heads)
                else:
                    heapreplace(heads, (spent[tenant], *following, tenant))

    def tick(self, now_s: float) -> list[Entry]:
        """Move old entries up, and remove and return those whose time is up; call it many times a second."""
        for entry in self:
            present = self._classes[entry.key]
            aged = max(PRIORITY_NEW, entry.priority - int((now_s - entry.since_s) / self._age_s))
            if aged < present:
                self._unlink(entry)
                self._insert(entry, aged)
        kept = exp((self._now_s - now_s) / REMEMBER_S)
        self._recent = {tenant: Recent(each.tokens * kept, each.weight) for tenant, each in self._recent.items()}
        self._now_s = now_s
        if not self._entries and now_s - self._empty_since_s >= REMEMBER_S:
            # Shares are those of one time of overload.
            for accounts in (self._spent, self._charged_s, self._recent, self._levels):
                accounts.clear()
            self._level = 0.0
        self._note_level()
        for tenant in [tenant for tenant, spent in self._spent.items() if spent <= self._level]:
            # Of a tenant that was given nothing there is nothing to remember: its requests were given up or withdrawn.
            if not self._counts[tenant] and now_s - self._charged_s.get(tenant, -inf) >= REMEMBER_S:
                del self._spent[tenant]
                self._charged_s.pop(tenant, None)
                self._recent.pop(tenant, None)
        over = [entry for entry in self if entry.until_s <= now_s]
        for entry in over:
            self.remove(entry.key)
        return over

    def _account(self, tenant: str) -> float:
        """Return a tenant's account; one that has nothing waiting joins with the credit of `CREDIT_S`."""
        spent = self._spent.get(tenant, 0.0)
        if self._counts[tenant] or not self._levels or self._levels[0][0] > self._now_s - CREDIT_S:
            return spent
        return max(spent, self._levels[0][1])

    def _note_level(self) -> None:
        if self._entries and (not self._levels or self._now_s - self._levels[-1][0] >= LEVEL_S):
            self._levels.append((self._now_s, self._level))
        while len(self._levels) > 1 and self._levels[1][0] <= self._now_s - CREDIT_S:
            self._levels.popleft()

    def _to_displace(self, entry: Entry) -> Entry:
        """Return the entry to give up for a new one, or the new one itself."""
        counts, weights = self._counts, self._weights
        tenant = max(counts, key=lambda name: (counts[name] / weights[name], name))
        last_class = max(each for each, lanes in self._order.items() if tenant in lanes)
        last = self._entries[self._order[last_class][tenant][-1][1]]
        has_fewer = (counts[entry.tenant] + 1) / entry.weight < counts[tenant] / weights[tenant]
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
