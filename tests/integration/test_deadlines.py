"""The deadline limits the time to the first token: a stream goes on after it, on another worker if need be."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from baton_gateway.config import Settings

from baton.messages.attempts import Cancel, DecodeTask
from baton.messages.workers import Role
from tests.harness.cluster import Cluster
from tests.harness.gateway.actors import MODEL
from tests.harness.gateway.stage import Stage, forward, open_stage
from tests.harness.limits import HANG_S

PROGRESS_S = 30.0
DEADLINE_S = 5.0
TOKENS = 90
STEADY = {"speed": 1.0, "step_fixed_s": 0.08, "eos_probability": 0.0, "seed": 1}
"""Slows an answer down to about 7 s."""


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with open_stage(Settings(port=0, progress_s=PROGRESS_S, lost_after_s=0.8)) as opened:
        opened.say("the quick brown fox jumps over the lazy dog. " * 9)
        yield opened


async def test_workers_are_told_budgets_that_hold_after_the_deadline(stage: Stage) -> None:
    await stage.add("d2")
    await forward(stage, "d2")
    stage.workers["d1"].script.interval_s = 0.15
    stage.workers["d1"].script.die_at = 40  # After the deadline.
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    async with httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S) as client:
        response = await client.post("/v1/chat/completions", json=body, headers={"x-baton-deadline-s": str(DEADLINE_S)})
    assert response.status_code == 200, response.text
    assert DEADLINE_S < stage.scheduler.places[-1].context.budget_s <= PROGRESS_S
    (task,) = stage.workers["d2"].got(DecodeTask)
    assert isinstance(task, DecodeTask)
    assert DEADLINE_S < task.context.budget_s <= PROGRESS_S
    cancels = [cancel for cancel in stage.workers["d2"].got(Cancel) if isinstance(cancel, Cancel)]
    assert all(cancel.context.budget_s > 0 for cancel in cancels)


@pytest.fixture
async def cluster(cluster: Cluster) -> Cluster:
    for role in Role:
        for number in range(2):
            await cluster.start_worker(role, f"{role}-{number}", options=STEADY)
    await cluster.wait_ready()
    return cluster


async def ask(cluster: Cluster, deadline_s: float) -> str:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.completions.create(
            model="tiny",
            prompt="the quick brown fox",
            temperature=0,
            max_tokens=TOKENS,
            stream=True,
            extra_headers={"x-baton-deadline-s": str(deadline_s)},
        )
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


async def test_an_answer_outlives_its_deadline_and_then_its_worker(cluster: Cluster) -> None:
    undisturbed = await ask(cluster, 60.0)
    known, began_s = set(cluster.observer.workers), time.monotonic()
    answer = asyncio.create_task(ask(cluster, DEADLINE_S))
    await cluster.observer.until(lambda: time.monotonic() > began_s + DEADLINE_S)
    (request,) = set(cluster.observer.tokens_seen) - known
    (decode,) = (worker for worker in cluster.observer.workers[request] if worker.startswith(Role.DECODE))
    assert not answer.done()
    cluster.services[decode].signal(signal.SIGKILL)
    assert await answer == undisturbed
