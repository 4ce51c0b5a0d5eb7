"""A scheduler that ends while it holds a thousand requests: another one takes them over, and all are answered."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from pathlib import Path

import httpx
import pytest

from baton.cli.tiny_model import make_tiny_model
from baton.messages.workers import Role
from tests.harness.cluster import Cluster, running_cluster

pytestmark = pytest.mark.timeout(400)

SLOTS = 16
REQUESTS = 1000
SCHEDULERS = ("scheduler", "scheduler-1")
ENGINE = {"speed": 1.0, "step_fixed_s": 0.05, "prefill_token_s": 0.0, "blocks": 8192, "context_tokens_max": 16_384}
PATIENT = ("--admission-wait-s", "200", "--accept-s", "5", "--lost-after-s", "10")


async def held(cluster: Cluster, *schedulers: str) -> int:
    """Return how many requests these schedulers hold."""
    shown = [await cluster.metrics(name) for name in schedulers]
    return int(sum(each[series] for each in shown for series in each if series.startswith("baton_held_requests")))


async def wait_held(cluster: Cluster, answers: list[asyncio.Task[int]], *schedulers: str) -> None:
    """Wait until these schedulers hold all requests that are not answered."""
    while await held(cluster, *schedulers) < sum(not answer.done() for answer in answers):  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def post(cluster: Cluster, number: int) -> int:
    """Post a short request on a connection of its own, and return the status."""
    host, port = cluster.url.removeprefix("http://").split(":")
    payload = json.dumps({"model": "tiny", "prompt": f"{number} and", "max_tokens": 2, "temperature": 0}).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(payload)}\r\n\r\n"
    writer.write(head.encode() + payload)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1])


async def occupy(cluster: Cluster) -> None:
    """Stream an answer that is longer than the test, until cancelled."""
    body = {"model": "tiny", "prompt": "long", "max_tokens": 10_000, "stream": True, "ignore_eos": True}
    async with (
        httpx.AsyncClient(timeout=None) as client,
        client.stream("POST", f"{cluster.url}/v1/completions", json=body) as answer,
    ):
        answer.raise_for_status()
        async for _ in answer.aiter_lines():
            pass


ENDINGS = (
    pytest.param(signal.SIGKILL, id="SIGKILL"),
    pytest.param(signal.SIGSTOP, id="SIGSTOP", marks=pytest.mark.nightly),
    pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.nightly),
)


@pytest.mark.parametrize("ending", ENDINGS)
async def test_a_thousand_held_requests_outlive_their_scheduler(tmp_path: Path, ending: signal.Signals) -> None:
    make_tiny_model(tmp_path / "model")
    async with running_cluster(tmp_path, model=tmp_path / "model") as cluster:
        await cluster.start_control_plane(gateway_flags=PATIENT, scheduler_flags=PATIENT[-2:], disaggregation="never")
        await cluster.start("scheduler-1", "baton_scheduler", "--disaggregation", "never", *PATIENT[-2:])
        await cluster.start_worker(Role.DECODE, "decode-0", "--slots", str(SLOTS), options=ENGINE)
        await cluster.wait_ready()
        blockers = [asyncio.create_task(occupy(cluster)) for _ in range(SLOTS)]
        await cluster.observer.until(lambda: cluster.observer.heartbeats["decode-0"].running == SLOTS)
        answers = [asyncio.create_task(post(cluster, number)) for number in range(REQUESTS)]
        await wait_held(cluster, answers, *SCHEDULERS)
        assert await held(cluster, "scheduler") > REQUESTS / 10, "both take part"
        cluster.services["scheduler"].signal(ending)
        await wait_held(cluster, answers, "scheduler-1")
        for blocker in blockers:
            blocker.cancel()
        await asyncio.wait(blockers)
        assert Counter(await asyncio.gather(*answers)) == {200: REQUESTS}
        assert await held(cluster, "scheduler-1") == 0
