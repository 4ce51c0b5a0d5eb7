"""Failures between gateway and workers. Clients see nothing of them, or a typed error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
from baton_gateway.config import Settings
from baton_gateway.service import BEAT_S

from baton import subjects
from baton.blocks import hash_blocks, root_key
from baton.errors import BatonError, EngineFailed, TransferFailed
from baton.messages.attempts import Cancel, Constraint, ConstraintKind, DecodeTask, Frame, PrefillTask, Resend
from baton.messages.base import TOKEN_BYTES, unpack_tokens
from baton.messages.workers import Role
from tests.harness.gateway.actors import Attempt, Worker
from tests.harness.gateway.chats import CHAT, SETTINGS, TEXT, body, check_clean, open_talking_stage, stream, text_of
from tests.harness.gateway.stage import Stage, forward, open_stage
from tests.harness.heartbeats import MODEL_DIGEST, heartbeat
from tests.harness.limits import HANG_S


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with open_talking_stage() as opened:
        yield opened


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as opened:
        yield opened


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


async def test_a_model_that_was_replaced_is_forgotten(stage: Stage) -> None:
    path = str(stage.model_path)

    async def replace(digest: str, generation: int) -> None:
        beat = heartbeat("d2", generation=generation, model="other", model_path=path, model_digest=digest)
        await stage.bus.publish(subjects.HEARTBEAT, beat)
        await stage.wait_for(lambda: (path, digest) in stage.models.loaded)

    await stage.wait_for(lambda: (path, MODEL_DIGEST) in stage.models.loaded)
    await replace("before", 1)
    await replace("after", 2)
    await stage.wait_for(lambda: (path, "before") not in stage.models.loaded)
    # d2 is lost by now, and requests wait for it for a minute.
    await stage.wait_for(lambda: "d2" not in stage.gateway.workers.members)
    await asyncio.sleep(BEAT_S)
    assert stage.models.loaded == {(path, MODEL_DIGEST), (path, "after")}


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


async def test_the_lack_of_a_scheduler_is_told_from_schedulers_that_do_not_answer() -> None:
    stage = Stage(Settings(port=0, admission_wait_s=0.2))
    stage.scripted_scheduler = False
    async with stage.standing(), stage.serving(), httpx.AsyncClient(base_url=stage.base_url) as client:
        await stage.add("d1")
        await forward(stage, "d1")
        for response in (await client.post(CHAT, json=body()), await client.get("/ready")):
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (503, "no_responders")
            assert error["message"] == "no scheduler listens on the message bus"


async def test_all_who_ask_for_readiness_get_the_answer_of_one_probe(stage: Stage) -> None:
    stage.scheduler.answers = [None] * 100
    asked = [asyncio.create_task(stage.gateway.check_ready()) for _ in range(20)]
    refusals = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(each, BatonError) for each in refusals)
    assert len(stage.scheduler.places) == 1
    with pytest.raises(BatonError):
        await stage.gateway.check_ready()
    assert len(stage.scheduler.places) == 2


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
