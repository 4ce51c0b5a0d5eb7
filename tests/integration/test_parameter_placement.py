"""Engines with different parameters side by side: a request goes to one that takes it, or is the client's error."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import openai
import pytest

from baton.messages.workers import Role
from tests.harness.cluster import Cluster

ENGINES: Mapping[str, Mapping[str, Any]] = {
    "decode-plain": {},
    "decode-fast": {"parameters": {"mode": ["fast"]}},
    "decode-slow": {"parameters": {"mode": ["slow"], "colour": None}},
}


@pytest.fixture
async def cluster(cluster: Cluster) -> Cluster:
    """One prefill worker, which takes none of the parameters, and three decode workers, which differ."""
    await cluster.start_worker(Role.PREFILL, "prefill")
    for name, parameters in ENGINES.items():
        await cluster.start_worker(Role.DECODE, name, options={"seed": 1, **parameters})
    await cluster.wait_ready()
    return cluster


async def ask(cluster: Cluster, **parameters: object) -> str:
    """Return the decode worker that answered. The observer sees every frame."""
    known = set(cluster.observer.workers)
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        await client.completions.create(
            model="tiny", prompt="the quick brown fox", temperature=0, max_tokens=4, extra_body=parameters
        )
    observer = cluster.observer

    def answered() -> set[str]:
        fresh = observer.workers.keys() - known
        return {worker for request in fresh & observer.finished for worker in observer.workers[request]} - {"prefill"}

    await observer.until(answered)
    (worker,) = answered()
    return worker


async def test_a_request_goes_to_the_engines_that_take_it(cluster: Cluster) -> None:
    assert {await ask(cluster, colour={"any": 1}) for _ in range(4)} == {"decode-slow"}
    assert {await ask(cluster, mode="slow", colour=2) for _ in range(4)} == {"decode-slow"}
    # Both declare `mode`; only the engines know which values they take.
    modes = ["fast", "slow"] * 6
    assert [await ask(cluster, mode=mode) for mode in modes] == [f"decode-{mode}" for mode in modes]
    answers = await asyncio.gather(*(_text(cluster, mode=mode) for mode in modes))
    assert len(set(answers)) == 1, "the same model on both"
    for refused, param in (({"mode": "wrong"}, "mode"), ({"taste": 1}, "taste"), ({"colour": 1, "taste": 2}, "taste")):
        with pytest.raises(openai.BadRequestError) as failure:
            await ask(cluster, **refused)
        assert failure.value.param == param


async def _text(cluster: Cluster, **parameters: object) -> str:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.completions.create(
            model="tiny", prompt="and then", temperature=0, max_tokens=20, extra_body=parameters
        )
    return answer.choices[0].text
