"""The table of live workers, and the queue in front of them."""

from __future__ import annotations

import asyncio
from random import Random

import msgspec
import pytest
from baton_gateway.admission import RETRY_MAX_S, TRIES_MAX, AdmissionQueue, Ticket
from baton_gateway.driver import cut
from baton_gateway.workers import WorkerTable, has_room
from hypothesis import given
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.errors import InvalidRequest, ModelNotFound
from baton.messages.base import WorkerAddress
from baton.messages.workers import Heartbeat, Role

BEAT = Heartbeat(
    address=WorkerAddress(worker="d1", generation=1),
    role=Role.DECODE,
    model="m",
    model_path="somewhere",
    model_digest="digest",
    engine="test",
    block_tokens=32,
    context_tokens_max=1000,
    running_max=4,
    kv_blocks_total=10,
    engine_block_tokens=32,
    prefill_tokens_per_s=1.0,
    decode_tokens_per_s=1.0,
    transfer_bytes_per_s=1.0,
    kv_bytes_per_token=1,
)


def beat(worker: str = "d1", generation: int = 1, **fields: object) -> Heartbeat:
    address = WorkerAddress(worker=worker, generation=generation)
    return msgspec.structs.replace(BEAT, address=address, **fields)


def test_a_model_stays_known_for_a_minute_after_its_last_worker() -> None:
    table = WorkerTable(1.5)
    with pytest.raises(ModelNotFound):
        table.model("m")
    table.members.take(beat(), 10.0)
    assert table.model("m").path == "somewhere"
    assert table.counts() == {("decode", "m"): 1}
    table.members.expire(11.51)
    assert table.models() == []
    assert not table.counts()
    table.members.expire(70.0)
    assert table.model("m").path == "somewhere"
    table.members.expire(70.01)
    with pytest.raises(ModelNotFound):
        table.model("m")


def test_parameters_are_refused_where_no_decode_worker_takes_all_of_them() -> None:
    table = WorkerTable(1.5)
    table.members.take(beat("d1", parameters=("a", "b")), 0.0)
    table.members.take(beat("d2", parameters=("c",)), 0.0)
    table.members.take(beat("p1", role=Role.PREFILL, parameters=("p",)), 0.0)
    table.members.take(beat("other", model="other", parameters=("o",)), 0.0)
    for taken in ([], ["a"], ["b", "a"], ["c"]):
        table.check_parameters("m", taken)
    for names, named in ((["p"], "p"), (["o"], "o"), (["a", "b", "x"], "x"), (["x" * 1_000_000], "x" * 64)):
        with pytest.raises(InvalidRequest) as refusal:
            table.check_parameters("m", names)
        assert refusal.value.param == named
    with pytest.raises(InvalidRequest):
        table.check_parameters("m", ["a", "c"])


def test_only_decode_workers_that_stay_serve_a_model() -> None:
    table = WorkerTable(1.5)
    table.members.take(beat("p1", role=Role.PREFILL), 0.0)
    table.members.take(beat("d1", draining=True), 0.0)
    assert table.models() == []
    assert table.model("m").context_tokens_max == 1000, "it waits for a worker that stays"
    table.members.take(beat("d2", context_tokens_max=500), 0.0)
    table.members.take(beat("d3", context_tokens_max=800), 0.0)
    assert table.model("m").context_tokens_max == 500
    assert [model.name for model in table.models()] == ["m"]


def test_room() -> None:
    assert has_room(beat(running=1, waiting=2))
    assert not has_room(beat(running=3, waiting=1))
    assert not has_room(beat(draining=True))


class Line:
    """A queue at work on a clock that tests move."""

    def __init__(self, waiting_max: int = 10) -> None:
        self.clock = ManualClock()
        self.queue = AdmissionQueue(waiting_max=waiting_max, clock=self.clock, random=Random(1))
        self.turns: list[str] = []

    def ticket(self, name: str, model: str = "m") -> Ticket:
        return Ticket(model, lambda: self.turns.append(name))


async def test_new_requests_try_at_once_while_not_too_many_do() -> None:
    line = Line()
    tickets = [line.ticket(str(number)) for number in range(TRIES_MAX + 1)]
    assert [line.queue.enter(ticket) for ticket in tickets] == [True] * TRIES_MAX + [False]
    async with asyncio.TaskGroup() as group:
        running = group.create_task(line.queue.run())
        assert line.queue.join(tickets[-1])
        await line.clock.advance(1.0)
        assert line.turns == []
        assert line.queue.waiting() == {"m": 1}
        line.queue.leave(tickets[5], accepted=True)
        await line.clock.advance(0.0)
        assert line.turns == [str(TRIES_MAX)]
        running.cancel()
    for ticket in tickets:
        line.queue.leave(ticket)
    assert line.queue.waiting() == {}


async def test_when_workers_are_full_turns_come_in_order_and_only_to_the_head() -> None:
    line = Line()
    first, second, third = line.ticket("first"), line.ticket("second"), line.ticket("third")
    async with asyncio.TaskGroup() as group:
        running = group.create_task(line.queue.run())
        assert line.queue.enter(first)
        assert line.queue.join(first), "its try was in vain"
        assert not line.queue.enter(second)
        assert line.queue.join(second)
        await line.clock.advance(1.0)
        assert line.turns == ["first"], "one try at a time"
        line.queue.join(first)
        await line.clock.advance(RETRY_MAX_S)
        assert line.turns == ["first", "first"], "a head that failed keeps its place"
        line.queue.leave(first)
        await line.clock.advance(0.0)
        assert line.turns == ["first", "first", "second"]
        assert not line.queue.enter(third), "one that left says nothing of room"
        line.queue.leave(second)
        assert line.queue.waiting() == {}
        assert line.queue.enter(third)
        running.cancel()


async def test_with_each_that_is_accepted_one_more_tries_until_one_fails() -> None:
    line = Line(waiting_max=100)
    tickets = [line.ticket(str(number)) for number in range(20)]
    async with asyncio.TaskGroup() as group:
        running = group.create_task(line.queue.run())
        assert line.queue.enter(tickets[0])
        for ticket in tickets:
            line.queue.join(ticket)
        await line.clock.advance(RETRY_MAX_S)
        assert line.turns == ["0"]
        # The first three have left the queue before, as their tries took long.
        for first, tried, expected in ((0, 1, 3), (1, 3, 7), (3, 7, 15)):
            for ticket in tickets[first:tried]:
                if first < 3:
                    line.queue.leave(ticket)
                line.queue.leave(ticket, accepted=True)
            await line.clock.advance(0.0)
            assert line.turns == [str(number) for number in range(expected)], "in order"
        line.queue.join(tickets[9])
        await line.clock.advance(1.0)
        assert line.turns[15:] == [], "the first of them still tries"
        for ticket in tickets[7:9]:
            line.queue.leave(ticket)
        await line.clock.advance(0.0)
        assert line.turns[15:] == ["9"], "the one that failed keeps its place"
        running.cancel()


async def test_a_heartbeat_with_room_gives_the_turn_at_once() -> None:
    line = Line()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(line.queue.run())
        line.queue.join(line.ticket("a"))
        line.queue.join(line.ticket("b", "other"))
        await line.clock.advance(0.001)
        assert line.turns == []
        line.queue.note_room("m")
        await line.clock.advance(0.0)
        assert line.turns == ["a"]
        running.cancel()


async def test_the_queue_is_bounded_per_model() -> None:
    line = Line(waiting_max=1)
    first = line.ticket("first")
    assert line.queue.join(first)
    assert line.queue.join(first), "it waits already"
    second = line.ticket("second")
    assert not line.queue.enter(second)
    assert not line.queue.join(second)
    assert line.queue.join(line.ticket("other", "another model"))
    none = Line(waiting_max=0)
    ticket = none.ticket("x")
    assert none.queue.enter(ticket)
    assert not none.queue.join(ticket)
    none.queue.leave(ticket)
    assert none.queue.waiting() == {}


@given(st.binary(max_size=400).map(lambda raw: raw[: len(raw) // 4 * 4]), st.integers(-5, 100))
def test_prompts_are_cut_below_the_payload_limit(tokens: bytes, room_bytes: int) -> None:
    pieces = cut(tokens, room_bytes)
    assert b"".join(pieces) == tokens
    assert all(len(piece) <= max(4, room_bytes) and len(piece) % 4 == 0 for piece in pieces)
    assert len({len(piece) for piece in pieces[:-1]}) <= 1, "offsets are multiples of the first piece's length"
