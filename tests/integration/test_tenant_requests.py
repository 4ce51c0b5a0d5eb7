"""API keys, their rights and limits, as clients see them over HTTP."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import httpx
import openai
import pytest
from baton_gateway.config import Settings
from baton_gateway.tenants.command import create, revoke
from baton_gateway.tenants.keys import Usage, digest_of, key_id
from baton_gateway.tenants.store import RedisTenantStore
from baton_gateway.tenants.tenant import Permission, Tenant

from baton.clock import SystemClock
from baton.messages.attempts import DecodeTask
from baton.messages.placement import Place
from baton.redis import RedisConnection
from tests.harness.gateway.actors import MODEL
from tests.harness.gateway.stage import Stage, open_stage
from tests.harness.limits import HANG_S
from tests.integration.test_openai_errors import error_of

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
LONG = "the quick brown fox jumps over the lazy dog. " * 200
"""Longer than what is read in the gateway's own process."""


class World:
    """A gateway with stored keys, kept for a moment only, and its clients."""

    def __init__(self, stage: Stage, store: RedisTenantStore) -> None:
        self.stage = stage
        self.store = store
        self.client = httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S)

    async def new_key(self, tenant: str = "acme", **rights: Any) -> str:
        key, _ = await create(self.store, tenant=tenant, rights=Tenant(**rights))
        return key

    async def post(self, key: str, headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
        body = {**HI, **changes}
        return await self.client.post(CHAT, json=body, headers={"authorization": f"Bearer {key}", **(headers or {})})

    async def usage(self, key: str) -> Usage:
        reports = await self.store.report()
        return next(report.usage for report in reports if report.record.id == key_id(digest_of(key)))

    def places(self) -> list[Place]:
        """Return what the scheduler was last asked for each request, in their order."""
        return list({place.context.request: place for place in self.stage.scheduler.places}.values())

    def salts(self) -> list[str]:
        """Return the salt of each request, in their order. On a busy machine a task may be sent more than once."""
        tasks = [task for task in self.stage.workers["d1"].got(DecodeTask) if isinstance(task, DecodeTask)]
        salts = {task.context.request: task.cache_salt for task in tasks}
        assert [task for task in tasks if task.cache_salt != salts[task.context.request]] == []
        return list(salts.values())


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[RedisConnection]:
    connection = RedisConnection(redis_url, clock=SystemClock(), timeout_s=10.0)
    yield connection
    await connection.close()


@pytest.fixture
async def world(redis: RedisConnection) -> AsyncIterator[World]:
    prefix = uuid.uuid4().hex
    settings = Settings(port=0, stored_keys=True, keys_kept_s=0.001, api_keys=("static",), redis_prefix=prefix)
    async with open_stage(settings, redis=redis) as stage:
        stage.say("ok")
        world = World(stage, RedisTenantStore(redis, prefix=prefix))
        yield world
        await world.client.aclose()


async def test_a_key_opens_the_gateway_until_it_is_revoked(world: World) -> None:
    key = await world.new_key()
    assert (await world.post(key)).status_code == 200
    assert (await world.client.post(CHAT, json=HI, headers={"x-api-key": key})).status_code == 200
    assert (await world.post("static")).status_code == 200, "keys in the settings go on"
    for wrong in ("nope", key[:-1], key + " " + key):
        refused = await world.post(wrong)
        assert error_of(refused, 401, "invalid_api_key")["type"] == "authentication_error"
        assert refused.headers["www-authenticate"] == "Bearer"
    await revoke(world.store, key_id(digest_of(key)))
    async with asyncio.timeout(HANG_S):
        while (await world.post(key)).status_code == 200:
            pass
    error_of(await world.post(key), 401, "invalid_api_key")


async def test_a_key_has_a_right_to_its_models_only(world: World) -> None:
    await world.stage.add("d2", model="other")
    await world.stage.wait_for(lambda: len(world.stage.gateway.workers.models()) == 2)
    key = await world.new_key(models=(MODEL, "absent"))
    assert (await world.post(key)).status_code == 200
    said = error_of(await world.post(key, model="other"), 403, "permission_denied")
    assert (said["param"], said["type"]) == ("model", "permission_error")
    long = [{"role": "user", "content": LONG}]
    error_of(await world.post(key, model="other", messages=long), 403, "permission_denied")
    error_of(await world.post(key, model="not there"), 403, "permission_denied")
    error_of(await world.post(key, model="absent"), 404, "model_not_found")
    headers = {"authorization": f"Bearer {key}"}
    listed = (await world.client.get("/v1/models", headers=headers)).json()["data"]
    assert [model["id"] for model in listed] == [MODEL]
    assert (await world.client.get(f"/v1/models/{MODEL}", headers=headers)).status_code == 200
    error_of(await world.client.get("/v1/models/other", headers=headers), 403, "permission_denied")
    every = (await world.client.get("/v1/models", headers={"authorization": "Bearer static"})).json()["data"]
    assert {model["id"] for model in every} == {MODEL, "other"}


async def test_requests_per_minute_are_limited_in_openais_form(world: World) -> None:
    key = await world.new_key(requests_per_minute=2)
    first, second, third = [await world.post(key) for _ in range(3)]
    assert [first.status_code, second.status_code, third.status_code] == [200, 200, 429]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in (first, second, third)] == ["1", "0", "0"]
    assert error_of(third, 429, "rate_limit_exceeded")["type"] == "rate_limit_error"
    assert 20 <= int(third.headers["retry-after"]) <= 30
    models = await world.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    assert models.status_code == 200, "only what computes is limited"
    client = openai.AsyncOpenAI(base_url=f"{world.stage.base_url}/v1", api_key=key, max_retries=0)
    with pytest.raises(openai.RateLimitError):
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    await client.close()
    assert "x-ratelimit-limit-requests" not in (await world.post(await world.new_key())).headers


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_state_the_limits_in_anthropics_form(world: World, stream: bool) -> None:
    key = await world.new_key(requests_per_minute=2, tokens_per_minute=5000)
    sent = {"authorization": f"Bearer {key}"}
    body, began_at = {**HI, "max_tokens": 50, "stream": stream}, datetime.now(UTC)
    first, _, third = [await world.client.post("/v1/messages", json=body, headers=sent) for _ in range(3)]
    assert (first.status_code, third.status_code) == (200, 429)
    assert third.json()["error"]["type"] == "rate_limit_error"
    prefix = "anthropic-ratelimit-"
    stated = {name.removeprefix(prefix): first.headers[name] for name in first.headers if name.startswith(prefix)}
    assert set(stated) == {
        f"{limit}-{what}" for limit in ("requests", "tokens") for what in ("limit", "remaining", "reset")
    }
    assert (stated["requests-limit"], stated["requests-remaining"], stated["tokens-limit"]) == ("2", "1", "5000")
    assert stated["tokens-remaining"] == first.headers["x-ratelimit-remaining-tokens"]
    for answer, limit, after_s in ((first, "requests", 30), (first, "tokens", 1), (third, "requests", 60)):
        reset_at = datetime.strptime(answer.headers[f"{prefix}{limit}-reset"], "%Y-%m-%dT%H:%M:%S%z")
        assert -1 <= (reset_at - began_at).total_seconds() - after_s < HANG_S
    assert not any(name.startswith(prefix) for name in (await world.post(key)).headers)


async def test_tokens_per_minute_are_reserved_and_settled(world: World) -> None:
    key = await world.new_key(tokens_per_minute=3000)
    first = await world.post(key, n=2, max_tokens=50)
    usage = first.json()["usage"]
    reserved = 3000 - int(first.headers["x-ratelimit-remaining-tokens"])
    assert reserved == usage["prompt_tokens"] + 2 * 50
    expected = Usage(
        requests=1, prompt_tokens=usage["prompt_tokens"], output_tokens=usage["completion_tokens"], cached_tokens=0
    )
    await until_used(world, key, expected)
    second = await world.post(key, max_tokens=3000)
    left = int(second.headers["x-ratelimit-remaining-tokens"])
    assert left >= 3000 - usage["total_tokens"] - usage["prompt_tokens"] - 1024 - 1, "the rest was given back"
    third = await world.post(key, max_tokens=3000, n=4)
    error_of(third, 429, "rate_limit_exceeded")
    assert int(third.headers["retry-after"]) >= 1
    small = await world.new_key(tokens_per_minute=100)
    long = [{"role": "user", "content": LONG}]
    over = error_of(await world.post(small, messages=long), 400, "invalid_request")
    assert "may use 100 per minute" in over["message"], "no later try could succeed"


async def until_used(world: World, key: str, expected: Usage) -> None:
    async with asyncio.timeout(HANG_S):
        while (await world.usage(key)) != expected:  # noqa: ASYNC110 - Redis tells nobody.
            await asyncio.sleep(0.02)


async def test_a_refused_stream_is_a_plain_error_and_a_running_one_is_counted(world: World) -> None:
    key = await world.new_key(tokens_per_minute=1100)
    whole = await world.post(key, stream=True, stream_options={"include_usage": True}, max_tokens=1000)
    assert (whole.status_code, whole.headers["x-ratelimit-limit-tokens"]) == (200, "1100")
    assert whole.text.endswith("data: [DONE]\n\n")
    refused = await world.post(key, stream=True, n=2, max_tokens=1000)
    error_of(refused, 429, "rate_limit_exceeded")
    async with asyncio.timeout(HANG_S):
        while (await world.usage(key)).output_tokens == 0:  # noqa: ASYNC110 - Redis tells nobody.
            await asyncio.sleep(0.02)
    assert (await world.usage(key)).requests == 1


async def test_a_failed_request_costs_nothing(world: World) -> None:
    key = await world.new_key(tokens_per_minute=1000)
    world.stage.workers["d1"].script.capacity = 0
    settings = world.stage.gateway.settings
    assert settings.admission_wait_s > 1
    answer = await world.post(key, {"x-baton-deadline-s": "0.3"}, max_tokens=10)
    assert answer.status_code >= 429
    await until_used(world, key, Usage(requests=1))
    world.stage.workers["d1"].script.capacity = 64
    whole = await world.post(key, max_tokens=900)
    assert whole.status_code == 200, "all tokens were given back"


async def test_each_tenant_has_a_salt_on_both_ways_into_the_gateway(world: World) -> None:
    share = frozenset({Permission.SHARE_PREFIX_CACHE})
    one, again, two = await world.new_key("one"), await world.new_key("one"), await world.new_key("two")
    shared = await world.new_key("three", permissions=share)
    long: dict[str, Any] = {"messages": [{"role": "user", "content": LONG[:4000]}]}
    for key in (one, again, two, "static", shared):
        for changes in (dict[str, Any](), {"cache_salt": "own"}, long):
            assert (await world.post(key, None, **changes)).status_code == 200
    salts = world.salts()
    rows = [salts[start : start + 3] for start in range(0, 15, 3)]
    assert rows[0] == rows[1], "keys of one tenant share"
    assert len({tuple(row) for row in rows}) == 4
    assert all(row[0] == row[2] != row[1] for row in rows)
    assert rows[4] == ["", "own", ""], "by permission, as without keys"
    assert "own" not in {row[1] for row in rows[:4]}
    blocks = [place.blocks for place in world.places()]
    assert blocks[2] == blocks[5] != blocks[8], "schedulers and indexes see no more"


async def test_schedulers_get_tenant_priority_and_weight_of_the_key(world: World) -> None:
    key = await world.new_key("acme", weight=3.0, priority=4)
    proxy = await world.new_key(
        "proxy", priority=4, permissions=frozenset({Permission.SET_TENANT, Permission.SET_PRIORITY})
    )
    claims = {"x-baton-priority": "2"}
    assert (await world.post(key, claims)).status_code == 200
    assert (await world.post(proxy, {**claims, "x-baton-tenant": "customer"})).status_code == 200
    error_of(await world.post(key, {"x-baton-tenant": "customer"}), 403, "permission_denied")
    error_of(await world.post(proxy, {"x-baton-tenant": "no name"}), 400, "invalid_request")
    first, second = world.places()
    assert (first.tenant, first.priority, first.weight) == ("acme", 4, 3.0)
    assert (second.tenant, second.priority) == ("customer", 2)


async def test_tenants_do_not_share_the_name_of_a_conversation(world: World) -> None:
    one, two = await world.new_key("one"), await world.new_key("two")
    for key in (one, one, two):
        assert (await world.post(key, {"x-baton-session": "session"})).status_code == 200
    first, again, other = [place.session for place in world.places()]
    assert first == again != other


async def test_a_resumed_answer_keeps_its_salt(world: World) -> None:
    stage, key = world.stage, await world.new_key()
    stage.workers["d1"].script.die_at = 1
    answer = asyncio.create_task(world.post(key, stream=True))
    await stage.wait_for(world.salts)
    second = await stage.add("d2")
    assert (await answer).text.endswith("data: [DONE]\n\n")
    resumed = [task.cache_salt for task in second.got(DecodeTask) if isinstance(task, DecodeTask)]
    assert resumed == world.salts()[:1] != [""]


async def test_spans_and_messages_have_no_key(world: World) -> None:
    key = await world.new_key(requests_per_minute=2)
    for presented in (key, key, key, "sk-baton-wrong", "static"):
        await world.post(presented)
    stage = world.stage
    await stage.wait_for(lambda: len(stage.spans) > 5)
    outputs = repr([stage.spans, stage.scheduler.places, stage.workers["d1"].received])
    for secret in (key, key.removeprefix("sk-baton-"), "sk-baton-wrong", "'static'"):
        assert secret not in outputs


async def test_a_chat_template_and_tokenizing_need_the_keys_rights(world: World) -> None:
    trusted = await world.new_key(permissions=frozenset({Permission.CHAT_TEMPLATE}))
    other = await world.new_key(models=("absent",), requests_per_minute=1)
    template = {"chat_template": "{{ messages[0]['content'] }}"}
    assert (await world.post(trusted, None, **template)).status_code == 200
    said = error_of(await world.post("static", None, **template), 400, "invalid_request")
    assert "chat-template" in said["message"]
    headers = {"authorization": f"Bearer {other}"}
    body = {"model": MODEL, "prompt": "hi"}
    refused = await world.client.post("/tokenize", json=body, headers=headers)
    error_of(refused, 403, "permission_denied")
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    error_of(await world.client.post("/tokenize", json=body, headers=headers), 429, "rate_limit_exceeded")
