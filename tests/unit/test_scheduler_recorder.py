"""What a scheduler records of its decisions: all terms, within bounds, and never at the cost of placing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from random import Random
from typing import Any

import msgspec
import pytest
from baton_scheduler.placement import PlacementOptions, choose
from baton_scheduler.policies import POLICIES, PolicyName
from baton_scheduler.policies.protocol import Policy, Question
from baton_scheduler.prediction import PRESSURE_S, Demand, PrefixMatch
from baton_scheduler.recorder import (
    BATCH_S,
    KEEP_AGAIN_S,
    KEEP_RETRY_S,
    NAMES_MAX,
    NOTED_MAX,
    ROWS_MAX,
    ObservedPolicy,
    Recorder,
)
from baton_scheduler.team import Serving
from baton_scheduler.worker_load import WorkerLoad

from baton import subjects
from baton.bus import MemoryBus, MemoryNetwork, Retention
from baton.errors import BusUnavailable, NoWorkers
from baton.messages.base import Context, Refused
from baton.messages.decisions import Decision, Verdict
from baton.messages.placement import Candidate, Disaggregation, Held, Place, Placement
from baton.messages.workers import Role
from baton.node.ports import system_ports
from tests.harness.heartbeats import heartbeat
from tests.harness.holding import FULL, World

PLACE = Place(
    context=Context(request="r-0", budget_s=5.0),
    model="tiny",
    blocks=b"",
    prompt_tokens=64,
    output_tokens_max=16,
    gateway="g",
)


class Scene:
    """One decision among workers, and the recorder that notes it."""

    def __init__(self, policy: Policy | None = None, *, prefills: int = 3, decodes: int = 3) -> None:
        self.network = MemoryNetwork()
        self.bus = MemoryBus(self.network)
        self.policy = ObservedPolicy(policy or POLICIES[PolicyName.PREDICTED]())
        retention = Retention(age_s_max=60.0, bytes_max=1 << 20)
        self.recorder = Recorder(system_ports(self.bus), retention, scheduler="s", policy="predicted")
        random = Random(1)
        roles = [Role.PREFILL] * prefills + [Role.DECODE] * decodes
        self.serving = Serving(
            WorkerLoad(
                heartbeat(
                    f"w{number}",
                    role,
                    running=random.randrange(4),
                    kv_bytes_per_token=10_000_000,
                    kv_blocks_total=1000,
                    kv_blocks_used=random.randrange(900),
                    prefill_tokens_queued=random.randrange(2000),
                )
            )
            for number, role in enumerate(roles)
        )

    def decide(self, disaggregation: Disaggregation = Disaggregation.AUTO) -> Placement:
        demand = Demand(model="tiny", prompt_tokens=64, output_tokens_max=16, disaggregation=disaggregation)
        match = PrefixMatch({"w0": 1, "w4": 2})
        return choose(demand, self.serving, match, self.policy, PlacementOptions(), Random(1), 0.0)

    def note(self, placement: Placement) -> None:
        self.recorder.note(PLACE, Verdict.PLACED, placement=placement, question=self.policy.question)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    yield made
    await made.bus.close()
    await made.network.close()


async def test_every_worker_is_listed_with_terms_that_add_up_to_its_cost(scene: Scene) -> None:
    scene.note(scene.decide())
    decision = scene.recorder.pack_next()
    legs = {each.leg: dict(zip(each.workers, each.rows(), strict=True)) for each in decision.considered}
    assert {leg: set(rows) for leg, rows in legs.items()} == {
        "aggregated": {"w3", "w4", "w5"},
        "prefill": {"w0", "w1", "w2"},
        "decode": {"w3", "w4", "w5"},
    }
    for rows in legs.values():
        for terms in rows.values():
            parts = {name: value for name, value in terms.items() if name not in ("cost_s", "pull_s", "cached_tokens")}
            assert all(value >= -1e-6 for value in parts.values())
            assert sum(parts.values()) == pytest.approx(terms["cost_s"], abs=1e-6)
    assert legs["prefill"]["w0"]["cached_tokens"] == 32
    team = scene.serving.teams[Role.DECODE]
    for load in team.loads:
        assert legs["decode"][load.worker]["pressure_s"] == pytest.approx(PRESSURE_S * load.kv_share)
        assert legs["decode"][load.worker]["interval_s"] == pytest.approx(load.next_interval_s)
    assert any(each.tail_s > 0 for each in decision.candidates), "pulls outlast the prompt here"
    for each in decision.candidates:
        if each.prefill:
            pair_s = legs["prefill"][each.prefill]["cost_s"] + legs["decode"][each.decode]["cost_s"] + each.tail_s
        else:
            pair_s = legs["aggregated"][each.decode]["cost_s"]
        assert pair_s == pytest.approx(each.cost_s, rel=1e-5)


async def test_what_is_noted_is_what_was_decided_whatever_changes_before_it_is_packed(scene: Scene) -> None:
    scene.note(scene.decide())
    before = scene.recorder.pack_next()
    scene.note(scene.decide())
    team = scene.serving.teams[Role.DECODE]
    for load in list(team.loads):
        load.hear(heartbeat(load.worker, Role.DECODE, kv_blocks_total=1000, kv_blocks_used=999), 9.0, 0.4)
        team.update(load)
    team.remove(team.loads[0])
    team.add(WorkerLoad(heartbeat("a-new-one", Role.DECODE)))
    assert scene.recorder.pack_next().considered == before.considered


@pytest.mark.parametrize("gone", ["w0", "w2", "w3"])
async def test_workers_that_leave_before_it_is_noted_are_recorded_as_they_were(scene: Scene, gone: str) -> None:
    scene.note(scene.decide())
    before = scene.recorder.pack_next()
    # Its answer is sent first, and takes a turn of the event loop.
    placement = scene.decide()
    team = next(team for team in scene.serving.teams.values() if gone in team.rows)
    team.remove(team.loads[team.rows[gone]])
    scene.note(placement)
    assert scene.recorder.pack_next().considered == before.considered


async def test_a_fault_in_one_record_ends_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise IndexError(arguments)

    monkeypatch.setattr("baton_scheduler.recorder.pack_leg", fail)
    scene.note(scene.decide())
    await scene.recorder.publish_noted()
    assert (scene.recorder.published, scene.recorder.dropped) == (0, 1)
    monkeypatch.undo()
    scene.note(scene.decide())
    await scene.recorder.publish_noted()
    assert (scene.recorder.published, scene.recorder.dropped) == (1, 1)


class Dearest(Policy):
    """Chooses the worker of the highest cost."""

    def rank(self, question: Question) -> list[Candidate]:
        assert question.whole is not None
        return [question.predict.whole(question.whole, int(question.whole.cost_s.argmax()))]


@pytest.mark.parametrize("workers", [ROWS_MAX, ROWS_MAX + 1, 500])
async def test_of_many_workers_the_cheapest_are_listed_and_the_chosen_one(workers: int) -> None:
    scene = Scene(Dearest(), prefills=0, decodes=workers)
    placement = scene.decide(Disaggregation.NEVER)
    scene.note(placement)
    (leg,) = scene.recorder.pack_next().considered
    assert len(leg.workers) == len(leg.rows()) == min(workers, ROWS_MAX)
    assert leg.left_out == workers - len(leg.workers)
    assert placement.decode.worker in leg.workers
    costs = sorted(row["cost_s"] for row in leg.rows())
    assert scene.policy.question is not None
    assert scene.policy.question.whole is not None
    cheapest = sorted(scene.policy.question.whole.cost_s)
    assert costs[:-1] == pytest.approx(cheapest[: len(costs) - 1], rel=1e-5)
    assert costs[-1] == pytest.approx(cheapest[-1], rel=1e-5), "the chosen one is the dearest of all"


async def test_beyond_its_bound_decisions_are_dropped_and_counted(scene: Scene) -> None:
    for _ in range(NOTED_MAX + 3):
        scene.recorder.note(PLACE, Verdict.REFUSED, error=NoWorkers("none"))
    assert scene.recorder.dropped == 3
    many = tuple(f"w{number}" for number in range(NAMES_MAX + 5))
    scene.recorder.pack_next()
    scene.recorder.note(msgspec.structs.replace(PLACE, exclude=many), Verdict.REFUSED)
    for _ in range(NOTED_MAX - 1):
        scene.recorder.pack_next()
    last = scene.recorder.pack_next()
    assert (last.avoided, last.avoided_left_out) == (many[:NAMES_MAX], 5)


# ---------------------------------------------------------------- in the scheduler


async def kept(world: World, request: str) -> list[Decision]:
    """Return what the stream keeps of a request."""
    decisions: list[Decision] = []
    after = 0
    while record := await world.bus.read(subjects.DECISIONS_STREAM, subjects.decisions(request), after=after):
        assert isinstance(record.message, Decision)
        decisions.append(record.message)
        after = record.stream_sequence
    return decisions


async def test_placed_held_and_refused_are_recorded_and_probes_are_not() -> None:
    world = World()
    await world.start()
    changes: dict[str, Any] = {"decisions_kept_s": 77.0, "decisions_bytes_max": 5000}
    async with world.scheduler(**changes):
        await world.beat("d1")
        assert isinstance(await world.ask("placed-0"), Placement)
        assert isinstance(await world.ask("probe-0", gateway=""), Placement)
        assert isinstance(await world.ask("wrong-0", model="other"), Refused)
        await world.beat("d1", **FULL)
        assert isinstance(await world.ask("held-0"), Held)
        await world.pass_time(0.75)
        await world.beat("d1")
        await world.pass_time(0.25)
        (placed,) = await kept(world, "placed")
        assert (placed.verdict, placed.candidates[0].decode, placed.considered[0].workers) == ("placed", "d1", ("d1",))
        assert placed.without_index is False
        assert await kept(world, "probe") == []
        (wrong,) = await kept(world, "wrong")
        assert wrong.error is not None
        assert (wrong.verdict, wrong.error.code) == ("refused", "model_not_found")
        first, then = await kept(world, "held")
        assert (first.verdict, then.verdict) == ("held", "placed")
        assert first.candidates[0].waiting_s > 0
        assert then.held_s == pytest.approx(0.77, abs=0.05)
        await world.beat("d1", **FULL)
        assert isinstance(await world.ask("late-0", hold_s=0.5), Held)
        await world.pass_time(1.0)
        assert [each.verdict for each in await kept(world, "late")] == ["held", "refused"]
        retention = await world.bus.retention(subjects.DECISIONS_STREAM)
        assert retention == Retention(age_s_max=77.0, bytes_max=5000)


async def test_decisions_of_a_moment_are_published_together_and_the_last_ones_as_the_scheduler_ends() -> None:
    world = World()
    await world.start()
    async with world.scheduler():
        await world.beat("d1")
        for number in range(2):
            assert isinstance(await world.ask(f"r{number}-0"), Placement)
        assert [await kept(world, f"r{number}") for number in range(2)] == [[], []]
        await world.pass_time(BATCH_S)
        assert [len(await kept(world, f"r{number}")) for number in range(2)] == [1, 1]
        assert isinstance(await world.ask("last-0"), Placement)
    assert [each.verdict for each in await kept(world, "last")] == ["placed"]


async def test_many_decisions_of_a_moment_are_published_at_once() -> None:
    world = World()
    await world.start()
    async with world.scheduler():
        await world.beat("d1", running_max=10_000, kv_blocks_total=10**8)
        for number in range(NOTED_MAX // 2):
            assert isinstance(await world.ask(f"r{number}-0"), Placement)
        assert [each.verdict for each in await kept(world, "r0")] == ["placed"]


async def test_all_that_are_given_up_in_a_moment_are_recorded() -> None:
    world = World()
    await world.start()
    count = 2 * NOTED_MAX
    async with world.scheduler():
        await world.beat("d1", **FULL)
        for number in range(count):
            assert isinstance(await world.ask(f"r{number}-0", hold_s=5.0), Held)
        await world.pass_time(2 * KEEP_RETRY_S)
        assert len(world.released()) == count
        verdicts = [[each.verdict for each in await kept(world, f"r{number}")] for number in range(count)]
        assert verdicts == [["held", "refused"]] * count


async def test_of_schedulers_with_different_settings_those_that_keep_most_decide(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    await world.start()
    longer: dict[str, Any] = {"decisions_kept_s": 7200.0, "decisions_bytes_max": 5000}
    shorter: dict[str, Any] = {"decisions_kept_s": 60.0, "decisions_bytes_max": 5000}
    asked = Retention(age_s_max=7200.0, bytes_max=5000)
    async with world.scheduler(**longer), world.scheduler(**shorter):
        await world.beat("d1")
        for number in range(3):
            # Each looks at the stream again every 30 s, before it records a decision.
            assert isinstance(await world.ask(f"r{number}-0"), Placement)
            assert await world.bus.retention(subjects.DECISIONS_STREAM) == asked
            await world.pass_time(KEEP_AGAIN_S)
        warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert warnings == [
            "decisions are kept for 7200 s and 5000 bytes, more than this scheduler asks for: see docs/explain.md"
        ]


async def test_the_first_decision_after_the_server_lost_its_streams_is_recorded() -> None:
    class Reconnecting(MemoryBus):
        @property
        def reconnects(self) -> int:
            return reconnects

    reconnects = 0
    world = World(bus_of_scheduler=Reconnecting)
    await world.start()
    async with world.scheduler():
        await world.beat("d1")
        world.network.streams.clear()
        reconnects = 1
        assert isinstance(await world.ask("first-0"), Placement)
        await world.pass_time(BATCH_S)
        assert [each.verdict for each in await kept(world, "first")] == ["placed"]
        world.network.streams.clear()
        await world.pass_time(KEEP_AGAIN_S)
        assert await world.bus.retention(subjects.DECISIONS_STREAM) is not None


async def test_a_stream_that_cannot_be_made_yet_is_made_soon(caplog: pytest.LogCaptureFixture) -> None:
    class Electing(MemoryBus):
        """A bus whose JetStream has no leader for a while."""

        async def keep(self, stream: str, subject: str, retention: Retention) -> Retention:
            if elects:
                raise BusUnavailable("JetStream system temporarily unavailable")
            return await super().keep(stream, subject, retention)

    elects = True
    world = World(bus_of_scheduler=Electing)
    await world.start()
    async with world.scheduler():
        await world.beat("d1")
        await world.pass_time(3 * KEEP_RETRY_S)
        assert caplog.text.count("decisions are not kept") == 1
        elects = False
        await world.pass_time(2 * KEEP_RETRY_S)
        assert isinstance(await world.ask("first-0"), Placement)
        await world.pass_time(BATCH_S)
        assert [each.verdict for each in await kept(world, "first")] == ["placed"]


class HangingStreams(MemoryBus):
    """A bus whose JetStream hangs."""

    async def keep(self, stream: str, subject: str, retention: Retention) -> Retention:
        await self.network.clock.sleep(3600.0)
        return retention


async def test_a_scheduler_places_as_before_while_nothing_can_be_recorded() -> None:
    world = World(bus_of_scheduler=HangingStreams)
    await world.start()
    async with world.scheduler():
        await world.beat("d1", running_max=10_000, kv_blocks_total=10**8)
        for number in range(NOTED_MAX + 1):
            assert isinstance(await world.ask(f"r{number}-0"), Placement)
