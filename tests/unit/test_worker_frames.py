"""Frames: one message per engine step and gateway, cut below the bus's limit, dropped when it is away."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton import subjects
from baton.bus import Delivery, MemoryBus, MemoryNetwork
from baton.engines.engine import Leg
from baton.messages.attempts import Finish, FinishReason, Frame, Frames, TokenLogprob, Usage
from baton.messages.base import ErrorReport, WorkerAddress, pack_tokens, unpack_tokens
from baton.messages.codec import encode
from baton.worker.attempt import Attempt
from baton.worker.frames import FrameSender, frame_bytes_max, split_frames
from baton.worker.kv_book import Holding

ADDRESS = WorkerAddress(worker="d0", generation=1)


class Gateway:
    def __init__(self) -> None:
        self.messages: list[Frames] = []

    async def take(self, delivery: Delivery) -> None:
        assert isinstance(delivery.message, Frames)
        self.messages.append(delivery.message)


def make_attempt(gateway: str, request: str, number: int = 0, *, tokens: Sequence[int] = ()) -> Attempt:
    return Attempt(
        key=(request, number),
        gateway=gateway,
        leg=Leg.WHOLE,
        prompt_tokens=3,
        uncached_tokens=3,
        kv=Holding(0, ()),
        lease=Holding(0, ()),
        deadline_s=1.0,
        give_up_s=1.0,
        tokens=array("I", tokens),
    )


class World:
    def __init__(self, payload_bytes_max: int = 1 << 20) -> None:
        self.network = MemoryNetwork(payload_bytes_max=payload_bytes_max)
        self.bus = MemoryBus(self.network)
        self.sender = FrameSender(self.bus, ADDRESS)
        self.gateways = {name: Gateway() for name in ("g1", "g2")}

    async def start(self) -> asyncio.Task[None]:
        for name, gateway in self.gateways.items():
            await self.bus.subscribe(subjects.gateway(name), gateway.take)
        return asyncio.create_task(self.sender.run())

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    world = World()
    running = await world.start()
    yield world
    running.cancel()
    await world.bus.close()


async def test_one_message_per_gateway_for_a_whole_step(world: World) -> None:
    async def attempt(number: int) -> None:
        world.sender.add(make_attempt("g1" if number % 2 else "g2", f"r{number}", tokens=[number]), 0)

    async with asyncio.TaskGroup() as tasks:
        for number in range(10):
            tasks.create_task(attempt(number))
    await world.settle()
    for gateway in world.gateways.values():
        [message] = gateway.messages
        assert len(message.frames) == 5
        assert (message.worker, message.generation) == ("d0", 1)


async def test_an_attempt_that_is_one_turn_of_the_loop_late_shares_the_message(world: World) -> None:
    world.sender.add(make_attempt("g1", "early", tokens=[1]), 0)
    await asyncio.sleep(0)
    world.sender.add(make_attempt("g1", "late", tokens=[2]), 0)
    await world.settle()
    [message] = world.gateways["g1"].messages
    assert [frame.request for frame in message.frames] == ["early", "late"]


async def test_output_of_one_attempt_is_joined_and_its_end_comes_last(world: World) -> None:
    attempt = make_attempt("g1", "r", 1, tokens=[1])
    world.sender.add(attempt, 0)
    attempt.tokens.extend([2, 3])
    world.sender.add(attempt, 1)
    finish = attempt.finish = Finish(reason=FinishReason.STOP, usage=attempt.usage())
    world.sender.add_whole("g1", attempt.frame(3, finish))
    await world.settle()
    [message] = world.gateways["g1"].messages
    delta, end = message.frames
    assert (delta.index, unpack_tokens(delta.tokens), delta.usage) == (0, [1, 2, 3], attempt.usage())
    assert (delta.finish, end.index, end.finish) == (None, 3, finish)


async def test_output_is_sent_once(world: World) -> None:
    attempt = make_attempt("g1", "r", tokens=[1])
    world.sender.add(attempt, 0)
    await world.settle()
    attempt.tokens.extend([2, 3])
    world.sender.add(attempt, 1)
    await world.settle()
    first, second = (message.frames[0] for message in world.gateways["g1"].messages)
    assert (first.index, unpack_tokens(first.tokens)) == (0, [1])
    assert (second.index, unpack_tokens(second.tokens), second.usage) == (1, [2, 3], None)


async def test_frames_are_dropped_while_the_bus_is_away_and_flow_again(world: World) -> None:
    world.network.reachable = False
    attempt = make_attempt("g1", "r", tokens=[1])
    world.sender.add(attempt, 0)
    await world.settle()
    assert world.sender.dropped_frames == 1
    world.network.reachable = True
    attempt.tokens.append(2)
    world.sender.add(attempt, 1)
    await world.settle()
    [message] = world.gateways["g1"].messages
    assert message.frames[0].index == 1


async def test_an_answer_longer_than_the_payload_limit_is_cut() -> None:
    world = World(payload_bytes_max=4096)
    running = await world.start()
    tokens = list(range(5000))
    world.sender.add_whole("g1", Frame(request="r", attempt=0, index=10, tokens=pack_tokens(tokens)))
    await world.settle()
    running.cancel()
    messages = world.gateways["g1"].messages
    assert len(messages) > 5
    got: list[int] = []
    for frame in (frame for message in messages for frame in message.frames):
        assert frame.index == 10 + len(got)
        got += unpack_tokens(frame.tokens)
    assert got == tokens
    assert world.sender.dropped_frames == 0
    await world.bus.close()


logprobs = st.builds(
    TokenLogprob,
    logprob=st.floats(-100, 0),
    top=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.floats(-100, 0)), max_size=20).map(tuple),
)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    tokens = draw(st.lists(st.integers(0, 2**32 - 1), max_size=200))
    with_logprobs = draw(st.booleans())
    error = ErrorReport(code="engine_failed", detail=draw(st.text(max_size=50)))
    finish = Finish(reason=FinishReason.ERROR, usage=Usage(prompt_tokens=2**31, completion_tokens=2**31), error=error)
    return Frame(
        request=draw(st.text(min_size=1, max_size=40)),
        attempt=draw(st.integers(0, 1000)),
        index=draw(st.integers(0, 2**31)),
        tokens=pack_tokens(tokens),
        logprobs=tuple(draw(st.lists(logprobs, min_size=len(tokens), max_size=len(tokens)))) if with_logprobs else (),
        finish=draw(st.none() | st.just(finish)),
        usage=draw(st.none() | st.just(finish.usage)),
    )


@given(st.lists(frames(), max_size=5), st.integers(4096, 20_000))
def test_cut_frames_fit_and_join_to_what_they_were(whole: list[Frame], room_bytes: int) -> None:
    parts = list(split_frames(whole, room_bytes))
    for part in parts:
        assert part
        message = Frames(worker="w" * 64, generation=2**40, frames=part)
        assert len(encode(message)) <= room_bytes + 512
        for frame in part:
            assert len(encode(Frames(worker="", generation=0, frames=(frame,)))) <= frame_bytes_max(frame)
    pieces = [frame for part in parts for frame in part]
    for frame in whole:
        tokens, got_logprobs = b"", ()
        while True:
            piece = pieces.pop(0)
            assert (piece.request, piece.attempt) == (frame.request, frame.attempt)
            assert piece.index == frame.index + len(tokens) // 4
            tokens += piece.tokens
            got_logprobs += piece.logprobs
            if len(tokens) == len(frame.tokens):
                break
        assert (tokens, got_logprobs, piece.finish) == (frame.tokens, frame.logprobs, frame.finish)
    assert not pieces
