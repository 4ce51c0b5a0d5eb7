"""The whole of Baton over both engines: one takes the place of the other in the middle of a request."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from engine_settings import EngineName, engine_environ, engine_options, engine_python
from serving import PATIENCE, PROMPT_STATES, tell, wait_idle

from baton.messages import Role
from tests.cluster import Cluster, running_cluster

WORKERS: tuple[tuple[Role, str, EngineName], ...] = (
    (Role.PREFILL, "prefill-vllm", "vllm"),
    (Role.DECODE, "decode-sglang", "sglang"),
    (Role.PREFILL, "prefill-sglang", "sglang"),
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(700), pytest.mark.nightly]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> AsyncIterator[Cluster]:
    pythons = {engine: engine_python(engine) for _, _, engine in WORKERS}
    if None in pythons.values():
        pytest.skip("both engines are needed: make environment-vllm environment-sglang")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environ("sglang").items():
            patch.setenv(name, value)
        async with running_cluster(tmp_path_factory.mktemp("serving"), model=tiny_model) as cluster:
            await cluster.start_control_plane(gateway_flags=PATIENCE)
            # The second prefill worker comes when a test has struck the first.
            for role, name, engine in WORKERS[:2]:
                await start_worker(cluster, role, name, engine)
            await cluster.wait_ready()
            yield cluster


async def start_worker(cluster: Cluster, role: Role, name: str, engine: EngineName) -> None:
    flags, options = ("--digest-s", "0.1"), engine_options(engine)
    python = engine_python(engine)
    assert python is not None
    await cluster.start_worker(role, name, *flags, engine=engine, options=options, python=python)
    await cluster.wait_worker(name, timeout_s=300)


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_an_answer_is_the_same_with_prefill_on_another_engine(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    assert await tell(client, 1) == await tell(client, 1, mode="never")
    await wait_idle(cluster)


async def test_one_engine_takes_over_from_the_other(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    await start_worker(cluster, *WORKERS[2])
    await cluster.wait_ready()
    struck = "prefill-vllm"
    number = 2
    answer = asyncio.create_task(tell(client, number))
    # Until a prompt is there: placement is free to choose.
    while await cluster.observer.worker_in(Role.PREFILL, *PROMPT_STATES) != struck:
        await answer
        number += 1
        answer = asyncio.create_task(tell(client, number))
    cluster.services[struck].signal(signal.SIGKILL)
    said = await answer
    await cluster.services.pop(struck).end()
    del cluster.observer.heartbeats[struck]
    assert said == await tell(client, number, mode="never")
    await wait_idle(cluster)
