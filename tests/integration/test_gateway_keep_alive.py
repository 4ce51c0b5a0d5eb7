"""Comments in silent streams, pages of other origins, and headers that name workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from baton_gateway.config import Settings

from baton.errors import Overloaded
from tests.harness.gateway.actors import MODEL
from tests.harness.gateway.stage import Stage, open_stage
from tests.harness.limits import HANG_S
from tests.integration.test_openai_errors import error_of

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
COMMENT = ": keep-alive"


@asynccontextmanager
async def serving(**settings: Any) -> AsyncGenerator[tuple[Stage, httpx.AsyncClient]]:
    async with open_stage(Settings(port=0, admission_wait_s=0.2, **settings)) as stage:
        stage.say("jumps over")
        async with httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S, verify=False) as client:
            yield stage, client


async def lines_of(response: httpx.Response, count: int) -> list[str]:
    """Return the first lines that are not empty."""
    lines: list[str] = []
    async for line in response.aiter_lines():
        if line:
            lines.append(line)
        if len(lines) == count:
            break
    return lines


async def test_a_stream_before_its_first_token_gets_the_status_and_comments() -> None:
    async with serving(stream_keep_alive_s=0.3) as (stage, client):
        script = stage.workers["d1"].script
        script.stall_at = 0
        async with client.stream("POST", CHAT, json=HI) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            assert await lines_of(response, 3) == [COMMENT] * 3


async def test_a_stream_that_pauses_gets_comments_and_goes_on() -> None:
    async with serving(stream_keep_alive_s=0.2) as (stage, client):
        script = stage.workers["d1"].script
        script.interval_s = 0.5
        body = {**HI, "max_tokens": 3}
        comments = [(await client.post(CHAT, json=body)).text for _ in range(2)]
        script.interval_s = 0.0
        plain = (await client.post(CHAT, json=body)).text
    for text in comments:
        assert text.count(f"{COMMENT}\n\n") >= 2
        events = text.replace(f"{COMMENT}\n\n", "").split("\n\n")
        assert len(events) == len(plain.split("\n\n"))
        assert events[-2] == "data: [DONE]"


async def test_a_stream_that_flows_gets_none() -> None:
    async with serving(stream_keep_alive_s=2.0) as (stage, client):
        stage.say("on and on " * 40, ends=False)
        stage.workers["d1"].script.interval_s = 0.02
        texts: list[str] = []
        while not texts or (COMMENT in texts[-1] and len(texts) < 5):  # A busy machine makes a pause itself.
            texts.append((await client.post(CHAT, json={**HI, "max_tokens": 150})).text)
    assert COMMENT not in texts[-1]
    assert texts[-1].endswith("data: [DONE]\n\n")


async def test_a_refusal_before_the_first_comment_is_a_status() -> None:
    async with serving(stream_keep_alive_s=5.0) as (stage, client):
        stage.scheduler.refusal = Overloaded("full", retry_after_s=1.0)
        error_of(await client.post(CHAT, json=HI), 429, "overloaded")


async def test_a_failure_after_the_first_comment_is_an_event() -> None:
    async with serving(stream_keep_alive_s=0.1) as (stage, client):
        stage.workers["d1"].script.stall_at = 0
        response = await client.post(CHAT, json=HI, headers={"x-baton-deadline-s": "2"})
    assert response.status_code == 200
    *comments, last = response.text.strip().split("\n\n")
    assert set(comments) == {COMMENT}
    assert '"code":"deadline_exceeded"' in last


async def test_without_a_time_there_are_no_comments() -> None:
    async with serving(stream_keep_alive_s=0.0) as (stage, client):
        stage.workers["d1"].script.stall_at = 0
        response = await client.post(CHAT, json=HI, headers={"x-baton-deadline-s": "0.5"})
        error_of(response, 504, "deadline_exceeded")


async def test_a_client_that_leaves_during_comments_ends_the_attempt() -> None:
    async with serving(stream_keep_alive_s=0.1) as (stage, client):
        stage.workers["d1"].script.stall_at = 0
        async with client.stream("POST", CHAT, json=HI) as response:
            await lines_of(response, 1)
            assert stage.workers["d1"].attempts
        await stage.wait_for(lambda: not stage.workers["d1"].attempts)


# ---------------------------------------------------------------- pages of other origins

PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}


async def test_pages_of_other_origins_are_refused_by_default() -> None:
    async with serving() as (_, client):
        answer = await client.options(CHAT, headers={"origin": "https://chat.example", **PREFLIGHT})
        error_of(answer, 405, "method_not_allowed")
        assert "access-control-allow-origin" not in (await client.get("/v1/models")).headers


async def test_pages_of_origins_that_the_operator_allows() -> None:
    async with serving(cors_origins=("https://chat.example",), api_keys=("secret",)) as (_, client):
        mine, others = {"origin": "https://chat.example"}, {"origin": "https://evil.example"}
        preflight = await client.options(CHAT, headers={**mine, **PREFLIGHT})
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, mine["origin"])
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        assert (await client.options(CHAT, headers={**others, **PREFLIGHT})).status_code == 400
        key = {"authorization": "Bearer secret"}
        for stream in (False, True):
            answer = await client.post(CHAT, json={**HI, "stream": stream}, headers={**mine, **key})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, mine["origin"])
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = await client.post(CHAT, json=HI, headers=mine)
        error_of(refused, 401, "invalid_api_key")
        assert refused.headers["access-control-allow-origin"] == mine["origin"]
        answer = await client.post(CHAT, json=HI, headers={**others, **key})
        error_of(answer, 403, "permission_denied")
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1", "http://127.0.0.1:1"])
async def test_a_page_of_another_origin_cannot_post_unasked(origin: str) -> None:
    plain = {"origin": origin, "content-type": "text/plain"}
    async with serving() as (stage, client):
        error_of(await client.post(CHAT, json=HI, headers=plain), 403, "permission_denied")
        refused = await client.post("/v1/messages", json={**HI, "max_tokens": 5}, headers=plain)
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert not stage.scheduler.places
        assert (await client.post(CHAT, json=HI, headers={**plain, "origin": stage.base_url})).status_code == 200
    async with serving(cors_origins=("*",)) as (_, client):
        answer = await client.post(CHAT, json=HI, headers=plain)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


# ---------------------------------------------------------------- names of workers


@pytest.mark.parametrize("stream", [False, True])
async def test_workers_are_named_where_the_operator_allows_it(stream: bool) -> None:
    async with serving(routing_headers=True) as (_, client):
        answer = await client.post(CHAT, json={**HI, "stream": stream, "n": 2})
        assert (answer.headers["x-baton-decode"], answer.headers["x-baton-prefill"]) == ("d1, d1", "-, -")
    async with serving() as (_, client):
        assert "x-baton-decode" not in (await client.post(CHAT, json={**HI, "stream": stream})).headers
