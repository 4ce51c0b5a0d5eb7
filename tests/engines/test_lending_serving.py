"""The whole of Baton over real engines with KV pools: a prefix that one worker computed serves another one.

Two workers of vLLM, two of SGLang, or one of each; all of it is for `make test-nightly`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from serving import PATIENCE, wait_idle

from baton.messages.workers import Role
from benchmarks.remote_engine.settings import EngineName, engine_environ, engine_options, engine_python
from tests.faults.fingerprints import Fingerprints
from tests.faults.record import Fault
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.lending import BORROW_TIMEOUT_S, IN_TURN, Lending, Loan

SLOT_BYTES = 4 * 32 * 2 * 2 * 64 * 4
"""Four layers of 32 tokens, K and V, two heads of 64 numbers, four bytes each."""
POOL = {"kv_pool_bytes": 300 * SLOT_BYTES}
FILE_BYTES = 600 * (SLOT_BYTES + 4096)
WORKERS = ("decode-0", "decode-1")
ENGINES: tuple[tuple[EngineName, EngineName], ...] = (("vllm", "vllm"), ("sglang", "sglang"), ("vllm", "sglang"))
STOPPED_S = 2.0
RESTARTED_S = 400.0

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(700), pytest.mark.nightly]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES, ids="-".join)
async def cluster(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Cluster]:
    engines: tuple[EngineName, EngineName] = request.param
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in engine_environ(engines[1]).items():
            patch.setenv(variable, value)
        async with running_cluster(tmp_path_factory.mktemp("lending"), model=tiny_model) as cluster:
            await cluster.start_control_plane(
                gateway_flags=(*PATIENCE, "--routing-headers"), scheduler_flags=IN_TURN, disaggregation="never"
            )
            for name, engine in zip(WORKERS, engines, strict=True):
                python = engine_python(engine)
                if python is None:
                    pytest.skip(f"there is no environment with {engine}: make environment-{engine}")
                flags = ("--digest-s", "0.1", "--kv-folder", str(cluster.folder), "--kv-file-bytes", str(FILE_BYTES))
                options = engine_options(engine) | POOL
                await cluster.start_worker(Role.DECODE, name, *flags, engine=engine, options=options, python=python)
                await cluster.wait_worker(name)
            await cluster.wait_ready()
            yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def lending(cluster: Cluster) -> AsyncIterator[Lending]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield Lending(cluster, client)


def check_borrowed(loan: Loan) -> None:
    assert loan.second.text == loan.first.text
    tail = loan.second.prompt_tokens - min(loan.borrowed_tokens, loan.second.prompt_tokens - 1)
    assert loan.borrowed_tokens >= loan.second.prompt_tokens // 32 * 32
    assert (loan.computed_tokens, loan.second.cached_tokens) == (tail, loan.second.prompt_tokens - tail)


@pytest.mark.parametrize("lender", WORKERS)
async def test_a_worker_answers_from_a_prefix_that_only_another_one_computed(
    cluster: Cluster, lending: Lending, lender: str
) -> None:
    async with asyncio.timeout(BORROW_TIMEOUT_S):
        while (loan := await lending.borrow()).first.worker != lender:
            # Workers take turns: the next loan goes the other way.
            await lending.ask(lending.prompt())
    check_borrowed(loan)
    await wait_idle(cluster)


async def test_a_busy_lender_lends(cluster: Cluster, lending: Lending) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(2):
            group.create_task(lending.ask(f"busy {number}: " + "so busy " * 50, output_tokens=300))
        check_borrowed(await lending.borrow())
    await wait_idle(cluster)


async def test_a_lender_that_evicts_changes_no_answer(cluster: Cluster, lending: Lending) -> None:
    """The lender's pool holds about six prompts; it computes eight others while it lends."""
    filling: list[asyncio.Task[object]] = []

    async def evict(_worker: str) -> None:
        await asyncio.gather(*filling)
        filling[:] = (asyncio.create_task(lending.ask(lending.prompt(), output_tokens=1)) for _ in range(16))
        await asyncio.sleep(0)

    for _ in range(3):
        loan = await lending.lend(evict)
        await asyncio.gather(*filling)
        assert loan.second.text == loan.first.text
    await wait_idle(cluster)


async def test_a_stopped_lender_costs_time_and_no_token(cluster: Cluster, lending: Lending) -> None:
    """The delay is at most the time to compute what is lent."""
    for _ in range(3):
        alone, _ = [await lending.ask(lending.prompt()) for _ in WORKERS]
        async with lending.stopping() as stop:
            loan = await lending.lend(stop)
        assert loan.second.text == loan.first.text
        assert (loan.borrowed_tokens, loan.computed_tokens) == (0, loan.second.prompt_tokens)
        assert loan.second.ttft_s <= 2 * alone.ttft_s + 0.5
        await cluster.wait_ready()
    check_borrowed(await lending.borrow())
    await wait_idle(cluster)


async def test_the_index_agrees_about_all_tiers_after_each_fault(cluster: Cluster, lending: Lending) -> None:
    assert cluster.bus is not None
    fingerprints = Fingerprints(cluster.bus, cluster.observer, WORKERS, back_s=300.0)
    prompts = [lending.prompt() for _ in range(4)]
    said = [await lending.computed(prompt) for prompt in prompts]
    beats = cluster.observer.heartbeats
    await cluster.observer.until(lambda: all(beats[name].filed.blocks for name in WORKERS))
    for how, victim in product(("stop", "kill"), ("decode-0", "kvindex")):
        service = cluster.services[victim]
        if how == "kill":
            service.signal(signal.SIGKILL)
            await service.end()
        else:
            async with lending.stopping() as stop:
                await stop(victim)
                await asyncio.sleep(STOPPED_S)
        judging = asyncio.create_task(fingerprints.await_equal(Fault(how=how, victim=victim, at_s=0.0)))
        await asyncio.sleep(0)
        if how == "kill":
            await service.start()
        await judging
    print(fingerprints.summary())
    assert fingerprints.good, fingerprints.equal_s
    await cluster.wait_ready()
    for prompt, before in zip(prompts, said, strict=True):
        assert (await lending.ask(prompt)).text == before.text
    await wait_idle(cluster)


@pytest.mark.parametrize("lender", WORKERS)
async def test_a_killed_lender_changes_no_answer(cluster: Cluster, lending: Lending, lender: str) -> None:
    async def kill(worker: str) -> None:
        cluster.services[worker].signal(signal.SIGKILL)
        killed.append(worker)

    killed: list[str] = []
    async with asyncio.timeout(RESTARTED_S):
        while killed[-1:] != [lender]:
            loan = await lending.lend(kill)
            assert loan.second.text == loan.first.text
            assert (loan.borrowed_tokens, loan.computed_tokens) == (0, loan.second.prompt_tokens)
            await cluster.services[killed[-1]].end()
            del cluster.observer.heartbeats[killed[-1]]
            await cluster.services[killed[-1]].start()
            await cluster.wait_worker(killed[-1])
            await cluster.wait_ready()
            if killed[-1] != lender:
                await lending.ask(lending.prompt())
    await wait_idle(cluster)
