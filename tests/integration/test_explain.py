"""`baton explain` against real processes: decisions and outcomes, over restarts, until they are too old."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.messages.workers import Role
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.limits import HANG_S

WELL_BEHAVED = "mine-7"
HOSTILE = ".-/x@=+:" * 16
GATEWAY_FLAGS = ("--host", "127.0.0.1", "--port", "0")


async def baton_explain(cluster: Cluster, *arguments: str) -> tuple[int, str]:
    """Run the command as a user would, and return its status and all that it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton.cli", "explain", "--nats-url", cluster.nats_url, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


async def explained(cluster: Cluster, name: str, attempts: int = 1) -> list[dict[str, Any]]:
    """Return the attempts of a request, once all of them are reported: reports follow the answer."""
    async with asyncio.timeout(HANG_S):
        while True:
            status, out = await baton_explain(cluster, "--json", name)
            content: list[dict[str, Any]] = json.loads(out)["attempts"] if status == 0 else []
            if len(content) == attempts and all(each["report"] for each in content):
                return content


async def ask(cluster: Cluster, name: str = "", **body: object) -> tuple[str, str]:
    """Return the x-request-id and the id of an answer."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=HANG_S) as client:
        asked = {"model": "tiny", "prompt": "All that is gold does not glitter. " * 30, "max_tokens": 8, **body}
        answer = await client.post("/v1/completions", json=asked, headers={"x-request-id": name} if name else {})
        answer.raise_for_status()
        return answer.headers["x-request-id"], answer.json()["id"]


async def restart(cluster: Cluster, name: str, module: str, number: signal.Signals, flags: Sequence[str]) -> None:
    service = cluster.services[name]
    assert service.process is not None
    service.signal(number)
    await service.process.wait()
    await cluster.start(name, module, *flags)


@pytest.mark.timeout(180)
async def test_a_request_is_explained_by_each_of_its_ids_over_restarts(tmp_path: Path, model: Path) -> None:
    async with running_cluster(tmp_path, model=model) as cluster:
        await cluster.start_control_plane()
        await cluster.start_worker(Role.PREFILL, "p")
        await cluster.start_worker(Role.DECODE, "d0")
        await cluster.start_worker(Role.DECODE, "d1")
        await cluster.wait_ready()
        made, answer = await ask(cluster)
        assert answer.endswith(made), "a client that names no request gets one id for all"
        (attempt,) = await explained(cluster, made)
        assert await explained(cluster, answer) == [attempt]
        (decision,), report = attempt["decisions"], attempt["report"]
        assert (decision["verdict"], decision["policy"]) == ("placed", "predicted")
        predicted = decision["candidates"][0]
        assert (report["prefill"], report["decode"], report["end"]) == ("p", predicted["decode"], "length")
        legs = {each["leg"]: {row["worker"]: row for row in each["workers"]} for each in decision["considered"]}
        assert {leg: set(rows) for leg, rows in legs.items()} == {"prefill": {"p"}, "decode": {"d0", "d1"}}
        cost_s = legs["prefill"]["p"]["cost_s"] + legs["decode"][report["decode"]]["cost_s"] + predicted["tail_s"]
        assert cost_s == pytest.approx(predicted["cost_s"], rel=1e-4)
        assert report["predicted"] == predicted
        assert report["ttft_s"] > 0
        assert report["token_interval_s"] > 0
        assert report["output_tokens"] == 8
        assert sum(seconds for _, seconds in report["spent"]) > report["ttft_s"]

        for name in (WELL_BEHAVED, HOSTILE):
            assert (await ask(cluster, name, n=2))[0] == name
            assert [each["decisions"][0]["prompt_tokens"] for each in await explained(cluster, name, 2)] == [
                decision["prompt_tokens"]
            ] * 2
        _, newest = await ask(cluster, WELL_BEHAVED)
        (again,) = await explained(cluster, WELL_BEHAVED)
        assert again["request"].partition("-")[0] == newest.partition("-")[2], "the newest of that name"

        await restart(cluster, "scheduler", "baton_scheduler", signal.SIGKILL, ("--disaggregation", "always"))
        await restart(cluster, "gateway", "baton_gateway", signal.SIGTERM, GATEWAY_FLAGS)
        await cluster.wait_ready()
        assert await explained(cluster, made) == [attempt]

        status, text = await baton_explain(cluster, made)
        assert status == 0, text
        assert f"attempt 0: prefill on p, decode on {report['decode']}; ended by length" in text
        assert re.search(r"> p +\d", text)
        assert "time to first token" in text

        for name, words in (("unknown", "kept for 1 h"), ("no such id!", "x-request-id"), (f"cmpl-{'0' * 32}", "1 h")):
            status, text = await baton_explain(cluster, name)
            assert status != 0
            assert words in text
            assert "Traceback" not in text

        # The bounds of a stream that exists are widened to the settings, never narrowed.
        for kept_s in ("7200", "60"):
            flags = ("--disaggregation", "always", "--decisions-kept-s", kept_s)
            await restart(cluster, "scheduler", "baton_scheduler", signal.SIGTERM, flags)
            await cluster.wait_ready()
            assert "kept for 2 h" in (await baton_explain(cluster, "unknown"))[1]
        assert (await baton_explain(cluster, made))[0] == 0


async def test_without_a_scheduler_it_says_that_nothing_is_kept(tmp_path: Path, model: Path) -> None:
    async with running_cluster(tmp_path, model=model) as cluster:
        status, text = await baton_explain(cluster, "any")
        assert status != 0
        assert "no decisions are kept" in text
        assert "Traceback" not in text
