"""Random schedules against the transfer agent's real state machine, on a simulated wire, as simulators drive it.

native/tests/model searches for errors of the state machine; these tests show that events and actions pass the binding
unchanged.

Whatever the order of deliveries, revocations (with the blocks overwritten at once), cancels, cut
connections and expired timers: a pull that reports success holds the right KV; nothing writes a
pull's blocks after its end was reported; every pull and every lease ends once; nothing is left.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from baton_native import core
from transfer_world import BLOCK_TOKENS, GARBAGE, LAYERS, TERMINAL, World

LEASE_BLOCKS = 7
TOKENS = LEASE_BLOCKS * BLOCK_TOKENS
BACKENDS = ["direct", "shm", "tcp"]
STEPS = 250
PLACES = 3
"""Requests at a time; each has its own blocks on both sides."""


@dataclass
class Request:
    """One attempt with the state of both sides."""

    key: bytes
    source_blocks: list[int]
    sink_blocks: list[int]
    generation: int = 0
    """0 if, to the knowledge of the source's owner, it is not open."""
    ready_blocks: list[int] = field(default_factory=lambda: [0] * LAYERS)
    opened: bool = False
    revoked: bool = False
    pulled: bool = False


def make_options(streams: int = 1) -> core.Options:
    options = core.Options()
    options.striped = BACKENDS
    options.streams = streams
    options.lane_bytes = 1
    options.secret = "shared"
    return options


class Schedule:
    """A run of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        streams = 1 if seed % 2 else 3
        self.world = World([make_options(), make_options(streams)], backend=self.random.choice(BACKENDS))
        self.source, self.sink = self.world.nodes
        self.corrupts = self.random.random() < 0.1
        self.source.step(core.SetFaults(core.Faults(self.random.choice([0.0, 0.0, 0.05]), 9 if self.corrupts else 0)))
        self.preempts = self.random.choice([4, 4, 30])
        self.attempts = 0
        self.requests = [self.new_request(place) for place in range(PLACES)]
        self.opened: Counter[bytes] = Counter()
        self.pulled: Counter[bytes] = Counter()

    def new_request(self, place: int) -> Request:
        self.attempts += 1
        key = self.attempts.to_bytes(16, "little")
        at = place * 10
        return Request(key, list(range(at, at + LEASE_BLOCKS)), list(range(at + LEASE_BLOCKS, at, -1)))

    # Prefill.

    def open(self, request: Request) -> None:
        if request.generation or (request.opened and not request.revoked):
            return
        ended = sum(report.key == request.key for report in self.source.reports)
        self.source.step(core.OpenLease(request.key))
        # Opening a revoked lease goes on with it, unless it has ended in the meantime.
        self.opened[request.key] += ended == self.opened[request.key]
        request.opened, request.revoked = True, False
        request.generation = self.source.core.generation(request.key)
        request.ready_blocks = [0] * LAYERS
        self.source.step(core.ExtendLease(request.key, request.generation, request.source_blocks))

    def compute(self, request: Request) -> None:
        if not request.generation:
            return
        layer = request.ready_blocks.index(min(request.ready_blocks))
        ready = min(LEASE_BLOCKS, request.ready_blocks[layer] + self.random.randint(1, LEASE_BLOCKS))
        request.ready_blocks[layer] = ready
        for position in range(ready):
            self.source.pool[layer][request.source_blocks[position]] = (
                request.key,
                layer,
                position,
                request.generation,
            )
        self.source.step(core.PostReady(request.key, request.generation, layer, ready * BLOCK_TOKENS))

    def preempt(self, request: Request) -> None:
        if request.generation:
            self.source.step(core.RevokeLease(request.key, False))
            request.revoked = True
            self.overwrite(request)

    def give_up(self, request: Request) -> None:
        self.source.step(core.RevokeLease(request.key, True))
        self.overwrite(request)

    def overwrite(self, request: Request) -> None:
        request.generation = 0
        for layer in range(LAYERS):
            for block in request.source_blocks:
                self.source.pool[layer][block] = GARBAGE

    def notice_ends(self) -> None:
        """Reuse the blocks of every lease that was reported ended."""
        for request in self.requests:
            ended = sum(report.key == request.key for report in self.source.reports)
            if request.generation and ended >= self.opened[request.key]:
                self.overwrite(request)

    # Decode.

    def pull(self, request: Request) -> None:
        if request.pulled:
            return
        request.pulled = True
        for layer in range(LAYERS):
            for block in request.sink_blocks:
                self.sink.pool[layer][block] = GARBAGE
        first = self.random.choice([0, 0, 2])
        self.world.dest[request.key] = request.sink_blocks[first:]
        self.pulled[request.key] += 1
        self.sink.step(
            core.StartPull(
                request.key,
                self.source.endpoint,
                first * BLOCK_TOKENS,
                TOKENS,
                request.sink_blocks[first:],
                self.random.choice([2.0, 60.0]),
            )
        )

    def cancel(self, request: Request) -> None:
        self.sink.step(core.CancelPull(request.key))

    def release(self, request: Request) -> None:
        if not request.pulled:
            self.sink.step(core.ReleaseLease(request.key, self.source.endpoint))
            request.pulled = True

    # The world.

    def happen(self, _: Request) -> None:
        for _step in range(self.random.randint(1, 30)):
            self.world.advance_one(self.random.randrange(12))

    def wait(self, _: Request) -> None:
        self.world.tick(self.random.choice([0.01, 0.01, 0.1, 1.0]))

    def wait_long(self, _: Request) -> None:
        self.world.tick(6.0)

    def cut(self, _: Request) -> None:
        if ends := self.world.ends():
            self.world.cut(self.random.choice(ends))

    def hang(self, _: Request) -> None:
        """Let one of several connections hang for a while, which delays its deliveries."""
        ends = self.world.ends()
        if hanging := [end for end in ends if end.hangs]:
            hanging[0].hangs = False
        elif len(ends) > 2:
            self.random.choice(ends).hangs = True

    def separate(self, _: Request) -> None:
        self.world.reachable = not self.world.reachable

    def renew(self, request: Request) -> None:
        """Replace a request that has ended on both sides by a new one."""
        if request.pulled and request.key not in self.world.dest and not request.generation:
            place = self.requests.index(request)
            self.requests[place] = self.new_request(place)

    def run(self, steps: int) -> None:
        weights = {
            self.happen: 60,
            self.wait: 12,
            self.open: 10,
            self.compute: 25,
            self.pull: 8,
            self.renew: 6,
            self.preempt: self.preempts,
            self.cancel: 1,
            self.release: 0.3,
            self.give_up: 0.5,
            self.cut: 1,
            self.hang: 0.5,
            self.separate: 0.4,
            self.wait_long: 0.2,
        }
        for _ in range(steps):
            (do,) = self.random.choices(list(weights), list(weights.values()))
            do(self.random.choice(self.requests))
            self.notice_ends()
            if not self.world.reachable and self.random.random() < 0.1:
                self.world.reachable = True
        self.end()

    def end(self) -> None:
        self.world.reachable = True
        for end in self.world.ends():
            end.hangs = False
        for _ in range(150):
            while self.world.advance_one(0):
                pass
            self.world.tick(0.5)
            self.notice_ends()
        for node in self.world.nodes:
            stats = node.core.stats()
            assert (stats.leases, stats.leased_blocks, stats.pulls, stats.parked) == (0, 0, 0, 0)
            assert stats.protocol_errors == 0, "two honest agents never break the protocol"
        ends = Counter(report.key for report in self.sink.reports if report.kind in TERMINAL)
        assert ends == self.pulled, "every pull ends once"
        assert Counter(report.key for report in self.source.reports) == +self.opened, "every lease ends once"
        if not self.corrupts:
            assert self.sink.core.stats().checksum_failures == 0
        for key in self.pulled:
            layers = [report.layers for report in self.sink.reports if report.key == key and "progress" in report.kind]
            assert layers == sorted(set(layers)), "layers are reported in order, none twice"
        assert not any(end.slots for end in self.world.ends()), "every slot is credited"


def test_the_schedules_reach_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        schedule = Schedule(seed)
        schedule.run(STEPS)
        for report in schedule.sink.reports + schedule.source.reports:
            seen[f"{report.kind} {report.cause}"] += 1
            seen[f"{report.kind} restarted {report.backend}"] += report.restarts > 0
            seen[f"{report.kind} retired"] += any(rail.retired for rail in report.rails)
    for outcome in [
        "pull_done none",
        "pull_done restarted direct",
        "pull_done restarted shm",
        "pull_done restarted tcp",
        "pull_done retired",
        "pull_failed cancelled",
        "pull_failed checksum",
        "pull_failed deadline",
        "pull_failed revoked",
        "pull_failed unreachable",
        "lease_released none",
        "lease_ended cancelled",
        "lease_ended expired",
        "lease_ended revoked",
    ]:
        assert seen[outcome] > 0, (outcome, seen)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_events_give_equal_actions(backend: str) -> None:
    """The core has no clock and no randomness of its own: a run can be replayed."""

    def run() -> list[tuple[str, str, float, float]]:
        schedule = Schedule(7)
        schedule.world.backend = backend
        schedule.run(200)
        return [(report.kind, report.cause, report.waiting_s, report.moving_s) for report in schedule.sink.reports]

    first = run()
    assert first
    assert first == run()


@pytest.mark.parametrize("delivers", [False, True])
def test_a_source_that_is_lost_again_and_again_is_given_up_unless_chunks_arrive(delivers: bool) -> None:
    """Each connection is agreed on and then lost, as where every launch on a GPU is refused."""
    world = World([make_options(), make_options()], backend="tcp")
    source, sink = world.nodes
    key, blocks = bytes(16), list(range(LEASE_BLOCKS))
    source.step(core.OpenLease(key))
    generation = source.core.generation(key)
    source.step(core.ExtendLease(key, generation, blocks))
    for layer in range(LAYERS):
        source.pool[layer][:LEASE_BLOCKS] = [(key, layer, position, generation) for position in blocks]
    source.step(core.PostReady(key, generation, -1, TOKENS))
    world.dest[key] = blocks
    sink.step(core.StartPull(key, source.endpoint, 0, TOKENS, blocks, 60.0))
    began_s = world.now_s

    def is_due(pulled: int) -> bool:
        """Whether a chunk has arrived, or, if none is to, is about to be sent."""
        sends = any(end.reading for end in source.ends.values())
        return sink.core.stats().pulled_blocks > pulled if delivers else sends

    while not sink.reports or sink.reports[-1].kind not in TERMINAL:
        pulled = sink.core.stats().pulled_blocks
        while not is_due(pulled) and world.advance_one(0):
            pass
        for end in list(source.ends.values()):
            world.cut(end)
        while world.advance_one(0):
            pass
        world.tick(0.3)
    end = sink.reports[-1]
    assert (end.kind, end.cause) == (("pull_done", "none") if delivers else ("pull_failed", "unreachable"))
    assert world.now_s - began_s < 4 * make_options().connect_timeout_s
