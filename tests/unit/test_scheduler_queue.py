"""The scheduler's queue, against a naive model and by its promises: order, shares, bounds, no starvation."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import islice
from random import Random

import pytest
from baton_scheduler.queue import CREDIT_S, LEVEL_S, REMEMBER_S, ROOM_SHARE, ROOM_SHARE_MIN, Entry, Key, Queue
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

AGE_S = 5.0
TENANTS = "abc"


def entry(request: str, tenant: str = "a", **changes: float) -> Entry:
    figures = {"priority": 1, "due_s": 0.0, "tokens": 100, "since_s": 0.0, "until_s": 10.0, **changes}
    return Entry(key=(request, 0), tenant=tenant, **figures)  # pyright: ignore[reportArgumentType]


def queue_of(*entries: Entry, entries_max: int = 100) -> Queue:
    queue = Queue(entries_max=entries_max, age_s=AGE_S)
    for each in entries:
        assert queue.add(each) is None
    return queue


def names(queue: Queue) -> list[str]:
    return [each.key[0] for each in queue.order()]


def drain(queue: Queue) -> list[Entry]:
    """Take everything, always what comes next."""
    taken: list[Entry] = []
    while len(queue):
        taken.append(queue.take(next(queue.order()).key))
    return taken


# ---------------------------------------------------------------- order


def test_within_a_tenant_the_earliest_deadline_comes_first() -> None:
    assert names(queue_of(entry("late", due_s=2.0), entry("soon", due_s=1.0))) == ["soon", "late"]


def test_a_lower_class_comes_first_whatever_the_deadline_and_the_shares() -> None:
    queue = queue_of(entry("new", due_s=1.0), entry("begun", "b", priority=0, due_s=9.0), entry("more", "c"))
    queue.charge("b", 10_000)
    assert names(queue)[0] == "begun"


def test_a_request_moves_up_a_class_with_time() -> None:
    queue = queue_of(entry("old", priority=2, due_s=5.0, since_s=0.0, until_s=99.0))
    for number in range(3):
        assert queue.add(entry(f"new-{number}", priority=1, due_s=6.0, since_s=4.0, until_s=99.0)) is None
    assert names(queue)[-1] == "old"
    queue.tick(AGE_S)
    assert names(queue)[0] == "old", "in the same class, its deadline is the earliest"


def test_age_moves_no_request_ahead_of_other_tenants_shares() -> None:
    queue = queue_of(*(entry(f"flood-{number}", "flood", until_s=99.0) for number in range(5)))
    queue.charge("flood", 1000)
    guest = entry("guest", "guest", since_s=50.0, due_s=51.0, until_s=99.0)
    assert queue.add(guest) is None
    queue.tick(50.0)
    assert not queue.is_behind_others("guest", 1)
    assert queue.is_behind_others("flood", 1)
    queue.charge("guest", 1)
    assert names(queue)[0] == "guest"


def test_a_tenant_that_floods_delays_another_one_by_one_request() -> None:
    queue = queue_of(*(entry(f"flood-{number:02}", "flood") for number in range(50)))
    for _ in range(20):
        queue.take(next(queue.order()).key)
    assert queue.add(entry("guest", "guest", due_s=1.0)) is None
    assert "guest" in names(queue)[:2]


def test_capacity_that_was_free_is_charged_to_no_tenant() -> None:
    queue = queue_of()
    queue.charge("a", 1_000_000)
    for number in range(3):
        assert queue.add(entry(f"a-{number}", "a", due_s=number)) is None
        assert queue.add(entry(f"b-{number}", "b", due_s=number + 0.5)) is None
    assert names(queue) == ["a-0", "b-0", "a-1", "b-1", "a-2", "b-2"]


def test_what_another_scheduler_placed_counts() -> None:
    queue = queue_of(entry("a-0", "a"), entry("a-1", "a", due_s=1.0), entry("b-0", "b", due_s=2.0))
    queue.charge("a", 100)
    assert names(queue) == ["b-0", "a-0", "a-1"]


@given(
    weights=st.tuples(*[st.sampled_from((0.5, 1.0, 2.0, 4.0))] * 3),
    tokens=st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 5000)), min_size=10, max_size=200),
)
def test_tenants_that_wait_are_given_tokens_by_their_weights_but_for_one_request(
    weights: tuple[float, float, float], tokens: list[tuple[str, int]]
) -> None:
    weight_of = dict(zip(TENANTS, weights, strict=True))
    queue = queue_of(
        *(entry(str(number), t, tokens=size, weight=weight_of[t]) for number, (t, size) in enumerate(tokens)),
        entries_max=200,
    )
    given_tokens = Counter(dict.fromkeys({tenant for tenant, _ in tokens}, 0))
    while len({each.tenant for each in queue}) == len(given_tokens):
        taken = queue.take(next(queue.order()).key)
        given_tokens[taken.tenant] += taken.tokens
        shares = [given_tokens[tenant] / weight_of[tenant] for tenant in given_tokens]
        assert max(shares) - min(shares) <= 5000 / min(weights)


@given(
    first=st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 3)), min_size=1, max_size=20),
    flood=st.randoms(use_true_random=False),
)
def test_nothing_starves_while_requests_of_all_classes_keep_coming(first: list[tuple[str, int]], flood: Random) -> None:
    """One request is taken each second, and another one comes. All that was there at the start is taken in time."""
    now_s = 0.0
    queue = Queue(entries_max=1000, age_s=AGE_S)
    for number, (tenant, priority) in enumerate(first):
        queue.add(entry(f"first-{number}", tenant, priority=priority, due_s=1.0, until_s=1e9))
    taken: set[str] = set()
    for number in range(200):
        tenant, priority = flood.choice(TENANTS), flood.randint(1, 3)
        queue.add(entry(f"{number}", tenant, priority=priority, since_s=now_s, due_s=now_s + 1.0, until_s=1e9))
        queue.tick(now_s)
        taken.add(queue.take(next(queue.order()).key).key[0])
        now_s += 1.0
    assert {f"first-{number}" for number in range(len(first))} <= taken


# ---------------------------------------------------------------- bounds


def test_a_full_queue_gives_up_a_request_of_the_tenant_that_has_the_most() -> None:
    queue = queue_of(*(entry(f"flood-{number}", "flood", due_s=number) for number in range(4)), entries_max=4)
    displaced = queue.add(entry("guest", "guest"))
    assert displaced is not None
    assert displaced.key[0] == "flood-3", "the one that is due last"
    more = entry("flood-4", "flood")
    assert queue.add(more) is more
    begun = entry("begun", "flood", priority=0, due_s=9.0)
    displaced = queue.add(begun)
    assert displaced is not None
    assert displaced.key[0] == "flood-2", "its own, of a later class"
    assert len(queue) == 4


def test_a_full_queue_gives_up_by_weight() -> None:
    heavy = [entry(f"heavy-{number}", "heavy", weight=4.0, due_s=number) for number in range(3)]
    queue = queue_of(*heavy, entry("light-0", "light"), entry("light-1", "light", due_s=1.0), entries_max=5)
    displaced = queue.add(entry("heavy-3", "heavy", weight=4.0))
    assert displaced is not None
    assert displaced.key[0] == "light-1"


def test_a_queue_of_tenants_with_one_request_each_refuses_the_next() -> None:
    queue = queue_of(*(entry(name, name) for name in "abcd"), entries_max=4)
    guest = entry("guest", "guest")
    assert queue.add(guest) is guest


def test_requests_whose_time_is_up_are_given_up() -> None:
    queue = queue_of(entry("short", until_s=1.0), entry("long", until_s=2.0))
    assert queue.tick(0.9) == []
    assert [each.key[0] for each in queue.tick(1.0)] == ["short"]
    assert names(queue) == ["long"]


def test_a_tenant_that_had_more_than_its_share_leaves_room_to_others_that_have_come_lately() -> None:
    queue = queue_of(entry("a-0", until_s=99.0), entry("a-1", until_s=99.0))
    queue.charge("a", 100)
    assert queue.room_to_leave("a") == 0, "it is alone"
    queue.charge("b", 100)
    assert queue.room_to_leave("a") == 0, "it had its share, and no more"
    queue.charge("a", 300)
    assert queue.room_to_leave("a") == pytest.approx(ROOM_SHARE * 100 / 500)
    assert queue.room_to_leave("b") == 0
    queue.charge("a", 100_000)
    assert queue.room_to_leave("a") == ROOM_SHARE_MIN
    queue.tick(9.0)
    assert queue.room_to_leave("a") == ROOM_SHARE_MIN
    queue.tick(10.1)
    assert queue.room_to_leave("a") == 0, "the other one has not come for ten seconds"


def test_a_tenant_leaves_no_room_to_one_that_waits_and_was_given_more() -> None:
    queue = queue_of(entry("a", "a", until_s=99.0), entry("b", "b", until_s=99.0, weight=10.0))
    queue.charge("away", 1, 100.0)
    queue.charge("b", 500, 10.0)
    queue.charge("a", 200)
    assert queue.room_to_leave("a") > 0
    queue.charge("b", 2000, 10.0)
    assert queue.room_to_leave("a") == 0


def test_a_tenant_that_asks_for_less_than_its_share_comes_before_one_that_floods() -> None:
    """However often nothing of it waits: the part of its share that it left within ten seconds is still its own."""
    queue = queue_of(*(entry(f"flood-{number:03}", "flood", until_s=999.0) for number in range(100)))
    for second in range(30):
        queue.tick(float(second))
        for _ in range(3):
            queue.take(next(each.key for each in queue.order() if each.tenant == "flood"))
        guests = [entry(f"guest-{second}-{number}", "guest", until_s=999.0) for number in range(2)]
        for guest in guests:
            assert queue.add(guest) is None
        assert names(queue)[:2] == [guest.key[0] for guest in guests], second
        for guest in guests:
            queue.take(guest.key)


def test_credit_is_bounded() -> None:
    """A tenant that was away for long is not given all that it left to others meanwhile."""
    queue = queue_of(*(entry(f"flood-{number:03}", "flood", until_s=999.0) for number in range(100)))
    for second in range(30):
        queue.tick(float(second))
        queue.take(next(queue.order()).key)
    for number in range(25):
        assert queue.add(entry(f"guest-{number}", "guest", until_s=999.0)) is None
    first = [name.partition("-")[0] for name in names(queue)]
    assert first.index("flood") in range(9, 13), "ten seconds of one request each"


def test_accounts_are_bounded_by_the_queue() -> None:
    queue = queue_of(entry("waits", "a"), entries_max=10)
    for number in range(1000):
        queue.charge(f"tenant-{number}", 1)
    assert queue.accounts <= 20
    assert queue.remove(("waits", 0)) is not None
    queue.tick(REMEMBER_S)
    assert queue.accounts == 0


def test_no_account_is_left_of_tenants_whose_requests_were_given_up() -> None:
    queue = queue_of(entry("waits", "a", until_s=999.0), entries_max=10)
    for number in range(1000):
        assert queue.add(entry(f"leaves-{number}", f"tenant-{number}", until_s=999.0)) is None
        assert queue.remove((f"leaves-{number}", 0)) is not None
        queue.tick(number / 30)
    assert queue.accounts <= 2


def test_shares_outlive_a_moment_without_waiting_requests() -> None:
    queue = queue_of(entry("first", "a"), entry("second", "b"))
    queue.take(("first", 0))
    queue.take(("second", 0))
    queue.charge("a", 1)
    queue.tick(1.0)
    queue.add(entry("third", "b"))
    queue.charge("a", 99)
    assert queue.room_to_leave("a") > 0, "it had more than its share, and has nothing waiting"
    assert queue.room_to_leave("b") == 0


# ---------------------------------------------------------------- the naive model


@dataclass
class NaiveQueue:
    """The rules of the queue, by search through a list."""

    now_s: float = 0.0
    entries: list[Entry] = field(default_factory=list[Entry])
    present: dict[Key, int] = field(default_factory=dict[Key, int])
    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    level: float = 0.0
    levels: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    empty_since_s: float = 0.0
    charged_s: dict[str, float] = field(default_factory=dict[str, float])

    def waits(self, tenant: str) -> bool:
        return any(each.tenant == tenant for each in self.entries)

    def account(self, tenant: str) -> float:
        before = [level for at_s, level in self.levels if at_s <= self.now_s - CREDIT_S]
        return max([self.spent[tenant], *([] if self.waits(tenant) else before)])

    def note_level(self) -> None:
        if self.entries and (not self.levels or self.now_s - self.levels[-1][0] >= LEVEL_S):
            self.levels.append((self.now_s, self.level))

    def charge(self, tenant: str, tokens: float) -> None:
        if self.entries:
            start = self.account(tenant)
            self.level = max(self.level, start)
            self.spent[tenant] = start + tokens
            self.charged_s[tenant] = self.now_s

    def add(self, new: Entry) -> None:
        self.spent[new.tenant] = self.account(new.tenant)
        self.entries.append(new)
        self.present[new.key] = new.priority

    def remove(self, key: Key) -> None:
        self.entries = [each for each in self.entries if each.key != key]
        if not self.entries:
            self.empty_since_s = self.now_s

    def forget(self) -> None:
        if not self.entries and self.now_s - self.empty_since_s >= REMEMBER_S:
            self.spent.clear()
            self.charged_s.clear()
            self.levels.clear()
            self.level = 0.0
        self.note_level()
        for tenant, charged_s in list(self.charged_s.items()):
            is_idle = not self.waits(tenant) and self.now_s - charged_s >= REMEMBER_S
            if is_idle and self.spent[tenant] <= self.level:
                del self.spent[tenant], self.charged_s[tenant]

    def order(self) -> list[Key]:
        left, spent, keys = list(self.entries), self.spent.copy(), list[Key]()
        while left:
            first = min(left, key=lambda e: (self.present[e.key], spent[e.tenant], e.due_s, e.key))
            left.remove(first)
            keys.append(first.key)
            spent[first.tenant] += first.charge
        return keys


class QueueMachine(RuleBasedStateMachine):
    """Any sequence of operations leaves both queues in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(entries_max=1000, age_s=AGE_S)
        self.naive = NaiveQueue()
        self.number = 0

    @rule(
        tenant=st.sampled_from(TENANTS),
        priority=st.integers(0, 2),
        due_s=st.integers(0, 5),
        tokens=st.integers(1, 9),
        weight=st.sampled_from((1.0, 2.0, 4.0)),
        patience_s=st.integers(1, 20),
    )
    def add(self, tenant: str, priority: int, due_s: int, tokens: int, weight: float, patience_s: int) -> None:
        now_s, self.number = self.naive.now_s, self.number + 1
        new = Entry(
            key=(f"{self.number:03}", 0),
            tenant=tenant,
            priority=priority,
            due_s=now_s + due_s,
            tokens=tokens,
            weight=weight,
            since_s=now_s,
            until_s=now_s + patience_s,
        )
        assert self.queue.add(new) is None
        self.naive.add(new)

    @precondition(lambda self: self.naive.entries)
    @rule(index=st.integers(0, 1000))
    def take(self, index: int) -> None:
        chosen = self.naive.entries[index % len(self.naive.entries)]
        assert self.queue.take(chosen.key) is chosen
        self.naive.charge(chosen.tenant, chosen.charge)
        self.naive.remove(chosen.key)

    @precondition(lambda self: self.naive.entries)
    @rule()
    def take_next(self) -> None:
        taken = self.queue.take(next(self.queue.order()).key)
        self.naive.charge(taken.tenant, taken.charge)
        self.naive.remove(taken.key)

    @precondition(lambda self: self.naive.entries)
    @rule(index=st.integers(0, 1000))
    def remove(self, index: int) -> None:
        chosen = self.naive.entries[index % len(self.naive.entries)]
        assert self.queue.remove(chosen.key) is chosen
        assert self.queue.remove(chosen.key) is None
        self.naive.remove(chosen.key)

    @rule(tenant=st.sampled_from(TENANTS), tokens=st.integers(1, 9))
    def charge(self, tenant: str, tokens: int) -> None:
        self.queue.charge(tenant, tokens)
        self.naive.charge(tenant, tokens)

    @rule(duration_s=st.integers(0, 6))
    def wait(self, duration_s: int) -> None:
        naive = self.naive
        naive.now_s += duration_s
        for each in naive.entries:
            aged = max(1, each.priority - int((naive.now_s - each.since_s) // AGE_S))
            naive.present[each.key] = min(naive.present[each.key], aged)
        naive.forget()
        over = [each for each in naive.entries if each.until_s <= naive.now_s]
        assert self.queue.tick(naive.now_s) == over
        for each in over:
            naive.remove(each.key)

    @invariant()
    def same_first_tenant(self) -> None:
        """A new request of a tenant comes first among tenants exactly if it is not behind others."""
        naive = self.naive
        for tenant in TENANTS:
            spent = naive.account(tenant)
            others = [each for each in naive.entries if each.tenant != tenant]
            before = [e for e in others if (naive.present[e.key], naive.spent[e.tenant]) < (1, spent)]
            assert self.queue.is_behind_others(tenant, 1) is bool(before)

    @invariant()
    def same_order(self) -> None:
        assert [each.key for each in self.queue.order()] == self.naive.order()
        assert len(self.queue) == len(self.naive.entries)


TestQueueAgainstTheModel = QueueMachine.TestCase
TestQueueAgainstTheModel.settings = settings(stateful_step_count=30)


@pytest.mark.parametrize("count", [1, 32])
def test_a_part_of_the_order_can_be_read_alone(count: int) -> None:
    queue = queue_of(*(entry(f"{number:02}", TENANTS[number % 3], due_s=number) for number in range(60)))
    assert list(islice(queue.order(), count)) == list(queue.order())[:count]
    assert [each.key for each in drain(queue)][:3] == [("00", 0), ("01", 0), ("02", 0)]
