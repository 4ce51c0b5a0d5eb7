"""The gateway as a process of its own, on a real NATS server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import openai
import pytest
from baton_gateway.config import Settings

from baton import subjects
from baton.bus import Delivery
from baton.messages.attempts import Cancel, DecodeTask, PrefillTask
from baton.messages.workers import Role
from tests.harness.gateway.actors import MODEL, tiny_model
from tests.harness.gateway.process import TEXT, actors, gateway, spawn, until_refused, wait_ready
from tests.harness.limits import HANG_S
from tests.harness.servers import start_nats


async def test_the_sdk_over_processes_and_nats(nats_url: str) -> None:
    async with AsyncExitStack() as stack:
        cast = await stack.enter_async_context(actors(nats_url))
        prefill = await cast.add("p1", Role.PREFILL)
        _, url = await stack.enter_async_context(gateway(nats_url))
        await wait_ready(url)
        client = await stack.enter_async_context(openai.AsyncOpenAI(base_url=url + "/v1", api_key="x", max_retries=0))
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True,
            extra_headers={"x-baton-disaggregation": "always"},
        )  # fmt: skip
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == TEXT
        assert prefill.got(PrefillTask)
        long = await client.completions.create(model=MODEL, prompt=[7] * 4000, max_tokens=5)
        assert long.usage is not None
        assert long.usage.prompt_tokens == 4000
        await cast.wait_for(lambda: not prefill.attempts and not cast.workers["d1"].attempts)


async def test_answers_that_came_during_a_pause_of_the_gateway_count(nats_url: str) -> None:
    """A worker is not taken for silent because the gateway could not read its answer."""
    async with AsyncExitStack() as stack:
        cast = await stack.enter_async_context(actors(nats_url))
        process, url = await stack.enter_async_context(gateway(nats_url))
        await wait_ready(url)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=HANG_S))
        worker, body = cast.workers["d1"], {"model": MODEL, "prompt": "x", "max_tokens": 5}
        resume = asyncio.get_running_loop().call_later

        async def pause(delivery: Delivery) -> None:
            if isinstance(delivery.message, DecodeTask):
                process.send_signal(signal.SIGSTOP)
                resume(0.4, process.send_signal, signal.SIGCONT)

        await cast.bus.subscribe(subjects.task("d1"), pause)
        for _ in range(5):  # A busy machine makes pauses of its own.
            worker.received.clear()
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            if not worker.got(Cancel):
                break
        assert not worker.got(Cancel)


async def test_sigterm_finishes_streams_and_leaves(nats_url: str) -> None:
    async with AsyncExitStack() as stack:
        cast = await stack.enter_async_context(actors(nats_url))
        cast.workers["d1"].script.interval_s = 0.05
        process, url = await stack.enter_async_context(gateway(nats_url))
        await wait_ready(url)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=HANG_S))
        async with client.stream(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 20}
        ) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            await until_refused(url)
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert await asyncio.wait_for(process.wait(), HANG_S) == 0


async def test_while_it_closes_a_gateway_is_not_ready_but_serves_and_ends_connections(nats_url: str) -> None:
    """A draining gateway reports it at /ready, so that a proxy sees it, and still serves requests."""
    async with AsyncExitStack() as stack:
        cast = await stack.enter_async_context(actors(nats_url))
        process, url = await stack.enter_async_context(gateway(nats_url, "--drain-delay-s", "60"))
        await wait_ready(url)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=HANG_S))
        idle = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=HANG_S))
        assert "connection" not in (await client.get("/health")).headers
        assert (await idle.get("/health")).status_code == 200
        process.send_signal(signal.SIGTERM)
        while (ready := await client.get("/ready")).status_code != 503:
            pass
        assert ready.headers["connection"] == "close"
        body = {"model": MODEL, "prompt": "x", "max_tokens": 3}
        answer = await client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        process.send_signal(signal.SIGTERM)  # The second one ends the delay.
        assert await asyncio.wait_for(process.wait(), HANG_S) == 0
        with pytest.raises(httpx.TransportError):
            await idle.get("/health")
        assert not cast.workers["d1"].attempts


async def test_a_second_signal_ends_a_gateway_at_once_and_tells_the_workers(nats_url: str) -> None:
    async with AsyncExitStack() as stack:
        cast = await stack.enter_async_context(actors(nats_url))
        decode = cast.workers["d1"]
        decode.script.stall_at = 2
        process, url = await stack.enter_async_context(gateway(nats_url, "--drain-s", "60"))
        await wait_ready(url)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=HANG_S))
        request = asyncio.create_task(client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}))
        await cast.wait_for(lambda: decode.got(DecodeTask))
        process.send_signal(signal.SIGTERM)
        await until_refused(url)
        assert process.returncode is None
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), HANG_S) == 0
        await cast.wait_for(lambda: decode.got(Cancel))
        await asyncio.wait([request])


async def test_a_stream_beyond_the_drain_budget_is_cancelled(nats_url: str) -> None:
    async with AsyncExitStack() as stack:
        cast = await stack.enter_async_context(actors(nats_url))
        decode = cast.workers["d1"]
        decode.script.stall_at = 2
        process, url = await stack.enter_async_context(gateway(nats_url, "--drain-s", "1"))
        await wait_ready(url)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=HANG_S))
        request = asyncio.create_task(client.post("/v1/completions", json={"model": MODEL, "prompt": "x"}))
        await cast.wait_for(lambda: decode.got(DecodeTask))
        process.send_signal(signal.SIGTERM)
        await cast.wait_for(lambda: decode.got(Cancel))
        assert await asyncio.wait_for(process.wait(), HANG_S) == 0
        answer = await request
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


async def test_a_new_gateway_knows_the_workers_before_it_answers(nats_url: str) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(actors(nats_url))
        _, url = await stack.enter_async_context(gateway(nats_url))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=HANG_S))
        async with asyncio.timeout(HANG_S):
            while True:
                try:
                    first = await client.get("/v1/models")
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.01)
        assert [model["id"] for model in first.json()["data"]] == [MODEL]


async def test_nats_goes_away_and_comes_back() -> None:
    with start_nats() as server:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(actors(server.url))
            _, url = await stack.enter_async_context(gateway(server.url))
            await wait_ready(url)
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=HANG_S))
            body = {"model": MODEL, "prompt": "x"}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            server.kill()
            waiting = asyncio.create_task(client.post("/v1/completions", json=body))
            # Longer than workers may be silent: without the bus that says nothing about them.
            await asyncio.sleep(2 * Settings().lost_after_s)
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/ready")).status_code == 503
            assert not waiting.done()
            server.start()
            assert (await waiting).status_code == 200
            assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_a_bus_that_stays_away_is_a_typed_error() -> None:
    with start_nats() as server:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(actors(server.url))
            _, url = await stack.enter_async_context(gateway(server.url, "--admission-wait-s", "1"))
            await wait_ready(url)
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=HANG_S))
            server.kill()
            refused = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "bus_unavailable"
            server.start()


async def test_a_port_in_use_is_one_sentence(nats_url: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await spawn("--nats-url", nats_url, "--port", str(port))
        _, errors = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode == 1
    assert errors.decode() == f"baton-gateway: port {port} is in use: choose another one with --port\n"


@pytest.mark.parametrize(
    ("flags", "status", "named"),
    [
        (("--prot", "1"), 2, "--prot"),
        (("--port", "70000"), 2, "--port"),
        (("--deadline-s", "0"), 2, "--deadline-s"),
        (("--nats-url", "nats://127.0.0.1:1"), 1, "127.0.0.1:1"),
        (("--host", "203.0.113.1", "--api-keys", "k"), 1, "--host"),
        (("--host", "0.0.0.0"), 2, "--api-keys"),
    ],
)
async def test_bad_settings_are_one_sentence(flags: tuple[str, ...], status: int, named: str, tmp_path: Path) -> None:
    process = await spawn(*flags, *(() if "--port" in flags else ("--port", "0")))
    _, errors = await asyncio.wait_for(process.communicate(), HANG_S)
    assert process.returncode == status
    sentence = errors.decode().splitlines()[-1]
    assert sentence.startswith("baton-gateway: ")
    assert named in sentence
    assert "Traceback" not in errors.decode()


async def test_help_lists_the_settings() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "baton_gateway", "--help", stdout=asyncio.subprocess.PIPE, env=dict(os.environ)
    )
    output, _ = await process.communicate()
    for flag in (b"--port", b"--nats-url", b"--deadline-s", b"--admission-wait-s", b"--api-keys"):
        assert flag in output


async def test_a_tokenizer_loads_without_a_word_about_torch() -> None:
    path, _ = tiny_model()
    loads = f"from baton_gateway.tokenise import load_to_stay; load_to_stay({str(path)!r})"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", loads, stderr=asyncio.subprocess.PIPE, env=dict(os.environ)
    )
    _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
