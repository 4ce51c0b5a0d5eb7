"""The ledger: every rule by example, and the whole of it against a recount of its own book."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from baton.engines.engine import EngineDelta, Leg
from baton.errors import AttemptFailed, DeadlineExceeded, EngineFailed, WorkerLost
from baton.messages.attempts import AttemptState, FinishReason
from baton.messages.base import unpack_tokens
from baton.worker.attempt import IN_ENGINE, WITH_BLOCKS, WITH_SLOT, Ask, Attempt, Key, Limits, Refusal
from baton.worker.ledger import Ledger
from baton.worker.tombstones import Tombstones

LIMITS = Limits(slots=3, kv_blocks=20, engine_block_tokens=10, output_headroom_tokens_max=20)


def ask(
    request: str = "r",
    attempt: int = 0,
    *,
    leg: Leg = Leg.WHOLE,
    prompt: int = 30,
    output: int = 5,
    budget_s: float = 60.0,
    gateway: str = "g",
) -> Ask:
    return Ask(
        key=(request, attempt),
        gateway=gateway,
        leg=leg,
        prompt_tokens=prompt,
        output_tokens_max=output,
        budget_s=budget_s,
    )


def reserve(ledger: Ledger, wanted: Ask, now_s: float = 0.0) -> Attempt:
    attempt = ledger.reserve(wanted, now_s)
    assert isinstance(attempt, Attempt), attempt
    return attempt


def refused(ledger: Ledger, wanted: Ask, now_s: float = 0.0) -> str:
    refusal = ledger.reserve(wanted, now_s)
    assert isinstance(refusal, Refusal), refusal
    return refusal.reason


@pytest.mark.parametrize("leg", [Leg.WHOLE, Leg.PREFILL])
def test_a_prompt_whose_kv_exists_takes_no_room_again(leg: Leg) -> None:
    # 64 of 100 blocks, or of the 85 that prefill leases.
    ledger = Ledger(replace(LIMITS, kv_blocks=100, engine_block_tokens=16, leased_share_max=0.85))
    first, second, third = (
        replace(ask(name, prompt=1024, output=1, leg=leg), prefix=("A", "B", "C")) for name in "abc"
    )
    reserve(ledger, first)
    assert refused(ledger, second) in ("full", "leases")
    ledger.enter(first.key)
    if leg is Leg.PREFILL:
        ledger.hold(first.key)
    else:
        ledger.advance(first.key, EngineDelta(tokens=[1]), 1.0)
    # 16 blocks have no name yet, and one is for the output.
    used = ledger.room.blocks_used
    reserve(ledger, second)
    assert ledger.room.blocks_used == used + used - 3 * 16
    # The engine had only a third of what was expected, and copied the rest.
    ledger.enter(second.key)
    ledger.advance(second.key, EngineDelta(tokens=[1], cached_tokens=256), 1.0)
    if leg is Leg.PREFILL:
        ledger.hold(second.key)
    assert ledger.room.blocks_used == used + used - 16
    assert refused(ledger, third) in ("full", "leases")
    ledger.cancel(first.key, 0.0, 2.0)
    ledger.end(first.key, FinishReason.STOP, None, 2.0)
    ledger.cancel(second.key, 0.0, 2.0)
    ledger.end(second.key, FinishReason.STOP, None, 2.0)
    assert (ledger.room.blocks_used, ledger.room.leased_blocks) == (0, 0)


def test_blocks_cover_the_prompt_and_a_bounded_part_of_the_output() -> None:
    ledger = Ledger(LIMITS)
    assert reserve(ledger, ask("a", prompt=30, output=5)).kv.blocks == 4
    assert reserve(ledger, ask("b", prompt=30, output=1000)).kv.blocks == 5
    assert reserve(ledger, ask("c", prompt=30, output=1000, leg=Leg.PREFILL)).kv.blocks == 3
    assert (ledger.room.slots_used, ledger.room.blocks_used, ledger.room.leased_blocks) == (3, 12, 3)


def test_a_full_worker_says_which_limit_is_reached() -> None:
    ledger = Ledger(LIMITS)
    assert refused(ledger, ask(prompt=200)) == "full"
    reserve(ledger, ask("lease", prompt=60, leg=Leg.PREFILL))
    assert refused(ledger, ask("lease2", prompt=30, leg=Leg.PREFILL)) == "leases"
    reserve(ledger, ask("small", prompt=20, leg=Leg.PREFILL))
    reserve(ledger, ask("whole", prompt=10))
    assert refused(ledger, ask("fourth", prompt=1)) == "full"
    ledger.draining = True
    assert refused(ledger, ask("fifth", prompt=1)) == "draining"


@pytest.mark.parametrize("budget_s", [0.0, -1.0, float("nan")])
def test_an_expired_task_is_refused(budget_s: float) -> None:
    assert refused(Ledger(LIMITS), ask(budget_s=budget_s)) == "expired"


def test_a_cancel_that_overtakes_its_task_leaves_a_tombstone_beyond_the_deadline() -> None:
    ledger = Ledger(LIMITS)
    assert not ledger.cancel(("r", 1), 10.0, now_s=0.0)
    assert refused(ledger, ask("r", 1), 39.9) == "tombstone"
    assert refused(ledger, ask("r", 0), 39.9) == "tombstone"
    reserve(ledger, ask("r", 2), 39.9)
    assert ledger.room.blocks_used == 4


def test_an_attempt_that_makes_progress_outlives_its_deadline() -> None:
    ledger = Ledger(LIMITS)
    attempt = reserve(ledger, ask("r", budget_s=10))
    ledger.enter(attempt.key)
    for instant_s in (9.0, 38.0, 67.0):
        ledger.hear_gateway("g", instant_s)
        assert ledger.sweep(instant_s) == []
        ledger.advance(attempt.key, EngineDelta(tokens=[1]), instant_s)
    ledger.hear_gateway("g", 97.0)
    (stopped,) = ledger.sweep(97.0)
    assert stopped.tell_engine
    assert isinstance(attempt.stop_error, AttemptFailed)
    assert "30 s" in str(attempt.stop_error)


def test_a_step_without_a_token_is_no_progress() -> None:
    ledger = Ledger(LIMITS)
    attempt = reserve(ledger, ask("r", budget_s=4))
    ledger.enter(attempt.key)
    ledger.advance(attempt.key, EngineDelta(cached_tokens=3), 3.0)
    assert [stopped.attempt for stopped in ledger.sweep(4.0)] == [attempt]
    assert isinstance(attempt.stop_error, DeadlineExceeded)


def test_a_tombstone_outlives_the_deadline_and_the_progress_limit() -> None:
    ledger = Ledger(LIMITS)
    attempt = reserve(ledger, ask("r", 1, budget_s=10))
    ledger.enter(attempt.key)
    ledger.advance(attempt.key, EngineDelta(tokens=[1]), 4.0)
    ledger.cancel(attempt.key, 0.0, 5.0)
    ledger.end(attempt.key, FinishReason.CANCELLED, None, 5.0)
    assert refused(ledger, ask("r", 1), 63.9) == "tombstone", "a late task of an attempt that ended"
    reserve(ledger, ask("r", 1), 64.0)
    quick = reserve(ledger, ask("quick", budget_s=300), 0.0)
    ledger.enter(quick.key)
    ledger.advance(quick.key, EngineDelta(tokens=[1]), 1.0)
    ledger.end(quick.key, FinishReason.STOP, None, 1.0)
    ledger.acknowledge(quick.key, 1.0)
    assert refused(ledger, ask("quick"), 300.0) == "tombstone", "of the two, the later one counts"


def test_older_attempts_are_refused_while_a_newer_one_lives_and_after_it() -> None:
    ledger = Ledger(LIMITS)
    reserve(ledger, ask("r", 2, budget_s=10))
    assert refused(ledger, ask("r", 1)) == "tombstone"
    ledger.enter(("r", 2))
    ledger.end(("r", 2), FinishReason.STOP, None, 1.0)
    ledger.acknowledge(("r", 2), 1.0)
    assert len(ledger) == 0
    assert refused(ledger, ask("r", 2), 39.0) == "tombstone"
    reserve(ledger, ask("r", 2), 40.1)


def test_a_retry_lives_beside_the_attempt_it_replaces() -> None:
    ledger = Ledger(LIMITS)
    reserve(ledger, ask("r", 0, leg=Leg.DECODE))
    ledger.enter(("r", 0))
    reserve(ledger, ask("r", 1, leg=Leg.DECODE))
    assert ledger.room.slots_used == 2
    assert ledger.cancel(("r", 0), 10.0, 0.0), "the engine must be told"
    ledger.end(("r", 0), FinishReason.CANCELLED, None, 0.0)
    assert ledger.room.slots_used == 1


def test_decode_goes_through_its_states_and_keeps_its_tokens_until_acknowledged() -> None:
    ledger = Ledger(LIMITS)
    attempt = reserve(ledger, ask("r", leg=Leg.DECODE))
    key = attempt.key
    assert attempt.state is AttemptState.RESERVED
    assert ledger.enter(key)
    assert attempt.state is AttemptState.PULLING
    assert not ledger.enter(key), "an attempt enters the engine once"
    assert ledger.advance(key, EngineDelta(tokens=[1, 2], transferred_tokens=29, transferred_bytes=99), 0.0) == 0
    assert attempt.state is AttemptState.RUNNING
    assert ledger.advance(key, EngineDelta(tokens=[3]), 0.0) == 2
    assert ledger.end(key, FinishReason.LENGTH, None, 1.0) is attempt
    assert ledger.end(key, FinishReason.LENGTH, None, 1.0) is None, "an attempt ends once"
    assert (ledger.room.slots_used, ledger.room.blocks_used) == (0, 0)
    frame = attempt.frame(1, attempt.finish)
    assert (frame.index, unpack_tokens(frame.tokens)) == (1, [2, 3])
    assert frame.finish is not None
    assert frame.finish.usage.computed_tokens == 1
    assert ledger.digests()["g"][0].state is AttemptState.RETAINED
    assert not ledger.acknowledge(key, 2.0)
    assert len(ledger) == 0


def test_an_aggregated_attempt_is_queued_until_its_first_token() -> None:
    ledger = Ledger(LIMITS)
    attempt = reserve(ledger, ask("r"))
    assert ledger.prefill_tokens_queued == 30
    ledger.enter(attempt.key)
    assert attempt.state is AttemptState.QUEUED
    ledger.advance(attempt.key, EngineDelta(tokens=[1]), 0.0)
    assert attempt.state is AttemptState.RUNNING
    assert ledger.prefill_tokens_queued == 0


def test_a_retained_answer_is_dropped_after_its_time() -> None:
    ledger = Ledger(LIMITS)
    attempt = reserve(ledger, ask("r"))
    ledger.enter(attempt.key)
    ledger.end(attempt.key, FinishReason.STOP, None, 1.0)
    for second in range(2, 31):
        ledger.hear_gateway("g", second)
        ledger.sweep(second)
    assert len(ledger) == 1
    ledger.hear_gateway("g", 31.0)
    ledger.sweep(31.0)
    assert len(ledger) == 0


def test_retained_tokens_are_bounded_and_the_newest_stays() -> None:
    ledger = Ledger(Limits(slots=3, kv_blocks=100, engine_block_tokens=10, retained_tokens_max=10))
    for number, name in enumerate("abc"):
        attempt = reserve(ledger, ask(name))
        ledger.enter(attempt.key)
        ledger.advance(attempt.key, EngineDelta(tokens=[1] * (20 if name == "c" else 6)), 0.0)
        ledger.end(attempt.key, FinishReason.STOP, None, float(number))
    assert [attempt.key[0] for attempt in ledger] == ["c"]


def test_prefill_holds_its_blocks_but_no_slot_until_the_lease_is_gone() -> None:
    ledger = Ledger(LIMITS)
    attempt = reserve(ledger, ask("r", leg=Leg.PREFILL))
    ledger.enter(attempt.key)
    assert attempt.state is AttemptState.COMPUTING
    assert ledger.settle(frozenset({attempt.key})) == []
    assert ledger.hold(attempt.key)
    assert (ledger.room.slots_used, ledger.room.blocks_used, ledger.room.leased_blocks) == (0, 3, 3)
    assert ledger.settle(frozenset()) == [attempt]
    assert (ledger.room.blocks_used, ledger.room.leased_blocks, len(ledger)) == (0, 0, 0)


def test_a_prefill_stopped_in_its_last_step_does_not_hold() -> None:
    ledger = Ledger(LIMITS)
    attempt = reserve(ledger, ask("r", leg=Leg.PREFILL))
    ledger.enter(attempt.key)
    assert ledger.cancel(attempt.key, 1.0, 0.0)
    assert not ledger.hold(attempt.key), "the lease must go"
    assert ledger.room.blocks_used == 0


def test_cancelling_a_held_lease_tells_the_engine() -> None:
    ledger = Ledger(LIMITS)
    attempt = reserve(ledger, ask("r", leg=Leg.PREFILL))
    ledger.enter(attempt.key)
    ledger.hold(attempt.key)
    assert ledger.acknowledge(attempt.key, 0.2)
    assert (len(ledger), ledger.room.blocks_used) == (0, 0)


def test_a_cancel_before_the_engine_was_entered_frees_at_once() -> None:
    ledger = Ledger(LIMITS)
    attempt = reserve(ledger, ask("r"))
    assert not ledger.cancel(attempt.key, 5.0, 0.1)
    assert (len(ledger), ledger.room.slots_used) == (0, 0)
    assert not ledger.enter(attempt.key)


def test_an_attempt_that_does_not_enter_in_time_ends_with_an_error() -> None:
    ledger = Ledger(LIMITS)
    attempt = reserve(ledger, ask("r"))
    [stopped] = ledger.sweep(2.0)
    assert stopped.attempt is attempt
    assert not stopped.tell_engine
    assert attempt.finish is not None
    assert attempt.finish.error is not None
    assert attempt.state is AttemptState.RETAINED


def test_a_deadline_stops_the_engine_and_is_reported() -> None:
    ledger = Ledger(LIMITS)
    attempt = reserve(ledger, ask("r", budget_s=3))
    ledger.enter(attempt.key)
    assert ledger.sweep(2.9) == []
    [stopped] = ledger.sweep(3.0)
    assert stopped.tell_engine
    assert ledger.sweep(3.1) == [], "the engine is told once"
    assert ledger.advance(attempt.key, EngineDelta(tokens=[1]), 0.0) is None, "late tokens are not counted"
    ledger.end(attempt.key, FinishReason.CANCELLED, None, 3.2)
    assert attempt.finish is not None
    assert attempt.finish.error is not None
    assert attempt.finish.error.code == "deadline_exceeded"


def test_a_silent_gateway_loses_what_it_had() -> None:
    ledger = Ledger(LIMITS)
    running = reserve(ledger, ask("run"))
    ledger.enter(running.key)
    held = reserve(ledger, ask("hold", leg=Leg.PREFILL))
    ledger.enter(held.key)
    ledger.hold(held.key)
    other = reserve(ledger, ask("other", gateway="alive"))
    ledger.enter(other.key)
    ledger.hear_gateway("alive", 5.0)
    stopped = ledger.sweep(5.1)
    assert {s.attempt.key[0] for s in stopped if s.tell_engine} == {"run", "hold"}
    ledger.end(running.key, FinishReason.CANCELLED, None, 5.2)
    assert [attempt.key[0] for attempt in ledger] == ["other"]
    ledger.sweep(5.3)
    assert set(ledger.digests()) == {"alive"}


def test_an_engine_that_ignores_an_abort_is_overruled() -> None:
    ledger = Ledger(LIMITS)
    attempt = reserve(ledger, ask("r"))
    ledger.enter(attempt.key)
    ledger.stop(attempt, WorkerLost("leaving"), 0.0)
    ledger.hear_gateway("g", 9.0)
    assert ledger.sweep(9.9) == []
    [stopped] = ledger.sweep(10.0)
    assert stopped.overdue
    assert attempt.finish is not None
    assert attempt.finish.error is not None
    assert attempt.finish.error.code == EngineFailed.code
    assert ledger.room.slots_used == 0


def test_a_gateway_without_attempts_gets_an_empty_digest_while_it_beats() -> None:
    ledger = Ledger(LIMITS)
    ledger.hear_gateway("g", 0.0)
    assert ledger.digests() == {"g": ()}
    ledger.sweep(5.1)
    assert ledger.digests() == {}


def test_tombstones_are_bounded_and_the_first_to_expire_goes() -> None:
    stones = Tombstones(3)
    for number in range(5):
        stones.bury(f"r{number}", 0, until_s=100.0 - number)
    assert len(stones) == 3
    assert [stones.refuses(f"r{number}", 0) for number in range(5)] == [True, True, True, False, False]


def test_a_tombstone_lasts_as_long_as_its_latest_deadline() -> None:
    stones = Tombstones(3)
    stones.bury("r", 0, 10.0)
    stones.bury("r", 1, 5.0)
    stones.bury("r", 1, 20.0)
    stones.purge(19.0)
    assert stones.refuses("r", 1)
    stones.purge(20.0)
    assert len(stones) == 0


class LedgerMachine(RuleBasedStateMachine):
    """Random attempts. The engine's side follows the rules: it ends each attempt once."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(LIMITS)
        self.now_s = 0.0
        self.in_engine: set[Key] = set()
        self.leases: set[Key] = set()
        self.dead: dict[Key, float] = {}
        self.accepted = 0
        self.ended = 0

    def _live(self) -> set[Key]:
        return {attempt.key for attempt in self.ledger}

    def _note_gone(self, before: set[Key]) -> None:
        for key in before - self._live():
            self.ended += 1
            self.leases.discard(key)

    @rule(
        target=keys,
        request=st.sampled_from("abcd"),
        attempt=st.integers(0, 3),
        leg=st.sampled_from(list(Leg)),
        prompt=st.integers(1, 90),
        output=st.integers(1, 50),
        budget_s=st.sampled_from([0.0, 1.0, 20.0, 500.0]),
        gateway=st.sampled_from(["g1", "g2"]),
    )
    def task(
        self, request: str, attempt: int, leg: Leg, prompt: int, output: int, budget_s: float, gateway: str
    ) -> Key:
        key = (request, attempt)
        if self.ledger.get(key) is None:
            wanted = ask(request, attempt, leg=leg, prompt=prompt, output=output, budget_s=budget_s, gateway=gateway)
            got = self.ledger.reserve(wanted, self.now_s)
            if isinstance(got, Attempt):
                assert self.dead.get(key, 0.0) <= self.now_s, "an ended attempt runs again"
                self.accepted += 1
                self.dead[key] = got.deadline_s
        return key

    @rule(key=keys)
    def enter(self, key: Key) -> None:
        if self.ledger.enter(key):
            self.in_engine.add(key)

    @rule(key=keys, tokens=st.lists(st.integers(0, 9), max_size=3))
    def engine_steps(self, key: Key, tokens: list[int]) -> None:
        if key in self.in_engine:
            self.ledger.advance(key, EngineDelta(tokens=tokens), self.now_s)

    @rule(key=keys, fails=st.booleans())
    def engine_ends(self, key: Key, fails: bool) -> None:
        if key not in self.in_engine:
            return
        self.in_engine.discard(key)
        before = self._live()
        attempt = self.ledger.get(key)
        if attempt is not None and attempt.leg is Leg.PREFILL and not fails:
            if self.ledger.hold(key):
                self.leases.add(key)
        elif attempt is not None:
            error = EngineFailed("broken") if fails else None
            was_ended = attempt.finish is not None
            assert (self.ledger.end(key, FinishReason.STOP, error, self.now_s) is None) == was_ended
        self._note_gone(before)

    @rule(key=keys, budget_s=st.sampled_from([0.0, 5.0, float("inf")]))
    def cancel(self, key: Key, budget_s: float) -> None:
        before = self._live()
        self.ledger.cancel(key, budget_s, self.now_s)
        self.dead[key] = max(self.dead.get(key, 0.0), self.now_s + min(budget_s, 3600.0))
        self._note_gone(before)

    @rule(key=keys)
    def acknowledge(self, key: Key) -> None:
        before = self._live()
        self.ledger.acknowledge(key, self.now_s)
        self._note_gone(before)

    @rule(gateway=st.sampled_from(["g1", "g2"]))
    def beat(self, gateway: str) -> None:
        self.ledger.hear_gateway(gateway, self.now_s)

    @rule(step_s=st.sampled_from([0.25, 1.0, 6.0, 40.0]))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s
        before = self._live()
        for stopped in self.ledger.sweep(self.now_s):
            if stopped.overdue:
                self.in_engine.discard(stopped.attempt.key)
        self._note_gone(before)

    @rule(data=st.data())
    def leases_end(self, data: st.DataObject) -> None:
        still = frozenset(data.draw(st.sets(st.sampled_from(sorted(self.leases)))) if self.leases else ())
        before = self._live()
        self.ledger.settle(still)
        self._note_gone(before)
        assert still == {a.key for a in self.ledger if a.state is AttemptState.HELD}

    @invariant()
    def the_book_adds_up(self) -> None:
        attempts = list(self.ledger)
        assert self.ledger.room.slots_used == sum(a.state in WITH_SLOT for a in attempts) <= LIMITS.slots
        assert (
            self.ledger.room.blocks_used
            == sum(a.kv.blocks for a in attempts if a.state in WITH_BLOCKS)
            <= LIMITS.kv_blocks
        )
        leased = sum(a.kv.blocks for a in attempts if a.state in WITH_BLOCKS and a.leg is Leg.PREFILL)
        assert self.ledger.room.leased_blocks == leased <= LIMITS.kv_blocks * LIMITS.leased_share_max
        assert self.accepted == self.ended + len(attempts)

    @invariant()
    def what_the_ledger_frees_the_engine_has_let_go(self) -> None:
        in_engine = {a.key for a in self.ledger if a.state in IN_ENGINE}
        assert in_engine == self.in_engine

    def teardown(self) -> None:
        for _ in range(3):
            self.time_passes(3600.0)
            for key in list(self.in_engine):
                self.engine_ends(key, True)
            self.ledger.settle(frozenset())
        assert len(self.ledger) == 0
        assert (self.ledger.room.slots_used, self.ledger.room.blocks_used, self.ledger.room.leased_blocks) == (0, 0, 0)
        assert self.ledger.digests() == {}


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(stateful_step_count=40)
