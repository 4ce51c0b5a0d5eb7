"""Failures between gateway and workers. Clients see nothing of them, or a typed error."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
from baton_gateway.attempt import Phase
from baton_gateway.config import Settings
from baton_gateway.service import QUESTIONS_MAX
from baton_gateway.tenants.tenant import Tenant, tenant_of
from baton_scheduler.config import SchedulerSettings

from baton import subjects
from baton.blocks import hash_blocks, root_key
from baton.bus import Delivery
from baton.errors import EngineFailed, TransferFailed
from baton.messages.attempts import (
    Acknowledge,
    Cancel,
    Constraint,
    ConstraintKind,
    DecodeTask,
    Frame,
    PrefillTask,
    Resend,
)
from baton.messages.base import TOKEN_BYTES, unpack_tokens
from baton.messages.placement import PRIORITY_NEW, Disaggregation, Place
from baton.messages.workers import Role
from tests.harness.gateway.actors import MODEL, Attempt, Worker
from tests.harness.gateway.stage import Stage, forward, open_scheduled_stage, open_stage
from tests.harness.heartbeats import MODEL_DIGEST
from tests.harness.limits import HANG_S

CHAT = "/v1/chat/completions"
TEXT = "the quick brown fox jumps over the lazy dog, 你好世界 😀, and then it stops. " * 3
SETTINGS = Settings(port=0, lost_after_s=0.8, progress_s=3.0, resend_s=0.1, admission_wait_s=5.0, accept_s=HANG_S)
"""No worker counts as unavailable because a busy machine is slow."""


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with open_stage(SETTINGS) as opened:
        opened.say(TEXT)
        opened.workers["d1"].script.interval_s = 0.001
        yield opened


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as opened:
        yield opened


def body(**fields: object) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0, **fields}


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content", "") for event in events for choice in event.get("choices", ()))


async def stream(client: httpx.AsyncClient, **fields: object) -> list[dict[str, Any]]:
    options = {"stream": True, "stream_options": {"include_usage": True}, **fields}
    response = await client.post(CHAT, json=body(**options))
    assert response.status_code == 200, response.text
    return events_of(response.text)


async def check_clean(stage: Stage) -> None:
    """Assert that nothing is left of any request."""
    await stage.wait_for(lambda: not stage.gateway.routes)
    await stage.wait_for(lambda: all(not worker.attempts for worker in stage.workers.values() if worker.alive))


class Chaos:
    """Loses, repeats, delays and reorders frames, driven by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._late: list[Frame] = []

    def __call__(self, frames: list[Frame]) -> list[Frame]:
        chance = self._random.random()
        if chance < 0.1:
            return []
        if chance < 0.2:
            return frames * 2
        if chance < 0.3:
            self._late += frames
            return []
        late, self._late = self._late, []
        return [*frames, *late]


@pytest.mark.parametrize("seed", range(4))
async def test_a_stream_over_a_bad_network_is_whole(stage: Stage, client: httpx.AsyncClient, seed: int) -> None:
    worker = stage.workers["d1"]
    worker.script.twist = Chaos(seed)
    events = await stream(client)
    assert text_of(events) == TEXT
    assert events[-1]["usage"]["completion_tokens"] == len(stage.answer)
    assert worker.got(Resend)
    await check_clean(stage)


async def test_a_lost_final_frame(stage: Stage, client: httpx.AsyncClient) -> None:
    lost: list[Frame] = []

    def lose_the_first_final(frames: list[Frame]) -> list[Frame]:
        if frames[0].finish is not None and not lost:
            lost.extend(frames)
            return []
        return frames

    stage.workers["d1"].script.twist = lose_the_first_final
    assert text_of(await stream(client)) == TEXT
    assert lost
    await check_clean(stage)


def die(worker: Worker, at: int) -> None:
    worker.script.die_at = at


def forget(worker: Worker, at: int) -> None:
    worker.script.stall_at = at
    worker.script.forget = True


def stall(worker: Worker, at: int) -> None:
    worker.script.stall_at = at


def fail(worker: Worker, at: int) -> None:
    worker.script.fail_at = at
    worker.script.failure = EngineFailed("scripted")


@pytest.mark.parametrize("at", [0, 1, 20])
@pytest.mark.parametrize("failure", [die, forget, stall, fail])
async def test_an_answer_survives_its_worker(
    stage: Stage, client: httpx.AsyncClient, failure: Callable[[Worker, int], None], at: int
) -> None:
    await stage.add("d2")
    await forward(stage, "d2")
    if failure is stall and at == 0:
        return  # A worker that only never begins is the first-token budget's, which is minutes.
    failure(stage.workers["d1"], at)
    events = await stream(client)
    assert text_of(events) == TEXT
    usage = events[-1]["usage"]
    prompt_tokens = usage["prompt_tokens"]
    assert usage["completion_tokens"] == len(stage.answer), "counted once, over both attempts"
    # A question that is answered late is asked again.
    first, second = {place.context.attempt: place for place in stage.scheduler.places}.values()
    assert (second.context.attempt, second.exclude) == (1, ("d1",))
    (task,) = stage.workers["d2"].got(DecodeTask)
    assert isinstance(task, DecodeTask)
    resumed_at = len(unpack_tokens(task.tokens)) - prompt_tokens
    assert resumed_at == at, "prompt plus what was delivered"
    assert unpack_tokens(task.tokens)[prompt_tokens:] == stage.answer[:at]
    assert task.sampling.max_tokens == first.output_tokens_max - at
    assert second.prompt_tokens == prompt_tokens + at
    root = root_key(MODEL_DIGEST)
    assert first.blocks == hash_blocks(root, task.tokens[: prompt_tokens * TOKEN_BYTES], 32)
    assert second.blocks == hash_blocks(root, task.tokens, 32)
    await check_clean(stage)


async def test_a_restarted_worker_is_noticed_at_once() -> None:
    settings = msgspec.structs.replace(SETTINGS, lost_after_s=60.0, progress_s=60.0)
    async with open_stage(settings) as stage, httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client:
        stage.say(TEXT)
        worker = stage.workers["d1"]
        worker.script.die_at = 5
        answer = asyncio.create_task(stream(client))
        await stage.wait_for(lambda: not worker.alive)
        worker.restart()
        assert text_of(await answer) == TEXT, "its silence alone would have to last for a minute"


async def test_the_last_worker_dies(stage: Stage, client: httpx.AsyncClient) -> None:
    stage.workers["d1"].script.die_at = 5
    events = await stream(client)
    assert TEXT.startswith(text_of(events))
    assert events[-1]["error"]["code"] in ("no_workers", "worker_lost")
    assert not stage.gateway.routes


NOT_EXACT: list[dict[str, Any]] = [{"presence_penalty": 1.0}, {"temperature": 1.0, "seed": 7}, {"guided_regex": ".*"}]


@pytest.mark.parametrize("fields", NOT_EXACT, ids=lambda fields: str(next(iter(fields))))
async def test_an_answer_that_its_client_has_not_seen_starts_over(
    stage: Stage, client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    await stage.add("d2")
    await forward(stage, "d2")
    stage.workers["d1"].script.die_at = 9
    answer = (await client.post(CHAT, json=body(**fields, logprobs=True, n=2))).json()
    assert len(stage.workers["d2"].got(DecodeTask)) >= 1
    for choice in answer["choices"]:
        assert choice["message"]["content"] == TEXT
        assert len(choice["logprobs"]["content"]) == len(stage.answer)
    assert answer["usage"]["completion_tokens"] == 2 * len(stage.answer), "of the final runs only"
    assert stage.gateway.figures.output_tokens == 2 * len(stage.answer)
    for task in stage.workers["d2"].got(DecodeTask):
        assert isinstance(task, DecodeTask)
        assert task.prompt_tokens == answer["usage"]["prompt_tokens"]
    await check_clean(stage)


async def test_a_stream_starts_over_as_long_as_all_of_it_is_held_back(stage: Stage, client: httpx.AsyncClient) -> None:
    """Text that could begin a stop string is held back."""
    await stage.add("d2")
    await forward(stage, "d2")
    stage.workers["d1"].script.die_at = 3
    events = await stream(client, presence_penalty=1.0, stop=["the quick brown cat"])
    assert text_of(events) == TEXT
    assert events[-1]["usage"]["completion_tokens"] == len(stage.answer)
    (task,) = stage.workers["d2"].got(DecodeTask)
    assert isinstance(task, DecodeTask)
    assert task.prompt_tokens == events[-1]["usage"]["prompt_tokens"]


async def test_a_constrained_answer_continues_from_what_was_delivered(stage: Stage, client: httpx.AsyncClient) -> None:
    await stage.add("d2")
    await forward(stage, "d2")
    stage.workers["d1"].script.die_at = 9
    assert text_of(await stream(client, structured_outputs={"regex": "[^x]+"})) == TEXT
    (first,), (second,) = (stage.workers[name].got(DecodeTask) for name in ("d1", "d2"))
    assert isinstance(first, DecodeTask)
    assert isinstance(second, DecodeTask)
    assert (
        first.sampling.constraint == second.sampling.constraint == Constraint(kind=ConstraintKind.REGEX, text="[^x]+")
    )
    assert (first.sampling.delivered_tokens, second.sampling.delivered_tokens) == (0, 9)
    assert second.prompt_tokens == first.prompt_tokens + 9
    assert {place.parameters for place in stage.scheduler.places} == {("structured_outputs.regex",)}


async def test_what_cannot_be_continued_exactly_says_so(stage: Stage, client: httpx.AsyncClient) -> None:
    await stage.add("d2")
    await forward(stage, "d2")
    stage.workers["d1"].script.die_at = 5
    events = await stream(client, presence_penalty=1.0)
    assert events[-1]["error"]["code"] == "not_resumable"
    assert {place.context.attempt for place in stage.scheduler.places} == {0}


async def test_prefill_dies_before_the_first_token(stage: Stage, client: httpx.AsyncClient) -> None:
    for name in ("p1", "p2"):
        await stage.add(name, Role.PREFILL)
    await forward(stage, "p1", "p2")
    prefill, decode = stage.workers["p1"], stage.workers["d1"]
    decode.script.stall_at = 0
    answer = asyncio.create_task(client.post(CHAT, json=body(), headers={"x-baton-disaggregation": "always"}))
    await stage.wait_for(
        lambda: prefill.attempts and any(attempt.run and attempt.run.done() for attempt in decode.attempts.values())
    )
    decode.script.stall_at = None
    prefill.die()
    assert (await answer).json()["choices"][0]["message"]["content"] == TEXT
    assert stage.workers["p2"].got(PrefillTask)
    assert decode.got(Cancel)
    await check_clean(stage)


async def test_a_failed_transfer_goes_to_another_prefill_worker(stage: Stage, client: httpx.AsyncClient) -> None:
    for name in ("p1", "p2"):
        await stage.add(name, Role.PREFILL)
    await forward(stage, "p1", "p2")
    script = stage.workers["d1"].script
    script.fail_at, script.failure = 0, TransferFailed("stalled")
    answer = asyncio.create_task(client.post(CHAT, json=body(), headers={"x-baton-disaggregation": "always"}))
    await stage.wait_for(lambda: len(stage.scheduler.places) > 1)
    script.fail_at = None
    assert (await answer).status_code == 200
    assert stage.scheduler.places[1].exclude == ("p1",)


async def test_a_worker_that_is_not_there() -> None:
    """The scheduler still places on a worker that has gone silent."""
    settings = msgspec.structs.replace(SETTINGS, accept_s=Settings().accept_s)
    async with open_stage(settings) as stage, httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client:
        await stage.add("d2")
        await forward(stage, "d2")
        stage.workers["d1"].script.silent = True
        assert (await client.post(CHAT, json=body())).status_code == 200
        first, second, *_ = [place.exclude for place in stage.scheduler.places]
        assert (first, second) == ((), ("d1",))
        await stage.wait_for(lambda: stage.workers["d1"].got(Cancel))  # It may have the task after all.


async def test_schedulers_that_answer_late_cost_no_request(stage: Stage, client: httpx.AsyncClient) -> None:
    stage.scheduler.answers = [None] * 5
    assert (await client.post(CHAT, json=body())).status_code == 200
    assert len(stage.scheduler.places) >= 6
    stage.scheduler.answers = [None] * 100
    response = await client.post(CHAT, json=body())
    assert (response.status_code, response.json()["error"]["code"]) == (503, "unavailable")


async def test_new_requests_wait_for_a_worker_that_is_restarted(stage: Stage, client: httpx.AsyncClient) -> None:
    worker = stage.workers["d1"]
    worker.die()
    await stage.wait_for(lambda: "d1" not in stage.gateway.workers.members)
    answer = asyncio.create_task(stream(client))
    await stage.wait_for(lambda: len(stage.scheduler.places) > 4)
    worker.restart()
    assert text_of(await answer) == TEXT
    await check_clean(stage)


async def test_an_answer_that_has_begun_waits_for_a_worker_that_is_restarted(
    stage: Stage, client: httpx.AsyncClient
) -> None:
    worker = stage.workers["d1"]
    worker.script.die_at = 20
    answer = asyncio.create_task(stream(client))
    await stage.wait_for(lambda: len(stage.scheduler.places) > 4)
    worker.restart()
    assert text_of(await answer) == TEXT
    await check_clean(stage)


async def test_a_worker_that_does_not_listen_yet_is_tried_until_it_does(
    stage: Stage, client: httpx.AsyncClient
) -> None:
    stage.workers["d1"].die()
    late = stage.workers["d2"] = Worker(stage, "d2")
    answer = asyncio.create_task(stream(client))
    await stage.wait_for(lambda: len(stage.scheduler.places) > 9)
    await stage.bus.subscribe(subjects.task("d2"), late.handle)
    assert text_of(await answer) == TEXT
    assert len(late.got(DecodeTask)) == 1
    await check_clean(stage)


async def test_a_client_that_leaves_ends_the_wait_for_a_worker(stage: Stage) -> None:
    stage.workers["d1"].die()
    async with httpx.AsyncClient(base_url=stage.base_url) as client:
        request = asyncio.create_task(client.post(CHAT, json=body()))
        await stage.wait_for(lambda: len(stage.scheduler.places) > 4)
        request.cancel()
        await asyncio.wait([request])
    await check_clean(stage)


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


# ---------------------------------------------------------------- clients


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("at", [0, 3])
async def test_a_client_that_leaves_frees_both_workers(stage: Stage, streamed: bool, at: int) -> None:
    prefill = await stage.add("p1", Role.PREFILL)
    await forward(stage, "p1")
    decode = stage.workers["d1"]
    decode.script.stall_at = at
    async with httpx.AsyncClient(base_url=stage.base_url) as client:
        request = asyncio.create_task(
            client.post(CHAT, json=body(stream=streamed), headers={"x-baton-disaggregation": "always"})
        )
        await stage.wait_for(lambda: [len(attempt.tokens) for attempt in decode.attempts.values()] == [at])
        request.cancel()
        await asyncio.wait([request])
    await stage.wait_for(lambda: decode.got(Cancel) and prefill.got(Cancel))
    await check_clean(stage)


async def test_a_client_that_leaves_while_its_request_is_held() -> None:
    withdrawn: list[Delivery] = []

    async def note(delivery: Delivery) -> None:
        withdrawn.append(delivery)

    async with open_scheduled_stage(SETTINGS) as stage, httpx.AsyncClient(base_url=stage.base_url) as client:
        await stage.bus.subscribe(subjects.WITHDRAWALS, note)
        stage.workers["d1"].script.capacity = 0
        request = asyncio.create_task(client.post(CHAT, json=body()))
        await stage.wait_for(lambda: [d.machine.phase for d in stage.gateway.routes.all()] == [Phase.QUEUED])
        assert not withdrawn
        request.cancel()
        await asyncio.wait([request])
        await stage.wait_for(lambda: withdrawn)
        await check_clean(stage)


async def test_a_stalled_reader_slows_no_other_and_is_cut_off() -> None:
    settings = msgspec.structs.replace(SETTINGS, unread_tokens_max=64)
    async with open_stage(settings) as stage:
        stage.say(TEXT, ends=False)
        decode = stage.workers["d1"]
        host, port = stage.base_url.removeprefix("http://").split(":")
        loop = asyncio.get_running_loop()
        with socket.socket() as stalled:
            # A small receive buffer, set before connecting, so that the kernel does not read for the client.
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.setblocking(False)
            await loop.sock_connect(stalled, (host, int(port)))
            payload = json.dumps(body(stream=True, max_tokens=4000, n=24)).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n".encode()
            await loop.sock_sendall(stalled, head + payload)
            await stage.wait_for(lambda: len(decode.attempts) == 24)
            async with httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client:
                assert text_of(await stream(client, max_tokens=len(stage.answer))) == TEXT
            await stage.wait_for(lambda: not decode.attempts and not stage.gateway.routes)
            assert len(decode.got(Cancel)) == 24
            received = b""
            while part := await loop.sock_recv(stalled, 1 << 20):
                received += part
            assert not received.endswith(b"0\r\n\r\n"), "the end of a whole answer"


async def test_a_reader_that_stalls_below_the_limit_is_cut_off_after_a_while() -> None:
    settings = msgspec.structs.replace(SETTINGS, progress_s=60.0, send_timeout_s=1.0)
    async with open_stage(settings) as stage, httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client:
        stage.say(TEXT, ends=False)
        decode = stage.workers["d1"]
        # Far fewer tokens than may stay unread, in more bytes than the stalled client's kernel takes.
        decode.script.stall_at = 200
        async with client.stream("POST", CHAT, json=body(stream=True, max_tokens=4000)) as reading:
            host, port = stage.base_url.removeprefix("http://").split(":")
            loop = asyncio.get_running_loop()
            with socket.socket() as stalled:
                stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                stalled.setblocking(False)
                await loop.sock_connect(stalled, (host, int(port)))
                payload = json.dumps(body(stream=True, max_tokens=4000)).encode()
                head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n\r\n".encode()
                await loop.sock_sendall(stalled, head + payload)
                await stage.wait_for(lambda: len(decode.attempts) == 2)
                await stage.wait_for(lambda: len(decode.attempts) == 1)
            assert reading.status_code == 200
            assert len(stage.gateway.routes) == 1, "who reads may wait for more"
        await check_clean(stage)


async def test_a_worker_that_missed_its_cancel_is_told_again(stage: Stage, client: httpx.AsyncClient) -> None:
    """Digests with abandoned attempts are answered, so that a lost message costs a second at most."""
    decode = stage.workers["d1"]
    assert (await client.post(CHAT, json=body())).status_code == 200
    await check_clean(stage)
    (task,) = decode.got(DecodeTask)
    assert isinstance(task, DecodeTask)
    decode.received.clear()
    decode.attempts["forgotten", 0] = Attempt(task, [1])
    await stage.wait_for(lambda: not decode.attempts)
    assert decode.got(Cancel)
