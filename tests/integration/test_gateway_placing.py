"""How the gateway asks schedulers for a place, and how requests wait for one."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from typing import Any

import httpx
import msgspec
import pytest
from baton_gateway.attempt import Phase
from baton_gateway.config import Settings
from baton_gateway.service import QUESTIONS_MAX
from baton_gateway.tenants.tenant import Tenant, tenant_of
from baton_scheduler.config import SchedulerSettings

from baton.errors import EngineFailed
from baton.messages.attempts import Acknowledge
from baton.messages.placement import PRIORITY_NEW, Disaggregation, Place
from tests.harness.gateway.chats import CHAT, SETTINGS, TEXT, body, check_clean
from tests.harness.gateway.stage import Stage, forward, open_scheduled_stage, open_stage
from tests.harness.limits import HANG_S


async def test_every_message_carries_the_trace_and_the_budget() -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01", "x-baton-deadline-s": "20"}
    # On a busy machine nothing is sent again: each message once.
    patient = msgspec.structs.replace(SETTINGS, place_resend_s=HANG_S, resend_s=HANG_S, lost_after_s=HANG_S)
    async with open_stage(patient) as stage, httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client:
        stage.say(TEXT)
        assert (await client.post(CHAT, json=body(), headers=headers)).status_code == 200
        await check_clean(stage)
        places: list[Any] = list[Place](stage.scheduler.places)
        messages: list[Any] = [*places, *stage.workers["d1"].received]
    assert len(messages) == 3
    for message in messages:
        assert message.context.trace.split("-")[1] == trace
        # With the first token the deadline is met, and the progress limit holds.
        assert (message.context.budget_s == patient.progress_s) is isinstance(message, Acknowledge)
        assert message.context.budget_s == patient.progress_s or 15.0 < message.context.budget_s <= 20.0
    assert len({message.context.trace for message in messages}) == 3, "each is sent by a span of its own"


async def test_schedulers_learn_the_tenant_the_objective_and_how_long_to_hold() -> None:
    settings = msgspec.structs.replace(
        SETTINGS, api_keys=("one", "two"), ttft_ms=40_000.0, admission_wait_s=60.0, place_resend_s=HANG_S
    )
    async with open_stage(settings) as stage, httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client:
        stage.say("ok")
        for key in ("one", "two", "one"):
            answer = await client.post(CHAT, json=body(), headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
    first, second, third = stage.scheduler.places
    assert first.tenant == third.tenant == hashlib.sha256(b"one").hexdigest()[:32]
    assert second.tenant == hashlib.sha256(b"two").hexdigest()[:32]
    assert (first.gateway, first.priority) == ("gw-test", PRIORITY_NEW)
    assert 40.0 < first.hold_s <= 60.0
    assert 20.0 < first.due_in_s <= 40.0
    assert (first.ttft_s, first.tpot_s, first.weight) == (0.0, 0.0, 1.0), "nobody stated an objective"


async def test_schedulers_learn_the_objectives_that_headers_and_tenants_state() -> None:
    heavy = Tenant(weight=4.0, ttft_ms=60_000.0, priority=2)
    settings = msgspec.structs.replace(
        SETTINGS, api_keys=("one", "two"), tenants={tenant_of("one"): heavy}, place_resend_s=HANG_S
    )
    async with open_stage(settings) as stage, httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client:
        stage.say("ok")
        for headers in ({}, {"x-baton-ttft-ms": "30000", "x-baton-tpot-ms": "5000", "x-baton-priority": "3"}):
            answer = await client.post(CHAT, json=body(), headers={"authorization": "Bearer one", **headers})
            assert answer.status_code == 200
    first, second = stage.scheduler.places
    assert (first.ttft_s, first.tpot_s, first.priority, first.weight) == (60.0, 0.0, 2, 4.0)
    assert (second.ttft_s, second.tpot_s, second.priority, second.weight) == (30.0, 5.0, 3, 4.0)
    assert 0 < second.due_in_s <= 30.0


async def test_an_attempt_after_a_failure_is_not_refused_by_its_objective() -> None:
    async with open_stage(SETTINGS) as stage, httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client:
        stage.say("ok")
        script = stage.workers["d1"].script
        script.refuse = EngineFailed("broken")
        asked = asyncio.create_task(client.post(CHAT, json=body(), headers={"x-baton-ttft-ms": "60000"}))
        await stage.wait_for(lambda: len(stage.scheduler.places) >= 2)
        script.refuse = None
        assert (await asked).status_code == 200
    first, second, *_ = stage.scheduler.places
    assert (first.context.attempt, first.ttft_s) == (0, 60.0)
    assert (second.context.attempt, second.ttft_s) == (1, 0.0)
    assert 0 < second.due_in_s < 60.0, "its place in the queue goes by the objective"


# ---------------------------------------------------------------- overload


async def test_busy_workers_make_requests_wait_in_turn() -> None:
    patient = msgspec.structs.replace(SETTINGS, admission_wait_s=60.0)
    async with (
        open_scheduled_stage(patient) as stage,
        httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client,
    ):
        worker = stage.workers["d1"]
        worker.script.capacity = 2
        stage.say("ok")
        answers = await asyncio.gather(*(client.post(CHAT, json=body()) for _ in range(30)))
        assert [answer.status_code for answer in answers] == [200] * 30
        assert worker.peak <= 2
        await check_clean(stage)


@pytest.mark.timeout(180)
async def test_two_thousand_requests_at_once_over_eight_idle_workers_are_all_served() -> None:
    # Every limit is the default except the wait, which a busy machine needs longer for this load.
    patient = Settings(port=0, admission_wait_s=150.0)
    async with open_scheduled_stage(patient) as stage:
        stage.say("ok")
        names = [f"d{number}" for number in range(1, 9)]
        for name in names[1:]:
            await stage.add(name)
        for worker in stage.workers.values():
            worker.script.capacity = 32
        await forward(stage, *names)
        answers = await asyncio.gather(*(post_alone(stage, body()) for _ in range(2000)))
        assert Counter(answers) == {200: 2000}
        await check_clean(stage)


async def post_alone(stage: Stage, fields: dict[str, Any]) -> int:
    """Post on a connection of its own and return the status: httpx takes seconds to share out thousands."""
    host, port = stage.base_url.removeprefix("http://").split(":")
    payload = json.dumps(fields).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1])


async def test_schedulers_that_do_not_answer_are_not_flooded() -> None:
    patient = msgspec.structs.replace(SETTINGS, place_resend_s=HANG_S)
    limits = httpx.Limits(max_connections=None)
    async with (
        open_stage(patient) as stage,
        httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S, limits=limits) as client,
    ):
        stage.say("ok")
        assert (await client.post(CHAT, json=body())).status_code == 200, "all that it takes is loaded"
        stage.scheduler.places.clear()
        stage.scheduler.answers = [None] * QUESTIONS_MAX
        waiting = [asyncio.create_task(client.post(CHAT, json=body())) for _ in range(2 * QUESTIONS_MAX)]
        await stage.wait_for(lambda: len(stage.gateway.routes) == 2 * QUESTIONS_MAX)
        await stage.wait_for(lambda: not stage.scheduler.answers)
        # The bus keeps the order: what was asked before this is there.
        assert (await client.get("/ready")).status_code == 200
        assert len(stage.scheduler.places) == QUESTIONS_MAX + 1
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await check_clean(stage)


async def test_a_question_that_was_answered_before_its_turn_is_not_asked() -> None:
    settings = msgspec.structs.replace(SETTINGS, place_resend_s=0.1)
    async with open_stage(settings) as stage, httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client:
        stage.workers["d1"].script.stall_at = 1
        stage.scheduler.answers = [None]
        turns = stage.gateway.links.questions
        for _ in range(QUESTIONS_MAX - 1):
            await turns.acquire()
        asking = asyncio.create_task(client.post(CHAT, json=body()))
        await stage.wait_for(lambda: stage.scheduler.places)
        # Another answer's question comes before the next one of this answer.
        await turns.acquire()
        await stage.scheduler.release(stage.scheduler.places[0])
        await stage.wait_for(lambda: stage.workers["d1"].running)
        for _ in range(QUESTIONS_MAX):
            turns.release()
        await stage.wait_for(lambda: not turns.locked())
        await asyncio.sleep(0.1)
        assert len(stage.scheduler.places) == 1
        asking.cancel()
        await asyncio.wait([asking])


async def test_held_requests_are_bounded() -> None:
    settings = msgspec.structs.replace(SETTINGS, admission_wait_s=3.0)
    scheduling = SchedulerSettings(disaggregation=Disaggregation.NEVER, held_max=3)
    async with (
        open_scheduled_stage(settings, scheduling) as stage,
        httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client,
    ):
        stage.workers["d1"].script.capacity = 0
        answers = await asyncio.gather(*(client.post(CHAT, json=body()) for _ in range(8)))
        assert [answer.status_code for answer in answers] == [429] * 8
        assert all(
            answer.headers["retry-after"].isdecimal() and answer.headers["retry-after"] != "0" for answer in answers
        )
        assert sum("too many" in answer.text for answer in answers) == 5
        assert sum("in time" in answer.text for answer in answers) == 3
        await check_clean(stage)


async def test_a_refused_client_is_told_when_its_turn_would_come() -> None:
    settings = msgspec.structs.replace(SETTINGS, admission_wait_s=60.0)
    async with (
        open_scheduled_stage(settings) as stage,
        httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client,
    ):
        stage.say("ok")
        stage.workers["d1"].script.capacity = 0
        patient = asyncio.create_task(client.post(CHAT, json=body()))
        await stage.wait_for(lambda: any(d.machine.phase is Phase.QUEUED for d in stage.gateway.routes.all()))
        # A stall is taken to last as long again, so it is told a little more than it has waited.
        began_s = asyncio.get_running_loop().time()
        hasty = await client.post(CHAT, json=body(), headers={"x-baton-ttft-ms": "8000"})
        waited_s = asyncio.get_running_loop().time() - began_s
        assert hasty.status_code == 429
        assert waited_s >= 1.5, "a quarter of its objective"
        assert int(hasty.headers["retry-after"]) >= 2
        stage.workers["d1"].script.capacity = 8
        assert (await patient).status_code == 200
        await check_clean(stage)


async def test_requests_in_progress_are_bounded() -> None:
    async with open_stage(msgspec.structs.replace(SETTINGS, requests_max=2)) as stage:
        stage.workers["d1"].script.stall_at = 0
        async with httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client:
            held = [asyncio.create_task(client.post(CHAT, json=body())) for _ in range(2)]
            await stage.wait_for(lambda: len(stage.gateway.routes) == 2)
            assert (await client.post(CHAT, json=body())).status_code == 429
            for task in held:
                task.cancel()
            await asyncio.wait(held)
            await check_clean(stage)
