"""Workers that stand still, and requests that end workers, on real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from baton.messages.workers import Role
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.limits import HANG_S
from tests.integration.failing_worker import DEADLY, FOLDER, stuck_file

WORKERS = ("decode-0", "decode-1", "decode-2")
OPTIONS = {"speed": 1.0, "step_fixed_s": 0.02, "blocks": 512, "eos_probability": 0.0, "seed": 1}
OUTPUT_TOKENS = 60
PROMPTS = [f"story {number}: the quick brown fox" for number in range(6)]
PROGRESS_S = 8.0
"""Time after which a gateway gives up a stream without a further token."""


@pytest.fixture
async def cluster(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """A deployment of its own: its gateway has not seen workers die in other tests."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    async with running_cluster(tmp_path, model=model) as cluster:
        await cluster.start_control_plane(gateway_flags=("--progress-s", str(PROGRESS_S)), disaggregation="never")
        yield cluster


async def start_workers(cluster: Cluster, *names: str) -> None:
    for name in names:
        await cluster.start_worker(Role.DECODE, name, options=OPTIONS, module="tests.integration.failing_worker")
    await cluster.wait_ready()


async def ask(cluster: Cluster, prompt: str | list[int]) -> str:
    client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    async with client:
        stream = await client.completions.create(
            model="tiny", prompt=prompt, temperature=0, max_tokens=OUTPUT_TOKENS, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


async def ask_all(cluster: Cluster) -> list[str]:
    return await asyncio.gather(*(ask(cluster, prompt) for prompt in PROMPTS))


async def wait_metric(cluster: Cluster, service: str, series: str, least: float) -> None:
    async with asyncio.timeout(HANG_S):
        while (await cluster.metrics(service)).get(series, 0.0) < least:  # noqa: ASYNC110 - another process.
            await asyncio.sleep(0.1)


async def test_a_worker_that_stands_still_is_taken_out_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    await start_workers(cluster, *WORKERS[:2])
    undisturbed = await ask_all(cluster)
    stuck = stuck_file(tmp_path, "decode-0")
    stuck.touch()
    struck = asyncio.create_task(ask_all(cluster))
    await wait_metric(cluster, "scheduler", 'baton_breakers_opened_total{cause="no_progress"}', 1)
    assert "decode-0" in cluster.observer.heartbeats, "its heartbeats went on"
    assert await struck == undisturbed
    assert await ask_all(cluster) == undisturbed, "one of them may have tried it"
    stuck.unlink()

    async def serves() -> bool:
        before = set(cluster.observer.workers)
        assert await ask_all(cluster) == undisturbed
        workers = (cluster.observer.workers[request] for request in cluster.observer.workers.keys() - before)
        return {"decode-0"} in workers

    async with asyncio.timeout(HANG_S):
        while not await serves():
            pass
    figures = await cluster.metrics("scheduler")
    assert figures['baton_breakers{kind="worker",state="open"}'] == 0


async def test_a_request_that_ends_workers_is_stopped_and_others_survive(cluster: Cluster) -> None:
    await start_workers(cluster, *WORKERS)
    undisturbed = await ask_all(cluster)
    answers = asyncio.create_task(ask_all(cluster))
    await cluster.observer.until(lambda: len(cluster.observer.requests) >= 2 * len(PROMPTS))
    with pytest.raises(openai.UnprocessableEntityError) as stopped:
        await ask(cluster, [*DEADLY, *range(40, 80)])
    assert stopped.value.code == "request_stopped"
    assert await answers == undisturbed
    dead = [name for name in WORKERS if (process := cluster.services[name].process) and process.returncode is not None]
    assert len(dead) == 2
    for name in dead:
        assert name in str(stopped.value)
    assert (await cluster.metrics("gateway"))['baton_answers_total{end="request_stopped"}'] == 1
