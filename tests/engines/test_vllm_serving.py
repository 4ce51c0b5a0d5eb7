"""The whole of Baton over real vLLM: services as processes, OpenAI's own SDK as the client."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random

import openai
import pytest
import pytest_asyncio
from serving import PATIENCE, PROMPT_STATES, change_roles_under_answers, tell, wait_idle

from baton.messages.attempts import AttemptState
from baton.messages.workers import Role
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.limits import START_S
from tests.harness.telemetry import PATHS, Collector, Trace, TracedSpan, ask, export_traces, running_collector

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 400,
}
OF_VLLM = {
    "chat tiny / attempt / dispatch / prefill / llm_request",
    "chat tiny / attempt / dispatch / decode / llm_request",
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as collector, pytest.MonkeyPatch.context() as patch:
        export_traces(patch, collector.url)
        yield collector


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, collector: Collector
) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path_factory.mktemp("serving"), model=tiny_model) as cluster:
        await cluster.start_control_plane(gateway_flags=PATIENCE)
        for name in ("prefill-0", "decode-0", "prefill-1", "decode-1"):
            role = Role(name.partition("-")[0])
            await cluster.start_worker(role, name, "--digest-s", "0.1", engine="vllm", options=OPTIONS)
            # One after another: loading two at a time takes longer than both in turn.
            await cluster.wait_worker(name)
        await cluster.wait_ready()
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.nightly]


async def test_stages_and_vllms_own_spans_are_in_the_requests_trace(cluster: Cluster, collector: Collector) -> None:
    """One trace: our stages with times out of vLLM's own processes, and vLLM's own spans."""
    # The first request pays for what is compiled and connected then.
    await ask(cluster, prompt="hello")
    answer = await ask(cluster)

    def spans_of(spans: list[TracedSpan]) -> list[TracedSpan]:
        roots = [span.trace for span in spans if span.attributes.get("baton.request_id") == answer.request_id]
        return [span for span in spans if span.trace in roots]

    def complete(spans: list[TracedSpan]) -> bool:
        names = [span.name for span in spans_of(spans)]
        return {"match", "send", "prefill", "decode"} <= set(names) and names.count("llm_request") == 2

    arrived = await asyncio.to_thread(collector.wait_for, complete)
    trace = Trace(spans_of(arrived))
    assert trace.paths() == PATHS | OF_VLLM
    (prefill,), (transfer,) = trace.named("prefill"), trace.named("transfer")
    layers = trace.named("layers")
    assert sum(int(str(span.attributes["baton.transfer.layers"])) for span in layers) == 4
    assert transfer.attributes["baton.transfer.bytes"] == sum(
        int(str(span.attributes["baton.transfer.bytes"])) for span in layers
    )
    # Instants from vLLM's processes and from the transfer agents fit the worker's own.
    for span in trace.spans.values():
        if span.name in ("queue", "compute", "transfer", "layers", "first token", "generate"):
            above = trace.spans[span.parent]
            assert above.start_ns - 1e6 <= span.start_ns <= span.end_ns <= above.end_ns + 1e6, trace.path(span)
    # The pull is asked for at once and moves layers while prefill still computes.
    assert layers[0].start_ns < prefill.end_ns
    assert trace.is_accounted_for()


async def test_tokens_arrive_one_by_one(client: openai.AsyncOpenAI) -> None:
    # A busy machine may stop this process for as long as an answer takes, now and then.
    for _ in range(5):
        asked_s = time.monotonic()
        arrivals_s = await read_stream(client)
        # Pieces that somebody had gathered would come together, behind all of the waiting.
        if arrivals_s[-1] - arrivals_s[0] > 0.2 * (arrivals_s[-1] - asked_s):
            return
    raise AssertionError("the pieces of an answer come together")


async def read_stream(client: openai.AsyncOpenAI) -> list[float]:
    """Return the instants at which the pieces of an answer came."""
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Tell me about batons. " * 40}],
        temperature=0,
        max_tokens=200,
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
    assert usage.completion_tokens == 200
    assert len(arrivals_s) > 100, "the answer came in few pieces"
    return arrivals_s


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

    async with asyncio.timeout(START_S), asyncio.TaskGroup() as group:
        for number in range(50):
            group.create_task(late_cancel(number, random.uniform(0.0, 3.0)) if number % 5 == 0 else one(number))
    assert len(ends) >= 50
    assert ends.count("finished") >= 15
    await wait_idle(cluster)


@pytest.mark.timeout(300)
async def test_roles_change_under_answers(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    await change_roles_under_answers(cluster, client, at_once=10)


STRIKES: list[tuple[Role, tuple[AttemptState, ...], signal.Signals]] = [
    (Role.DECODE, (AttemptState.RUNNING,), signal.SIGSTOP),
    (Role.DECODE, (AttemptState.RUNNING,), signal.SIGKILL),
    (Role.PREFILL, PROMPT_STATES, signal.SIGSTOP),
    (Role.PREFILL, PROMPT_STATES, signal.SIGKILL),
]


# These come last: a killed worker is not replaced.
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("role", "states", "how"), STRIKES)
async def test_a_struck_worker_does_not_change_the_answer(
    cluster: Cluster, client: openai.AsyncOpenAI, role: Role, states: tuple[AttemptState, ...], how: signal.Signals
) -> None:
    # No worker has seen any of these prompts before, so that prefill has something to do.
    first = 100 * (1 + STRIKES.index((role, states, how)))
    number, answer, worker = await cluster.observer.caught_in(
        role, *states, ask=lambda number: tell(client, first + number)
    )
    cluster.services[worker].signal(how)
    struck = await answer
    if how is signal.SIGSTOP:
        cluster.services[worker].signal(signal.SIGCONT)
    else:
        await cluster.services.pop(worker).end()
        del cluster.observer.heartbeats[worker]
    await cluster.wait_ready()
    assert struck == await tell(client, first + number, mode="never")
    await wait_idle(cluster)


async def test_without_another_prefill_worker_it_is_a_typed_error_or_no_matter(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    (name,) = (name for name in cluster.services if name.startswith("prefill"))
    cluster.services[name].signal(signal.SIGSTOP)
    try:
        with pytest.raises(openai.APIStatusError) as failure:
            await tell(client, len(STRIKES))
        assert failure.value.status_code in {429, 502, 503, 504}
        assert failure.value.code
        assert await tell(client, len(STRIKES), mode="auto")
    finally:
        cluster.services[name].signal(signal.SIGCONT)


async def test_workers_that_are_told_to_end_finish_their_answer(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    await cluster.wait_ready()
    whole = await tell(client, 0, mode="never")
    _, answer, _ = await cluster.observer.caught_in(Role.DECODE, AttemptState.RUNNING, ask=lambda _: tell(client, 0))
    workers = [cluster.services.pop(name) for name in list(cluster.services) if name.startswith(("prefill", "decode"))]
    ends = asyncio.gather(*(worker.end(grace_s=40.0) for worker in workers))
    assert await answer == whole
    assert await ends == [0] * len(workers)
