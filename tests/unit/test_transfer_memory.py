"""Tests of in-memory agents on a clock that the test moves: tests that are impossible with other implementations."""

from __future__ import annotations

import ctypes

from baton.transfer import AgentOptions, Cause, EventKind, Pool, TransferEvent, lease_key
from baton.transfer.memory import MemoryAgent, MemoryFabric

LAYERS, BLOCKS, BLOCK_TOKENS, BLOCK_BYTES = 3, 8, 4, 64
KEY = lease_key("request", 0)
TOKENS = 3 * BLOCK_TOKENS
SOURCE_BLOCKS, SINK_BLOCKS = [0, 2, 4], [7, 5, 3]


class Node:
    """An agent and its memory, filled with its own byte."""

    def __init__(self, agent: MemoryAgent, byte: int) -> None:
        self.agent = agent
        self.byte = byte
        self.memory = ctypes.create_string_buffer(bytes([byte]) * (LAYERS * BLOCKS * BLOCK_BYTES))
        start = ctypes.addressof(self.memory)
        agent.set_pool(
            Pool(
                layer_addresses=tuple(start + layer * BLOCKS * BLOCK_BYTES for layer in range(LAYERS)),
                blocks=BLOCKS,
                block_bytes=BLOCK_BYTES,
                block_stride_bytes=BLOCK_BYTES,
                block_tokens=BLOCK_TOKENS,
                fingerprint="model",
            )
        )

    def holds(self, byte: int) -> int:
        """Return how many blocks of `SINK_BLOCKS` hold nothing but this byte, over all layers."""
        places = [(layer * BLOCKS + block) * BLOCK_BYTES for layer in range(LAYERS) for block in SINK_BLOCKS]
        return sum(self.memory.raw[at : at + BLOCK_BYTES] == bytes([byte]) * BLOCK_BYTES for at in places)


class World:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.fabric = MemoryFabric(now_s=lambda: self.now_s, threaded=False)
        self.source, self.sink = (Node(self.fabric.agent(), byte) for byte in (1, 2))
        self.generation = self.source.agent.open_lease(KEY)
        self.source.agent.extend_lease(KEY, self.generation, SOURCE_BLOCKS)

    def pull(self) -> None:
        self.sink.agent.pull(
            KEY, self.source.agent.endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=60.0
        )

    def post(self, layer: int) -> None:
        self.source.agent.post_ready(KEY, self.generation, layer, TOKENS)

    def pass_time(self, duration_s: float) -> None:
        for _ in range(round(duration_s / 0.25)):
            self.now_s += 0.25
            self.fabric.step()

    def cut(self, *, apart: bool = True) -> None:
        self.fabric.cut(self.sink.agent.endpoint, self.source.agent.endpoint, apart=apart)


def test_nothing_moves_but_in_a_step() -> None:
    world = World()
    world.pull()
    world.post(-1)
    assert (world.sink.agent.poll(), world.sink.holds(1)) == ([], 0)
    world.fabric.step()
    *progress, done = world.sink.agent.poll()
    assert [event.layers for event in progress] == [1, 2, 3]
    assert (done.kind, done.backend, world.sink.holds(1)) == (EventKind.PULL_DONE, "memory", LAYERS * 3)
    assert [event.kind for event in world.source.agent.poll()] == [EventKind.LEASE_RELEASED]


def test_deadlines_are_those_of_the_clock_that_was_passed_in() -> None:
    world = World()
    unclaimed_s = AgentOptions().unclaimed_ttl_s
    world.pass_time(unclaimed_s - 0.25)
    assert world.source.agent.poll() == []
    world.pass_time(0.25)
    (ended,) = world.source.agent.poll()
    assert (ended.kind, ended.cause) == (EventKind.LEASE_ENDED, Cause.EXPIRED)


def test_equal_calls_give_equal_events() -> None:
    def run() -> list[TransferEvent]:
        world = World()
        world.pull()
        for layer in range(LAYERS):
            world.post(layer)
            world.pass_time(0.5)
            if layer == 1:
                world.cut()
                world.cut(apart=False)
        return [*world.sink.agent.poll(), *world.source.agent.poll()]

    first = run()
    assert [event.kind for event in first][-2:] == [EventKind.PULL_DONE, EventKind.LEASE_RELEASED]
    assert first == run()


def test_agents_that_are_separated_do_not_reach_each_other() -> None:
    world = World()
    world.cut()
    world.pull()
    world.post(-1)
    world.pass_time(AgentOptions().connect_timeout_s)
    (failed,) = world.sink.agent.poll()
    assert (failed.kind, failed.cause, world.sink.holds(1)) == (EventKind.PULL_FAILED, Cause.UNREACHABLE, 0)


def test_a_pull_goes_on_once_its_agents_are_joined_again() -> None:
    world = World()
    world.pull()
    world.post(0)
    world.fabric.step()
    assert world.sink.holds(1) == 3
    world.cut()
    world.post(-1)
    world.pass_time(0.5)
    assert world.sink.holds(1) == 3, "nothing comes through a cut"
    world.cut(apart=False)
    world.pass_time(0.5)
    assert [event.kind for event in world.sink.agent.poll()][-1] == EventKind.PULL_DONE
    assert world.sink.holds(1) == LAYERS * 3


def test_a_cut_separates_only_the_two() -> None:
    world = World()
    third = Node(world.fabric.agent(), 3)
    world.fabric.cut(third.agent.endpoint, world.source.agent.endpoint)
    world.pull()
    world.post(-1)
    world.fabric.step()
    assert world.sink.holds(1) == LAYERS * 3


def test_a_closed_agent_ends_what_it_had_and_tells_the_others() -> None:
    world = World()
    world.pull()
    world.fabric.step()
    world.source.agent.close()
    (ended,) = world.source.agent.poll()
    assert (ended.kind, ended.cause) == (EventKind.LEASE_ENDED, Cause.CANCELLED)
    (failed,) = world.sink.agent.poll()
    assert (failed.kind, failed.cause, world.sink.agent.ends) == (EventKind.PULL_FAILED, Cause.CANCELLED, {})
    world.pull()
    world.sink.agent.close()
    assert [event.cause for event in world.sink.agent.poll()] == [Cause.CANCELLED]
