"""The whole of Baton over real vLLM: services as processes, OpenAI's own SDK as the client."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import openai
import pytest
import pytest_asyncio

from baton.messages import AttemptState, Role
from tests.cluster import Cluster, running_cluster

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 400,
}
# Three engines share two cores here: a worker may well be silent for longer than on a machine of its own.
PATIENCE = ("--accept-s", "2.0", "--worker-dead-s", "4.0")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path_factory.mktemp("serving"), model=tiny_model) as cluster:
        await cluster.start_control_plane(gateway_flags=PATIENCE)
        for role, number in ((Role.PREFILL, 0), (Role.DECODE, 0), (Role.DECODE, 1)):
            await cluster.start_worker(role, f"{role}-{number}", engine="vllm", options=OPTIONS)
            # One after another: loading two at a time takes longer than both in turn.
            await cluster.wait_ready(timeout_s=120) if number else await cluster.wait_worker(f"{role}-{number}")
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def wait_idle(cluster: Cluster, workers: set[str]) -> None:
    """Wait until no attempt, run slot or KV block is held; a lease that was left would live longer than this."""
    await asyncio.sleep(0.6)
    beats = cluster.observer.heartbeats

    def idle() -> bool:
        return all(
            not beats[worker].attempts and not beats[worker].running and not beats[worker].kv_blocks_used
            for worker in workers
        )

    await cluster.observer.until(idle, timeout_s=20)


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_tokens_arrive_one_by_one(client: openai.AsyncOpenAI) -> None:
    asked_s = time.monotonic()
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Tell me about batons. " * 40}],
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    arrivals_s: list[float] = []
    usage = None
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            arrivals_s.append(time.monotonic())
        usage = chunk.usage or usage
    assert usage is not None
    assert usage.completion_tokens == 40
    assert len(arrivals_s) > 20, "the answer came in few pieces"
    # Pieces that somebody had gathered would come together, behind all of the waiting.
    assert arrivals_s[-1] - arrivals_s[0] > 0.2 * (arrivals_s[-1] - asked_s)


@pytest.mark.timeout(300)
async def test_fifty_mixed_requests_with_random_cancels_leave_nothing(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    random = Random(50)
    ends: list[str] = []

    async def one(number: int) -> None:
        words = random.choice((5, 60, 250))
        mode = random.choice(("always", "always", "auto", "never"))
        cancel_after = random.choice((None, None, 0, 1, 5))
        stream = await client.completions.create(
            model="tiny",
            prompt=f"request {number}: " + "some words to read " * words,
            max_tokens=random.randint(1, 40),
            temperature=random.choice((0.0, 0.8)),
            stream=True,
            extra_headers={"x-baton-disaggregation": mode, "x-baton-deadline-s": "200"},
        )
        pieces = 0
        async for _ in stream:
            pieces += 1
            if cancel_after is not None and pieces > cancel_after:
                await stream.close()
                ends.append("cancelled")
                return
        ends.append("finished")

    async def late_cancel(number: int, after_s: float) -> None:
        task = asyncio.create_task(one(number))
        await asyncio.sleep(after_s)
        task.cancel()
        try:
            await task
        except (asyncio.CancelledError, openai.APIError):
            ends.append("cancelled early")

    async with asyncio.timeout(240), asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(late_cancel(number, random.uniform(0.0, 3.0)) if number % 5 == 0 else one(number))
    assert len(ends) >= 50
    assert ends.count("finished") >= 15
    await wait_idle(cluster, {"prefill-0", "decode-0", "decode-1"})


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", [signal.SIGKILL], ids=["kill"])
async def test_a_killed_decode_worker_does_not_change_the_answer(
    cluster: Cluster, client: openai.AsyncOpenAI, how: signal.Signals
) -> None:
    async def ask() -> str:
        stream = await client.completions.create(
            model="tiny",
            prompt="a story that is interrupted " * 50,
            max_tokens=300,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    undisturbed = await ask()
    answer = asyncio.create_task(ask())
    worker = await cluster.observer.worker_in(Role.DECODE, AttemptState.RUNNING)
    cluster.services[worker].signal(how)
    assert await answer == undisturbed
    await cluster.services.pop(worker).end()
    left = {"prefill-0", "decode-0", "decode-1"} - {worker}
    await wait_idle(cluster, left)


@pytest.mark.timeout(120)
async def test_a_frozen_prefill_worker_is_a_typed_error_or_no_matter(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    async def ask(disaggregation: str) -> openai.types.Completion:
        return await client.completions.create(
            model="tiny",
            prompt=f"{disaggregation} answered while prefill is frozen " * 20,
            max_tokens=5,
            extra_headers={"x-baton-disaggregation": disaggregation, "x-baton-deadline-s": "20"},
        )

    prefill = cluster.services["prefill-0"]
    prefill.signal(signal.SIGSTOP)
    try:
        with pytest.raises(openai.APIStatusError) as failure:
            await ask("always")
        assert failure.value.status_code in {429, 502, 503, 504}
        assert failure.value.code
        assert (await ask("auto")).usage is not None
    finally:
        prefill.signal(signal.SIGCONT)
