"""Stored responses over two gateways, as processes, with real NATS and Redis, which are killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import openai
import pytest
from openai.types.responses import Response
from redis.asyncio import Redis

from baton.messages.attempts import Cancel
from tests.harness.gateway.actors import MODEL, Actors
from tests.harness.gateway.process import TEXT, actors, gateway, wait_ready
from tests.harness.gateway.responses import rebuilt, strict_client
from tests.harness.servers import start_redis


@dataclass
class Gateways:
    cast: Actors
    processes: list[asyncio.subprocess.Process]
    clients: list[openai.AsyncOpenAI]
    prefix: str

    async def begin(self, client: openai.AsyncOpenAI) -> AsyncIterator[Any]:
        """Create a background response, and return its events."""
        made: Any = client.responses.create
        return aiter(await made(model=MODEL, input="hi", background=True, stream=True))


@asynccontextmanager
async def gateways(nats_url: str, redis_url: str, count: int = 2) -> AsyncGenerator[Gateways]:
    prefix = f"test:{uuid4().hex}"
    flags = ("--redis-url", redis_url, "--redis-prefix", prefix)
    async with AsyncExitStack() as stack:
        cast = await stack.enter_async_context(actors(nats_url))
        started: list[tuple[asyncio.subprocess.Process, str]] = []
        for _ in range(count):  # One after the other: together they would take each other's time to start.
            started.append(await stack.enter_async_context(gateway(nats_url, *flags)))
            await wait_ready(started[-1][1])
        clients = [await stack.enter_async_context(strict_client(url)) for _, url in started]
        yield Gateways(cast, [process for process, _ in started], clients, prefix)


async def create(client: openai.AsyncOpenAI, **asked: Any) -> Response:
    made: Any = client.responses.create
    return await made(**{"model": MODEL, "input": "hi", **asked})


async def ended(client: openai.AsyncOpenAI, name: str) -> Response:
    """Wait until a response has ended, and return it."""
    while (response := await client.responses.retrieve(name)).status in ("queued", "in_progress"):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    return response


async def test_one_gateway_creates_and_the_other_does_the_rest(nats_url: str, redis_url: str) -> None:
    async with gateways(nats_url, redis_url) as two:
        one, other = two.clients
        script = two.cast.workers["d1"].script
        first = await create(one)
        assert (await other.responses.retrieve(first.id)).model_dump() == first.model_dump()
        second = await create(other, input="and then?", previous_response_id=first.id)
        assert second.output_text == TEXT
        listed = [item async for item in one.responses.input_items.list(second.id)]
        assert len(listed) == 1
        script.interval_s = 0.01
        answer = await two.begin(one)
        events = [await anext(answer)]
        name = events[0].response.id
        followed = await other.responses.retrieve(name, stream=True, starting_after=0)
        events += [event async for event in followed]
        response = rebuilt([event.model_dump() for event in events])
        assert response["status"] == "completed"
        assert (await ended(other, name)).model_dump() == response
        assert [event.sequence_number async for event in answer] == list(range(1, len(events)))
        script.stall_at = 4
        running = await create(one, background=True)
        await two.cast.wait_for(lambda: any(len(a.tokens) == 4 for a in two.cast.workers["d1"].attempts.values()))
        cancelled = await other.responses.cancel(running.id)
        assert cancelled.status == "cancelled"
        assert TEXT.startswith(cancelled.output_text)
        assert cancelled.output_text
        await two.cast.wait_for(lambda: two.cast.workers["d1"].got(Cancel))
        await other.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await one.responses.retrieve(first.id)
        # A body that an intake process reads, and a gateway that drains.
        script.stall_at = None
        script.interval_s = 0.02
        long = await create(one, input="word " * 600)
        drained = await create(one, background=True, previous_response_id=long.id)
        two.processes[0].terminate()
        assert await two.processes[0].wait() == 0
        response = await other.responses.retrieve(drained.id)
        assert (response.status, response.output_text) == ("completed", TEXT)


async def test_a_response_of_a_gateway_that_dies_has_failed(nats_url: str, redis_url: str) -> None:
    async with gateways(nats_url, redis_url) as two:
        one, other = two.clients
        two.cast.workers["d1"].script.stall_at = 4
        name = (await anext(await two.begin(one))).response.id
        followed = await other.responses.retrieve(name, stream=True)
        events: list[Any] = []
        async for event in followed:
            if event.type == "response.output_text.delta" and not any(each.type == event.type for each in events):
                two.processes[0].kill()
            events.append(event)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.failed"
        assert events[-1].response.error.code == "server_error"
        failed = await other.responses.retrieve(name)
        assert failed.model_dump() == events[-1].response.model_dump()
        again = await other.responses.retrieve(name, stream=True)
        assert [event.model_dump() async for event in again] == [event.model_dump() for event in events]


async def test_a_response_outlives_an_outage_of_redis(nats_url: str) -> None:
    with start_redis() as redis:
        async with gateways(nats_url, redis.url, 1) as only:
            (one,) = only.clients
            script = only.cast.workers["d1"].script
            first = await create(one)
            script.interval_s = 0.05
            answer = await only.begin(one)
            name = (await anext(answer)).response.id
            redis.kill()
            script.interval_s = 0.0
            unstored = await create(one)
            assert (unstored.output_text, (unstored.model_extra or {})["store"]) == (TEXT, False)
            for asked in ({"store": True}, {"background": True}, {"previous_response_id": first.id}):
                with pytest.raises(openai.InternalServerError) as refused:
                    await create(one, **asked)
                assert (refused.value.status_code, refused.value.code) == (503, "store_unavailable")
            redis.start()
            # Whoever reads before the owner has renewed its lease finds it lost.
            raw = Redis.from_url(redis.url)  # pyright: ignore[reportUnknownMemberType]
            record = f"{only.prefix}:1:response:/{name}"
            while await raw.hget(record, "running") != b"0":  # noqa: ASYNC110 - another process.
                await asyncio.sleep(0.02)
            await raw.aclose()
            events = [event.model_dump() async for event in await one.responses.retrieve(name, stream=True)]
            assert rebuilt(events)["output"][0]["content"][0]["text"] == TEXT
            assert (await create(one, previous_response_id=first.id)).output_text == TEXT
