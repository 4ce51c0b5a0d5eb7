"""Workers lend prefixes to each other: a whole deployment over simulated engines, and lenders that are struck."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from random import Random

import openai
import pytest

from baton.messages.attempts import AttemptState
from baton.messages.workers import Role
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.lending import IN_TURN, Lending, Loan, Said
from tests.harness.limits import HANG_S

BLOCK_BYTES = 32 * 512
ENGINE = {
    "speed": 1.0,
    "step_fixed_s": 0.005,
    "prefill_token_s": 0.0005,
    "step_tokens_max": 512,
    "eos_probability": 0.0,
    "blocks": 512,
    "kv_pool_bytes": 400 * BLOCK_BYTES,
}
"""A prompt of these tests takes about 0.7 s to compute."""
WORKERS = ("decode-0", "decode-1")


@pytest.fixture
async def cluster(tmp_path: Path, model: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, model=model) as cluster:
        await cluster.start_control_plane(
            gateway_flags=("--routing-headers",), scheduler_flags=IN_TURN, disaggregation="never"
        )
        yield cluster


@pytest.fixture
async def lending(cluster: Cluster) -> AsyncIterator[Lending]:
    async with started(cluster, *WORKERS) as lending:
        yield lending


@asynccontextmanager
async def started(cluster: Cluster, *workers: str) -> AsyncGenerator[Lending]:
    for name in workers:
        await cluster.start_worker(Role(name.partition("-")[0]), name, "--digest-s", "0.1", options=ENGINE)
    await cluster.wait_ready()
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        lending = Lending(cluster, client)
        # A loan has the time that computing takes, as measured: each worker computes something first.
        for role, mode in ((Role.DECODE, "never"), (Role.PREFILL, "always")):
            count = sum(name.startswith(role) for name in workers)
            await asyncio.gather(*(lending.ask(lending.prompt(), mode=mode) for _ in range(count)))
        yield lending


def check_borrowed(loan: Loan) -> None:
    assert loan.second.text == loan.first.text
    # The last token of a prompt is always computed.
    tail = loan.second.prompt_tokens - min(loan.borrowed_tokens, loan.second.prompt_tokens - 1)
    assert loan.borrowed_tokens >= loan.second.prompt_tokens // 32 * 32
    assert (loan.computed_tokens, loan.second.cached_tokens) == (tail, loan.second.prompt_tokens - tail)


async def check_told(cluster: Cluster, loan: Loan) -> None:
    """Check that what the loan was expected to bring is recorded, and what it took is measured."""
    lender, borrower = loan.first.worker, loan.second.worker
    fits = cluster.observer.heartbeats
    await cluster.observer.until(lambda: lender in {fit.peer for fit in fits[borrower].transfers})
    async with asyncio.timeout(HANG_S):
        while not (records := json.loads(await baton(cluster, "explain", "--json", loan.second.request))["attempts"]):
            pass
    decision = records[0]["decisions"][0]
    chosen = decision["candidates"][0]
    assert (chosen["lender"], chosen["borrowed_tokens"]) == (lender, loan.borrowed_tokens)
    assert f"{loan.borrowed_tokens} to borrow from {lender}" in decision["reason"]
    rows = {row["worker"]: row for row in decision["considered"][0]["workers"]}
    assert rows[borrower]["borrowed_tokens"] == loan.borrowed_tokens
    assert 0 < rows[borrower]["loan_s"] < rows[borrower]["cost_s"]
    assert rows[lender]["borrowed_tokens"] == 0
    drawn = await baton(cluster, "trace", loan.second.request)
    assert re.search(r"borrow +for a prefix from", drawn), drawn


async def baton(cluster: Cluster, *arguments: str) -> str:
    """Run a command as a user would, and return what it prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton.cli", *arguments, "--nats-url", cluster.nats_url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    out, _ = await process.communicate()
    return out.decode()


async def test_a_worker_answers_from_a_prefix_that_only_another_one_computed(lending: Lending) -> None:
    loan = await lending.borrow()
    check_borrowed(loan)
    await check_told(lending.cluster, loan)
    async with asyncio.TaskGroup() as group:
        answers = [
            group.create_task(lending.ask(f"busy {n}: " + "so busy " * 50, output_tokens=3000)) for n in range(4)
        ]
        check_borrowed(await lending.borrow())
        assert not all(answer.done() for answer in answers), "the lender was busy"
        for answer in answers:
            answer.cancel()


@pytest.mark.nightly
async def test_what_was_borrowed_is_lent_on(cluster: Cluster) -> None:
    """Each worker adds a part to the prompt; of two lenders the one with the longer prefix is asked."""
    async with started(cluster, "decode-0", "decode-1", "decode-2") as lending, asyncio.timeout(HANG_S):
        while True:
            prompt, said = "", list[Said]()
            for _ in range(3):
                prompt += lending.prompt()
                said.append(await lending.computed(prompt))
            # Placement may skip a worker, and a loan may come too late on a busy machine.
            if len({each.worker for each in said}) == 3 and said[1].cached_tokens and said[2].cached_tokens:
                break
        for before, after in pairwise(said):
            assert after.cached_tokens == before.prompt_tokens // 32 * 32
        assert said[2].text == (await lending.ask(prompt)).text


async def test_a_prompt_goes_on_from_what_is_left_of_it_when_prefill_dies(cluster: Cluster) -> None:
    """Prefill has computed the prompt's beginning, which decode's pool then has. It dies; the next one borrows it."""
    async with started(cluster, "decode-0", "prefill-0", "prefill-1") as lending:
        begin_tokens = 0.0
        while not begin_tokens:  # On a busy machine a loan may come too late.
            begin = lending.prompt()
            prompt = begin + "and it goes on " * 400
            first = await lending.computed(begin, mode="always")
            # Workers take turns, so the one that has computed the beginning is asked next but one.
            await lending.ask(lending.prompt(), mode="always")
            before = {name: await lending.figures(name) for name in ("prefill-0", "prefill-1")}
            answer = asyncio.create_task(lending.ask(prompt, mode="always"))
            killed = await cluster.observer.worker_in(Role.PREFILL, AttemptState.COMPUTING, AttemptState.HELD)
            cluster.services[killed].signal(signal.SIGKILL)
            said = await answer
            if killed == first.worker:
                (other,) = before.keys() - {killed}
                now = await lending.figures(other)
                begin_tokens = now["borrowed"] - before[other]["borrowed"]
                assert now["computed"] - before[other]["computed"] == said.prompt_tokens - begin_tokens
            assert said.text == (await lending.ask(prompt)).text
            await cluster.services.pop(killed).end()
            await cluster.start_worker(Role.PREFILL, killed, "--digest-s", "0.1", options=ENGINE)
            await cluster.wait_ready()
            if killed != first.worker:
                await lending.ask(lending.prompt(), mode="always")


async def test_a_lender_that_is_gone_or_silent_costs_time_and_no_token(lending: Lending) -> None:
    """The borrower's answer comes while the lender is still stopped."""
    cluster = lending.cluster

    def check(loan: Loan) -> None:
        assert loan.second.text == loan.first.text
        assert loan.borrowed_tokens == 0
        assert loan.computed_tokens == loan.second.prompt_tokens

    async with lending.stopping() as stop:
        check(await lending.lend(stop))
    check_borrowed(await lending.borrow())

    async def killed(worker: str) -> None:
        cluster.services[worker].signal(signal.SIGKILL)

    check(await lending.lend(killed))


@pytest.mark.nightly
async def test_a_lender_that_stops_at_any_time_changes_no_answer(lending: Lending) -> None:
    random, borrowed = Random(18), 0

    def soon(
        stop: Callable[[str], Awaitable[None]], strikes: list[asyncio.Task[None]]
    ) -> Callable[[str], Awaitable[None]]:
        async def strike(worker: str) -> None:
            await asyncio.sleep(random.uniform(0.0, 0.05))
            await stop(worker)

        async def order(worker: str) -> None:
            strikes.append(asyncio.create_task(strike(worker)))

        return order

    for _ in range(12):
        strikes: list[asyncio.Task[None]] = []
        async with lending.stopping() as stop:
            loan = await lending.lend(soon(stop, strikes))
            await asyncio.gather(*strikes)
        assert loan.second.text == loan.first.text
        borrowed += loan.borrowed_tokens > 0
        await lending.cluster.wait_ready()
    print(f"{borrowed} of 12 loans arrived")
