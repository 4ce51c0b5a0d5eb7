"""Requests with an idempotency key: one answer per key, whether its client stays or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from baton_gateway.config import Settings
from baton_gateway.idempotency_store import LEASE_S, Claimed, MemoryAnswers, RedisAnswers, Running
from baton_gateway.responses.redis_store import RedisStore

from baton.clock import SystemClock
from baton.errors import StoreUnavailable
from baton.messages.attempts import Cancel, DecodeTask
from baton.redis import connected
from tests.harness.gateway.actors import MODEL
from tests.harness.gateway.responses import with_store
from tests.harness.gateway.stage import Stage, forward, open_stage
from tests.harness.limits import HANG_S

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
HELLO = "Hello! And then it stops."

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with open_stage(Settings(port=0, api_keys=("one", "two")), store=with_store()) as opened:
        opened.say(HELLO)
        yield opened


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stage.base_url, verify=False, timeout=HANG_S) as opened:
        yield opened


def asked(path: str, **fields: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    if path == "/v1/responses":
        said = {"input": "hi"}
    elif path == MESSAGES:
        said["max_tokens"] = 100
    return {"model": MODEL, **said, **fields}


def keyed(key: str = "k", tenant: str = "one") -> dict[str, str]:
    return {"idempotency-key": key, "authorization": f"Bearer {tenant}"}


def started(stage: Stage) -> int:
    return len(stage.workers["d1"].got(DecodeTask))


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_request_gets_the_same_answer(
    stage: Stage, client: httpx.AsyncClient, path: str, stream: bool
) -> None:
    stage.workers["d1"].script.interval_s = 0.005
    body = asked(path, stream=stream)
    answers = await asyncio.gather(*(client.post(path, json=body, headers=keyed()) for _ in range(3)))
    answers.append(await client.post(path, json=body, headers=keyed()))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    end = 'data: {"type":"message_stop"}\n\n' if path == MESSAGES else "data: [DONE]\n\n"
    assert answers[0].text.endswith(end) if stream else HELLO in answers[0].text
    assert len({answer.headers["content-type"] for answer in answers}) == 1
    assert len({answer.headers["x-request-id"] for answer in answers}) == 4
    assert sum("idempotent-replayed" in answer.headers for answer in answers) == 3
    assert started(stage) == 1
    again = await client.post(path, json=body, headers=keyed("another"))
    assert again.content != answers[0].content
    assert started(stage) == 2


async def test_another_body_or_path_is_refused(stage: Stage, client: httpx.AsyncClient) -> None:
    await client.post(CHAT, json=asked(CHAT), headers=keyed())
    for path, fields in ((CHAT, {"seed": 1}), ("/v1/responses", {})):
        answer = await client.post(path, json=asked(path, **fields), headers=keyed())
        assert answer.status_code == 422
        assert answer.json()["error"]["code"] == "idempotency_key_reused"
    other = await client.post(CHAT, json=asked(CHAT, seed=1), headers=keyed(tenant="two"))
    assert other.status_code == 200
    for key in ("", "x" * 256):
        answer = await client.post(CHAT, json=asked(CHAT), headers=keyed(key))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


async def test_errors_are_not_kept(stage: Stage, client: httpx.AsyncClient) -> None:
    for expected in (404, 200, 200):
        name = "unknown" if expected == 404 else MODEL
        answer = await client.post(CHAT, json=asked(CHAT, model=name), headers=keyed())
        assert answer.status_code == expected
    assert started(stage) == 1


async def test_a_client_that_leaves_comes_back_to_its_answer(stage: Stage, client: httpx.AsyncClient) -> None:
    script = stage.workers["d1"].script
    script.interval_s = 0.02
    body = asked(CHAT, stream=True)
    async with client.stream("POST", CHAT, json=body, headers=keyed()) as first:
        chunks = first.aiter_bytes()
        beginning = await anext(chunks)
    answer = await client.post(CHAT, json=body, headers=keyed())
    assert answer.content.startswith(beginning)
    assert answer.text.endswith("data: [DONE]\n\n")
    texts = [json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in answer.text.split("\n\n")[:-2]]
    assert "".join(texts) == HELLO
    assert started(stage) == 1
    assert not stage.workers["d1"].got(Cancel)


async def test_a_long_body_is_held_once_and_not_while_it_is_answered() -> None:
    # A tenant's second body of this length would be refused.
    settings = Settings(port=0, api_keys=("one",), bodies_bytes_max=1 << 20)
    async with open_stage(settings) as stage, httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client:
        stage.say(HELLO)
        stage.workers["d1"].script.interval_s = 0.02
        content = json.dumps(asked(CHAT, stream=True)).encode() + b" " * (300 << 10)
        async with client.stream("POST", CHAT, content=content, headers=keyed()) as answer:
            assert answer.status_code == 200
            async for _ in answer.aiter_bytes():
                assert stage.gateway.bodies.shares.held_bytes == 0


class Stalling(MemoryAnswers):
    """A store whose first claim is written, and answered late or never."""

    def __init__(self, lost: bool) -> None:
        super().__init__(SystemClock(), ttl_s=60.0)
        self._lost = lost
        self.claimed = asyncio.Event()

    async def claim(self, name: str, digest: str, claim: str) -> Claimed | Running | bytes | None:
        found = await super().claim(name, digest, claim)
        if not self.claimed.is_set():
            self.claimed.set()
            if self._lost:
                raise StoreUnavailable("no answer in time")
            await asyncio.sleep(HANG_S)
        return found


@pytest.mark.parametrize(
    ("lost", "status"),
    [(False, None), (True, 503), (False, 409)],
    ids=["the client leaves", "the store is silent", "the deadline passes"],
)
async def test_a_claim_without_an_answer_is_not_waited_for(lost: bool, status: int | None) -> None:
    deadline_s = 2.0 if status == 409 else HANG_S
    stage, store = Stage(Settings(port=0, api_keys=("one",), deadline_s=deadline_s)), Stalling(lost)
    stage.answers = store
    stage.say(HELLO)
    async with stage.standing(), stage.serving(), httpx.AsyncClient(base_url=stage.base_url) as client:
        await stage.add("d1")
        await forward(stage, "d1")
        first = asyncio.create_task(client.post(CHAT, json=asked(CHAT), headers=keyed()))
        await store.claimed.wait()
        if status is not None:
            assert (await first).status_code == status
        else:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        async with asyncio.timeout(LEASE_S / 2):
            again = await client.post(CHAT, json=asked(CHAT), headers=keyed(), timeout=HANG_S)
        assert again.status_code == 200


async def test_clients_are_not_told_where_redis_is(caplog: pytest.LogCaptureFixture) -> None:
    clock = SystemClock()
    async with connected(NOWHERE, clock=clock, timeout_s=HANG_S) as redis:
        assert redis is not None
        settings = Settings(port=0, api_keys=("one",), stored_keys=True, redis_url=NOWHERE)
        store = RedisStore(redis, clock=clock, prefix="p", ttl_s=60.0, bytes_max=1 << 20)
        stage = Stage(settings, redis=redis, store=store)
        stage.answers = RedisAnswers(redis, prefix="p", ttl_s=60.0)
        async with stage.standing(), stage.serving(), httpx.AsyncClient(base_url=stage.base_url) as client:
            await stage.add("d1")
            await forward(stage, "d1")
            key = {"authorization": "Bearer one"}
            path = "/v1/responses"
            answers = [
                await client.post(path, json=asked(path, store=True), headers=key),
                await client.get(f"{path}/resp_x", headers=key),
                await client.post(CHAT, json=asked(CHAT), headers=keyed()),
                await client.get("/v1/models", headers={"authorization": "Bearer two"}),
            ]
    responses, keys = "the store of responses cannot be reached", "the store of idempotency keys cannot be reached"
    said = [answer.json()["error"]["message"] for answer in answers]
    assert said == [responses, responses, keys, "API keys cannot be checked now"]
    assert [(answer.status_code, answer.headers.get("retry-after")) for answer in answers] == [(503, "1")] * 4
    causes = [each.getMessage() for each in caplog.records if each.name == "baton.redis"]
    assert len(causes) == 1, "one for all that fail in a row"
    assert "127.0.0.1:1" in causes[0]
