"""Attempts that wait for room: what a waiting attempt holds, and that pairs never block each other."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton.bus import MemoryBus, MemoryNetwork
from baton.clock import ManualClock
from baton.engines.engine import Leg
from baton.engines.scripted import ScriptedEngine
from baton.errors import Overloaded
from baton.messages.attempts import AttemptState, FinishReason
from baton.messages.base import WorkerAddress
from baton.worker.attempt import WITH_BLOCKS, Ask, Attempt, Key, Limits, Refusal
from baton.worker.ledger import JOIN_PAUSE_S, JOIN_TIMEOUT_S, Ledger
from baton.worker.waiting import WaitingAttempts

LIMITS = Limits(slots=2, kv_blocks=10, engine_block_tokens=10, leased_share_max=1.0, waiting_max=4)


def ask(request: str, *, leg: Leg = Leg.WHOLE, prompt: int = 20, wait_s: float = 1.0, partner: str = "") -> Ask:
    return Ask(
        key=(request, 0),
        gateway="g",
        leg=leg,
        prompt_tokens=prompt,
        output_tokens_max=1,
        budget_s=60.0,
        wait_s=wait_s,
        partner=partner,
    )


def reserve(ledger: Ledger, wanted: Ask, now_s: float = 0.0) -> Attempt:
    attempt = ledger.reserve(wanted, now_s)
    assert isinstance(attempt, Attempt), attempt
    return attempt


def refused(ledger: Ledger, wanted: Ask) -> str:
    refusal = ledger.reserve(wanted, 0.0)
    assert isinstance(refusal, Refusal), refusal
    return refusal.detail


def full(*waiting: Ask) -> Ledger:
    """Return a worker whose slots are taken, and on which these attempts wait."""
    ledger = Ledger(LIMITS)
    for number in range(LIMITS.slots):
        reserve(ledger, ask(f"runs-{number}", wait_s=0.0))
        ledger.enter((f"runs-{number}", 0))
    for each in waiting:
        reserve(ledger, each)
    return ledger


def end(ledger: Ledger, request: str) -> None:
    assert ledger.end((request, 0), FinishReason.STOP, None, 0.0)


def begun(ledger: Ledger, now_s: float = 0.0) -> list[str]:
    return [attempt.key[0] for attempt in ledger.begin(now_s)]


def state(ledger: Ledger, request: str) -> AttemptState:
    attempt = ledger.get((request, 0))
    assert attempt is not None
    return attempt.state


# ---------------------------------------------------------------- one worker


def test_a_waiting_attempt_holds_nothing_and_is_reported() -> None:
    ledger = full(ask("waits", prompt=30))
    assert (ledger.room.slots_used, ledger.room.blocks_used) == (2, 6)
    assert state(ledger, "waits") is AttemptState.WAITING
    assert ledger.prefill_tokens_queued == 20 + 20 + 30
    assert [entry.state for entry in ledger.digests()["g"] if entry.request == "waits"] == ["waiting"]


def test_without_leave_to_wait_a_full_worker_refuses() -> None:
    assert "run slots" in refused(full(), ask("r", wait_s=0.0))
    assert "run slots" in refused(full(), ask("r", wait_s=float("nan")))


def test_waiting_attempts_begin_in_order_as_room_appears() -> None:
    ledger = full(ask("first"), ask("second"), ask("third"))
    assert begun(ledger) == []
    end(ledger, "runs-0")
    assert begun(ledger) == ["first"]
    assert (state(ledger, "first"), ledger.room.slots_used) == (AttemptState.RESERVED, 2)
    assert ledger.enter(("first", 0))
    end(ledger, "runs-1")
    assert begun(ledger) == ["second"]


async def test_an_attempt_begins_as_soon_as_another_ends() -> None:
    ledger, clock, engine = full(ask("waits")), ManualClock(), ScriptedEngine()
    await engine.start()
    bus = MemoryBus(MemoryNetwork(clock=clock))
    waiting = WaitingAttempts(
        bus=bus, clock=clock, engine=engine, ledger=ledger, address=WorkerAddress(worker="w", generation=1)
    )
    attempt, begun = ledger.get(("waits", 0)), asyncio.Event()
    assert attempt is not None
    running = asyncio.create_task(waiting.run())
    waiting.add(attempt, begun.set)
    await clock.settle()
    assert not begun.is_set()
    end(ledger, "runs-0")
    waiting.look()
    await clock.settle()
    assert begun.is_set(), "no time has passed"
    running.cancel()
    await bus.close()


def test_a_small_attempt_does_not_overtake_a_large_one() -> None:
    ledger = full(ask("large", prompt=80), ask("small", prompt=5))
    end(ledger, "runs-0")
    assert begun(ledger) == []
    end(ledger, "runs-1")
    assert begun(ledger) == ["large", "small"]


def test_too_many_waiting_attempts_are_refused() -> None:
    ledger = full(*(ask(f"waits-{number}") for number in range(4)))
    assert "4 attempts wait" in refused(ledger, ask("fifth"))


def test_an_attempt_that_can_never_fit_is_refused_at_once() -> None:
    assert "11 KV blocks" in refused(full(), ask("huge", prompt=109))


@pytest.mark.parametrize(("wait_s", "ends_s"), [(1.0, 1.0), (1e9, LIMITS.wait_s_max)])
def test_waiting_has_its_own_time_limit_and_ends_as_overloaded(wait_s: float, ends_s: float) -> None:
    ledger = full(ask("waits", wait_s=wait_s))
    assert ledger.sweep(ends_s - 0.01) == []
    ledger.hear_gateway("g", ends_s)
    (stopped,) = ledger.sweep(ends_s)
    assert stopped.attempt.key == ("waits", 0)
    assert not stopped.tell_engine
    assert isinstance(stopped.attempt.stop_error, Overloaded)
    assert stopped.attempt.finish is not None
    assert ledger.room.slots_used == 2


def test_a_waiting_attempt_can_be_cancelled() -> None:
    ledger = full(ask("waits"))
    assert not ledger.cancel(("waits", 0), 10.0, 0.0)
    assert ledger.get(("waits", 0)) is None
    assert begun(ledger) == []


# ---------------------------------------------------------------- pairs


def test_a_leg_enters_the_engine_only_once_its_partner_is_reserved() -> None:
    ledger = full(ask("pair", leg=Leg.DECODE, partner="p1"))
    end(ledger, "runs-0")
    assert begun(ledger) == ["pair"]
    assert not ledger.enter(("pair", 0)), "the partner has not answered"
    assert ledger.joined(("pair", 0), 0.1)
    assert not ledger.joined(("pair", 0), 0.1), "once"
    assert ledger.enter(("pair", 0))


def test_a_leg_whose_partner_has_no_room_holds_nothing_and_lets_others_go_first() -> None:
    ledger = full(ask("pair", leg=Leg.DECODE, partner="p1"), ask("whole"))
    end(ledger, "runs-0")
    assert begun(ledger) == ["pair"]
    ledger.fall_back(("pair", 0), 1.0)
    assert (state(ledger, "pair"), ledger.room.slots_used) == (AttemptState.WAITING, 1)
    assert begun(ledger, 1.0) == ["whole"]
    end(ledger, "runs-1")
    assert begun(ledger, 1.0 + JOIN_PAUSE_S) == ["pair"]


def test_a_partner_that_does_not_answer_counts_as_without_room() -> None:
    ledger = full(ask("pair", leg=Leg.DECODE, partner="p1"))
    end(ledger, "runs-0")
    assert begun(ledger) == ["pair"]
    ledger.sweep(JOIN_TIMEOUT_S)
    assert state(ledger, "pair") is AttemptState.WAITING
    assert not ledger.joined(("pair", 0), JOIN_TIMEOUT_S), "too late"


def test_a_worker_joins_where_it_has_room() -> None:
    ledger = full(ask("pair", leg=Leg.DECODE, partner="p1"))
    assert ledger.join(("pair", 0), 0.0) is None
    end(ledger, "runs-0")
    assert ledger.join(("unknown", 0), 0.0) is None
    joined = ledger.join(("pair", 0), 0.0)
    assert joined is not None
    assert ledger.enter(joined.key)
    assert ledger.join(("pair", 0), 0.0) is joined, "asked again, as its answer was lost"
    assert not ledger.enter(joined.key)


def test_both_workers_may_ask_each_other_at_once() -> None:
    workers = [full(ask("pair", leg=leg, partner="other")) for leg in (Leg.DECODE, Leg.PREFILL)]
    for ledger in workers:
        end(ledger, "runs-0")
        assert begun(ledger) == ["pair"]
    for ledger in workers:
        assert ledger.join(("pair", 0), 0.0)
        assert ledger.enter(("pair", 0))
        assert not ledger.joined(("pair", 0), 0.0)


# ---------------------------------------------------------------- 10,000 schedules

LOSS = 0.1
GIVEN_UP_S = 20.0
"""Time after which a leg whose partner is gone gives up, as a pull does."""


@dataclass
class Schedule:
    """Workers whose messages arrive late, in any order, or never; `loss` is the share that never arrives."""

    random: random.Random
    loss: float
    now_s: float = 0.0
    ledgers: dict[str, Ledger] = field(default_factory=dict[str, Ledger])
    legs: dict[Key, dict[str, Leg]] = field(default_factory=dict[Key, dict[str, Leg]])
    """Attempt → worker → its leg there."""
    sent: list[tuple[str, str, str, Key]] = field(default_factory=list[tuple[str, str, str, Key]])
    """Messages under way: kind, sender, receiver, attempt."""
    entered: dict[tuple[str, Key], float] = field(default_factory=dict[tuple[str, Key], float])

    def send(self, kind: str, sender: str, receiver: str, key: Key) -> None:
        if self.random.random() >= self.loss:
            self.sent.append((kind, sender, receiver, key))

    def new_request(self, number: int) -> None:
        """Send both tasks of a pair, or one of an aggregated attempt."""
        key = (f"r{number}", 0)
        decode = self.random.choice(["d0", "d1"])
        if self.random.random() < 0.2:
            self.legs[key] = {decode: Leg.WHOLE}
        else:
            self.legs[key] = {self.random.choice(["p0", "p1"]): Leg.PREFILL, decode: Leg.DECODE}
        for worker in self.legs[key]:
            self.send("task", "gateway", worker, key)

    def partner(self, worker: str, key: Key) -> str:
        return next((other for other in self.legs[key] if other != worker), "")

    def enter(self, worker: str, key: Key) -> None:
        if self.ledgers[worker].enter(key):
            self.entered[worker, key] = self.now_s

    def deliver(self) -> None:
        kind, sender, worker, key = self.sent.pop(self.random.randrange(len(self.sent)))
        ledger = self.ledgers[worker]
        match kind:
            case "task":
                tokens = 10 * self.random.randint(1, 9)
                leg, partner = self.legs[key][worker], self.partner(worker, key)
                wanted = ask(key[0], leg=leg, prompt=tokens, wait_s=1e9, partner=partner)
                ledger.reserve(wanted, self.now_s)
            case "join":
                if ledger.join(key, self.now_s):
                    self.enter(worker, key)
                    self.send("joined", worker, sender, key)
                else:
                    self.send("refused", worker, sender, key)
            case "joined":
                if ledger.joined(key, self.now_s):
                    self.enter(worker, key)
            case _:
                ledger.fall_back(key, self.now_s)

    def begin(self) -> None:
        worker = self.random.choice(list(self.ledgers))
        for attempt in self.ledgers[worker].begin(self.now_s):
            if attempt.partner:
                self.send("join", worker, attempt.partner, attempt.key)
            else:
                self.enter(worker, attempt.key)

    def finish(self) -> None:
        """End one attempt that runs on all its workers, or one leg that waited too long for the other."""
        running = list(self.entered.items())
        self.random.shuffle(running)
        for (worker, key), since_s in running:
            whole = all((each, key) in self.entered for each in self.legs[key])
            if whole or self.now_s - since_s > GIVEN_UP_S:
                for each in list(self.legs[key]) if whole else [worker]:
                    del self.entered[each, key]
                    self.ledgers[each].end(key, FinishReason.STOP, None, self.now_s)
                    self.ledgers[each].acknowledge(key, self.now_s)
                return

    def step(self) -> None:
        self.now_s += self.random.choice([0.0, 0.001, 0.02, 0.2 if self.loss else 0.0])
        acts = [self.begin, self.finish, *([self.deliver] * 3 if self.sent else [])]
        self.random.choice(acts)()

    def holds(self, worker: str, key: Key) -> bool:
        attempt = self.ledgers[worker].get(key)
        return attempt is not None and attempt.state in WITH_BLOCKS

    def waits(self, worker: str, key: Key) -> bool:
        attempt = self.ledgers[worker].get(key)
        return attempt is not None and attempt.state is AttemptState.WAITING

    def half_reserved(self) -> Iterator[Key]:
        """Yield the pairs that one worker holds room for while the other one waits, with no message under way."""
        asked = {key for kind, _, _, key in self.sent if kind != "task"}
        for key, legs in self.legs.items():
            if key not in asked and any(self.holds(w, key) for w in legs) and any(self.waits(w, key) for w in legs):
                yield key

    def check_bounds(self) -> None:
        for ledger in self.ledgers.values():
            assert ledger.room.slots_used <= LIMITS.slots
            assert ledger.room.blocks_used <= LIMITS.kv_blocks


def play(seed: int, loss: float, wait_s_max: float) -> Schedule:
    limits = Limits(
        slots=2,
        kv_blocks=10,
        engine_block_tokens=10,
        leased_share_max=1.0,
        wait_s_max=wait_s_max,
        lost_after_s=1e9,
        enter_timeout_s=1e9,
    )
    schedule = Schedule(random.Random(seed), loss)
    schedule.ledgers = {name: Ledger(limits) for name in ("p0", "p1", "d0", "d1")}
    for number in range(8):
        schedule.new_request(number)
        for _ in range(schedule.random.randint(0, 6)):
            schedule.step()
            schedule.check_bounds()
            assert loss or not list(schedule.half_reserved())
    for _ in range(5000):
        if not any(len(ledger) for ledger in schedule.ledgers.values()) and not schedule.sent:
            break
        schedule.step()
        schedule.check_bounds()
        assert loss or not list(schedule.half_reserved())
        if loss and schedule.random.random() < 0.2:
            for ledger in schedule.ledgers.values():
                ledger.sweep(schedule.now_s)
    return schedule


def check_all_ended(schedule: Schedule) -> None:
    for name, ledger in schedule.ledgers.items():
        left = [(attempt.key, attempt.state) for attempt in ledger if attempt.state is not AttemptState.RETAINED]
        assert not left, name
        assert (ledger.room.slots_used, ledger.room.blocks_used, ledger.room.leased_blocks) == (0, 0, 0), name


def schedules(counts: range) -> list[Any]:
    """Return the seeds of each test: a tenth of the schedules daily, the rest nightly."""
    parts = [range(start, start + counts.step) for start in counts]
    return [parts[0], *(pytest.param(part, marks=pytest.mark.nightly) for part in parts[1:])]


@pytest.mark.parametrize("seeds", schedules(range(0, 8000, 800)), ids=str)
def test_no_schedule_of_pairs_deadlocks_or_holds_half_a_pair(seeds: range) -> None:
    """Waiting has no time limit here: every attempt runs, whatever the order of messages."""
    for seed in seeds:
        schedule = play(seed, loss=0.0, wait_s_max=1e9)
        check_all_ended(schedule)


@pytest.mark.parametrize("seeds", schedules(range(0, 2000, 200)), ids=str)
def test_lost_messages_delay_pairs_and_block_nothing(seeds: range) -> None:
    for seed in seeds:
        check_all_ended(play(seed, loss=LOSS, wait_s_max=3.0))
