"""Membership on the bus: processes that join, restart, leave and are lost, against an oracle that keeps every one."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.messages.base import WorkerAddress
from baton.messages.workers import Goodbye
from baton.node.membership import Event, Joined, Leaving, Left, Lost, Membership, Restarted, Workers
from tests.harness.heartbeats import heartbeat

LOST_AFTER_S = 1.5
FORGET_AFTER_S = 60.0


@pytest.fixture
def members() -> Membership[str]:
    return Membership(lost_after_s=LOST_AFTER_S)


def test_silence_loses_a_member_and_its_next_heartbeat_brings_the_same_generation_back(
    members: Membership[str],
) -> None:
    assert members.hear("a", 1, "first", 10.0) == [Joined("a", 1)]
    assert members.hear("a", 1, "second", 10.5) == []
    assert list(members.beats()) == ["second"]
    assert members.expire(12.0) == []
    assert members.expire(12.01) == [Lost("a", 1)]
    assert list(members.beats()) == []
    assert members.expire(13.0) == [], "it is lost once"
    assert members.hear("a", 1, "it was paused", 14.0) == [Joined("a", 1)]


def test_a_newer_generation_replaces_the_older_one_for_good(members: Membership[str]) -> None:
    members.hear("a", 1, "old", 0.0)
    assert members.hear("a", 3, "new", 0.1) == [Restarted("a", 3, 1)]
    assert members.hear("a", 1, "late", 1.5) == []
    assert members.meet("a", 2, 1.5) == []
    assert members.goodbye("a", 2, 1.5) == []
    assert list(members.beats()) == ["new"]
    assert members.expire(1.61) == [Lost("a", 3)], "late messages of older generations are no sign of this one"
    assert members.hear("a", 2, "later", 1.7) == []


def test_a_goodbye_ends_its_generation_for_good(members: Membership[str]) -> None:
    members.hear("a", 1, "", 0.0)
    assert members.goodbye("a", 1, 0.1) == [Left("a", 1)]
    assert members.goodbye("a", 1, 0.1) == [], "a duplicate"
    assert members.hear("a", 1, "was under way", 0.2) == []
    assert members.hear("a", 2, "", 0.3) == [Joined("a", 2)]
    assert members.goodbye("a", 3, 0.4) == [Left("a", 2)], "generation 3 sent no heartbeat, 2 is over, too"
    assert members.goodbye("b", 5, 0.4) == []
    assert members.hear("b", 5, "overtaken by its goodbye", 0.5) == []


def test_departed_generations_are_forgotten_after_a_while(members: Membership[str]) -> None:
    """A generation that went back, as after a set-back clock, hides a member for no longer than that."""
    members.hear("a", 9, "", 0.0)
    members.expire(2.0)
    assert members.hear("a", 3, "", 62.0) == []
    members.expire(62.1)
    assert members.hear("a", 3, "", 62.2) == [Joined("a", 3)]


def test_leaving_is_reported_once(members: Membership[str]) -> None:
    assert members.hear("a", 1, "", 0.0, leaving=True) == [Joined("a", 1), Leaving("a", 1)]
    assert members.hear("a", 1, "", 0.1, leaving=True) == []
    assert members.hear("a", 2, "", 0.2) == [Restarted("a", 2, 1)]
    assert members.hear("a", 2, "", 0.3, leaving=True) == [Leaving("a", 2)]


def test_a_generation_that_another_message_named_has_its_time_to_send_a_heartbeat(members: Membership[str]) -> None:
    assert members.meet("a", 1, 0.0) == [Joined("a", 1)]
    assert members.meet("a", 1, 1.0) == []
    assert list(members.beats()) == []
    assert members.expire(1.6) == [Lost("a", 1)], "naming it again is no heartbeat"


def test_a_pause_of_this_process_does_not_count_as_silence(members: Membership[str]) -> None:
    members.hear("a", 1, "", 0.0)
    members.extend_deadlines(60.0, 61.0)
    assert members.expire(61.5) == []
    assert members.expire(61.6) == [Lost("a", 1)]
    members.hear("b", 1, "", 61.6)
    members.extend_deadlines(10.0, 62.0)
    assert members.expire(63.6) == [Lost("b", 1)], "no deadline moves beyond a heartbeat that came just now"


def test_a_full_table_keeps_its_members_and_takes_newcomers_again_once_there_is_room() -> None:
    members = Membership[str](lost_after_s=LOST_AFTER_S, members_max=2)
    for name in "abc":
        members.hear(name, 1, "", 0.0)
    assert sorted(members) == ["a", "b"]
    assert members.hear("a", 2, "", 0.1) == [Restarted("a", 2, 1)], "a restart needs no room"
    members.goodbye("a", 2, 0.2)
    assert members.hear("c", 1, "", 0.3) == [Joined("c", 1)]


def test_a_model_is_known_for_a_while_after_its_last_worker() -> None:
    workers = Workers()
    workers.take(heartbeat("a", model="m"), 0.0)
    workers.take(heartbeat("b", model="n"), 0.0)
    workers.take(heartbeat("b", generation=2, model="o"), 0.1)
    workers.take(heartbeat("b", generation=1, model="late"), 0.1)
    assert workers.take(Goodbye(address=WorkerAddress(worker="a", generation=1)), 0.1) == [Left("a", 1)]
    workers.expire(60.0)
    assert [beat.model for model in ("m", "n", "o", "late") if (beat := workers.newest(model))] == ["m", "n", "o"]
    workers.extend_deadlines(30.0, 90.0)
    workers.expire(90.0)
    assert workers.newest("m"), "the pause was ours"
    workers.expire(90.11)
    assert not any(workers.newest(model) for model in ("m", "n", "o"))


def test_a_draining_worker_is_leaving() -> None:
    workers = Workers()
    assert workers.take(heartbeat("a", draining=True), 0.0) == [Joined("a", 1), Leaving("a", 1)]


# ---------------------------------------------------------------- against an oracle


@dataclass
class Life:
    generation: int
    heard_s: float
    leaving: bool = False
    ended: bool = False


@dataclass
class Oracle:
    """Keeps every generation and every departure for ever, and searches all of them at each question.

    It counts time in which this process could hear: a pause does not move `heard_s`.
    """

    now_s: float = 0.0
    lives: dict[str, list[Life]] = field(default_factory=dict[str, list[Life]])
    departures: list[tuple[str, int, float]] = field(default_factory=list[tuple[str, int, float]])
    """(name, lowest generation that may still come, when)."""

    def live(self) -> dict[str, tuple[int, bool]]:
        found = {name: [life for life in lives if not life.ended] for name, lives in self.lives.items()}
        assert all(len(lives) <= 1 for lives in found.values())
        return {name: (lives[0].generation, lives[0].leaving) for name, lives in found.items() if lives}

    def lowest(self, name: str) -> int:
        """Each departure keeps the memory of those before it for as long as it lasts itself."""
        lowest, until_s = 0, self.now_s
        for departed, generation, when_s in reversed(self.departures):
            if departed == name and until_s - when_s <= FORGET_AFTER_S:
                lowest, until_s = max(lowest, generation), when_s
            elif departed == name:
                break
        return lowest

    def name_life(self, name: str, generation: int, *, leaving: bool | None) -> None:
        lives = self.lives.setdefault(name, [])
        present = next((life for life in lives if not life.ended), None)
        if present is None or generation > present.generation:
            if generation < self.lowest(name):
                return
            if present is not None:
                present.ended = True
            present = Life(generation, self.now_s)
            lives.append(present)
        if generation == present.generation and leaving is not None:
            present.heard_s, present.leaving = self.now_s, leaving

    def goodbye(self, name: str, generation: int) -> None:
        present = next((life for life in self.lives.get(name, []) if not life.ended), None)
        if present is not None and generation < present.generation:
            return
        if present is not None:
            present.ended = True
        self.departures.append((name, generation + 1, self.now_s))

    def pass_time(self, duration_s: float) -> None:
        self.now_s += duration_s
        for name, lives in self.lives.items():
            for life in lives:
                if not life.ended and self.now_s - life.heard_s > LOST_AFTER_S:
                    life.ended = True
                    self.departures.append((name, life.generation, self.now_s))


NAMES = st.sampled_from("abc")
GENERATIONS = st.integers(0, 5)
"""Any order: what is late, what is new and what comes twice are all among them."""
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("hear"), NAMES, GENERATIONS, st.booleans()),
        st.tuples(st.just("meet"), NAMES, GENERATIONS),
        st.tuples(st.just("goodbye"), NAMES, GENERATIONS),
        # Quarters, which floats add up exactly. The long ones are a clock that was stepped.
        st.tuples(st.just("time"), st.sampled_from([0.25, 0.5, 1.0, 1.5, 1.75, 30.0, 60.0, 61.75])),
        st.tuples(st.just("pause"), st.sampled_from([0.5, 2.0, 100.0])),
    ),
    max_size=60,
)


class Replay:
    """The live members as they follow from the events alone."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}

    def apply(self, event: Event) -> None:
        match event:
            case Joined(member, generation):
                assert member not in self.live
                self.live[member] = generation
            case Restarted(member, generation, ended):
                assert self.live[member] == ended < generation
                self.live[member] = generation
            case Leaving(member, generation):
                assert self.live[member] == generation
            case Left(member, generation) | Lost(member, generation):
                assert self.live.pop(member) == generation


@given(STEPS)
def test_whatever_comes_in_whatever_order_the_oracle_agrees(steps: list[tuple[object, ...]]) -> None:
    members, oracle, replay = Membership[int](lost_after_s=LOST_AFTER_S), Oracle(), Replay()
    now_s = 0.0
    for step in steps:
        events: list[Event] = []
        match step:
            case ("hear", str(name), int(generation), bool(leaving)):
                events = members.hear(name, generation, generation, now_s, leaving=leaving)
                oracle.name_life(name, generation, leaving=leaving)
            case ("meet", str(name), int(generation)):
                events = members.meet(name, generation, now_s)
                oracle.name_life(name, generation, leaving=None)
            case ("goodbye", str(name), int(generation)):
                events = members.goodbye(name, generation, now_s)
                oracle.goodbye(name, generation)
            case ("time", float(duration_s)):
                now_s += duration_s
                events = members.expire(now_s)
                oracle.pass_time(duration_s)
            case (_, float(duration_s)):
                now_s += duration_s
                members.extend_deadlines(duration_s, now_s)
                events = members.expire(now_s)
            case _:
                raise AssertionError(step)
        for event in events:
            replay.apply(event)
        live = oracle.live()
        table = {name: members.get(name) for name in members}
        assert {name: (member.generation, member.leaving) for name, member in table.items() if member} == live
        assert replay.live == {name: generation for name, (generation, _) in live.items()}


@given(st.lists(st.tuples(st.integers(0, 40), GENERATIONS, st.booleans(), st.sampled_from([0.0, 0.5, 2.0]))))
def test_members_and_models_are_bounded_whatever_comes(steps: list[tuple[int, int, bool, float]]) -> None:
    workers = Workers(members_max=4)
    now_s = 0.0
    for number, generation, leaves, duration_s in steps:
        now_s += duration_s
        address = WorkerAddress(worker=f"w{number}", generation=generation)
        beat = heartbeat(address.worker, generation=generation, model=f"m{number}")
        workers.take(Goodbye(address=address) if leaves else beat, now_s)
        workers.expire(now_s)
        assert len(list(workers)) <= 4
        assert sum(workers.newest(f"m{number}") is not None for number in range(41)) <= 4


def test_of_too_many_departed_generations_the_oldest_is_forgotten_first() -> None:
    members = Membership[str](lost_after_s=LOST_AFTER_S, members_max=4)
    for name in "abcde":
        members.goodbye(name, 1, 0.0)
    events = [event for name in "abcde" for event in members.hear(name, 1, "late", 0.1)]
    assert events == [Joined("a", 1)]
