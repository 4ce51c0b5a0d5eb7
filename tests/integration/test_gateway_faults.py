"""What a gateway tells of failures, and which requests it stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from baton_gateway.config import Settings
from msgspec.structs import replace

from baton import subjects
from baton.bus import Delivery
from baton.errors import EngineFailed
from baton.messages.attempts import DecodeTask, Fault
from baton.messages.base import WorkerAddress
from baton.messages.workers import Goodbye
from tests.harness.gateway.actors import MODEL
from tests.harness.gateway.stage import Stage, forward, open_stage
from tests.harness.limits import HANG_S

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
CHAT = "/v1/chat/completions"


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with open_stage(Settings(port=0, lost_after_s=0.8, admission_wait_s=5.0)) as opened:
        opened.say("the quick brown fox jumps over the lazy dog")
        yield opened


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as opened:
        yield opened


async def test_schedulers_hear_who_failed(stage: Stage, client: httpx.AsyncClient) -> None:
    heard: list[Fault] = []

    async def hear(delivery: Delivery) -> None:
        assert isinstance(delivery.message, Fault)
        heard.append(delivery.message)

    await stage.bus.subscribe(subjects.FAULTS, hear)
    worker = stage.workers["d1"]
    worker.script.fail_at, worker.script.failure = 1, EngineFailed("scripted")
    await stage.add("d2")
    await forward(stage, "d2")
    assert (await client.post(CHAT, json=BODY)).status_code == 200
    await stage.wait_for(lambda: heard)
    (fault,) = heard
    address = WorkerAddress(worker="d1", generation=worker.generation)
    assert (fault.workers, fault.pair, fault.code) == ((address,), None, "engine_failed")


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_request_that_ends_workers_is_stopped_with_all_its_choices(
    stage: Stage, client: httpx.AsyncClient, choices: int
) -> None:
    for name in ("d2", "d3"):
        await stage.add(name)
    await forward(stage, "d2", "d3")
    for worker in stage.workers.values():
        worker.script.die_at = 1
    answer = await client.post(CHAT, json=BODY | {"n": choices})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_stopped")
    assert sum(worker.alive for worker in stage.workers.values()) == 1


async def test_an_attempt_on_a_worker_that_stands_still_goes_elsewhere() -> None:
    """Long before the limit of the first token, which is two minutes."""
    async with open_stage(Settings(port=0, progress_s=1.0)) as stage:
        await stage.add("d2")
        await forward(stage, "d2")
        stage.workers["d1"].script.stall_at = 0
        async with httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client:
            answers = await asyncio.gather(*(client.post(CHAT, json=BODY) for _ in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4
        assert stage.workers["d1"].got(DecodeTask)


async def test_a_worker_that_drained_was_not_lost(stage: Stage) -> None:
    await stage.add("d2")
    await forward(stage, "d2")
    suspects, members = stage.gateway.links.retries.suspects, stage.gateway.workers.members
    for name in ("d1", "d2"):
        worker = stage.workers[name]
        worker.die()
        address, now_s = WorkerAddress(worker=name, generation=worker.generation), stage.gateway.clock.now_s()
        suspects.note_failed("r", (name, worker.generation), now_s)
        await stage.bus.publish(subjects.HEARTBEAT, replace(worker.heartbeat(), draining=name == "d2"))
        await stage.bus.publish(subjects.HEARTBEAT, Goodbye(address=address))
    await stage.wait_for(lambda: not list(members))
    assert suspects.judge("r", stage.gateway.clock.now_s())[1] == ("d1",)
