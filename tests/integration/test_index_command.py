"""`baton index` against real processes: its output matches their state."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from baton.messages.workers import Role
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.limits import HANG_S

PROMPT = "All that is gold does not glitter, not all those who wander are lost. " * 12
REQUESTS = 4


async def baton_index(cluster: Cluster, *arguments: str) -> tuple[int, str]:
    """Run the command as a user would, and return its status and all that it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton.cli", "index", "--nats-url", cluster.nats_url, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ},
    )
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


async def first_report(cluster: Cluster, *arguments: str) -> dict[str, Any]:
    status, out = await baton_index(cluster, "--json", *arguments)
    assert status == 0, out
    return json.loads(out)[0]


async def report_when(cluster: Cluster, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first report on the prompt that satisfies the condition."""
    async with asyncio.timeout(HANG_S):
        while not holds(report := await first_report(cluster, "--prompt", PROMPT)):
            pass
    return report


def has_heard_all(report: dict[str, Any]) -> bool:
    workers = {each["worker"]: each for each in report["workers"]}
    agree = all(each["agreed_sequence"] == each["sequence"] for each in workers.values())
    found = workers.get("p", {}).get("cached_tokens", 0)
    return agree and found >= 0.9 * (REQUESTS - 1) * 32 * report["held"].get("p", 0) > 0


async def test_the_index_is_shown_with_its_audit_and_the_path_of_a_prompt(tmp_path: Path, model: Path) -> None:
    async with running_cluster(tmp_path, model=model) as cluster:
        # What each worker holds is known of every request, on a busy machine too.
        await cluster.start_control_plane(
            gateway_flags=("--place-resend-s", "5"), scheduler_flags=("--index-timeout-s", "5")
        )
        await cluster.start_worker(Role.PREFILL, "p")
        await cluster.start_worker(Role.DECODE, "d")
        await cluster.wait_ready()
        async with httpx.AsyncClient(base_url=cluster.url, timeout=HANG_S) as client:
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
            (await client.post("/v1/completions", json=body)).raise_for_status()
            # Hits on stored blocks are predicted from then on.
            await report_when(cluster, lambda report: len(report.get("held", {})) == 2)
            for _ in range(REQUESTS - 1):
                (await client.post("/v1/completions", json=body)).raise_for_status()
        # Heartbeats tell later what the requests found, and at which event a worker is.
        report = await report_when(cluster, has_heard_all)
        (indexed,) = report["models"]
        workers = {each["worker"]: each for each in report["workers"]}
        assert workers.keys() == {"p", "d"}
        for name, worker in workers.items():
            assert worker["agreed_sequence"] == worker["sequence"] > 0, f"{name} agrees"
            assert worker["held"]["blocks"] >= report["held"][name] > 4
        assert indexed["depth"] == report["held"]["p"] <= indexed["blocks"]
        assert indexed["prefixes"][0]["workers"] == 2
        assert (report["counters"]["resyncs_drift"], report["counters"]["resyncs_gap"]) == (0, 0)
        predicted, found = workers["p"]["predicted_tokens"], workers["p"]["cached_tokens"]
        assert predicted == (REQUESTS - 1) * 32 * report["held"]["p"]
        assert 0.9 * predicted <= found <= predicted
        assert workers["d"].get("predicted_tokens", 0) == 0, "it computes no prompt"
        other = await first_report(cluster, "--tokens", ",".join(map(str, range(5, 105))))
        assert other.get("held", {}) == {}

        status, text = await baton_index(cluster, "--prompt", PROMPT, "--top", "1")
        assert status == 0, text
        assert "writes to Redis" in text
        assert f"the same at event {workers['p']['sequence']}" in text
        assert f"of the prompt's {report['held']['p']} blocks" in text
        for arguments, word in (
            (("--prompt", "x", "--model", "other"), "--model"),
            (("--tokens", "1,x"), "1,2,3"),
            (("--tokens", "1,2"), "less than a block"),
        ):
            status, text = await baton_index(cluster, *arguments)
            assert status != 0
            assert word in text
            assert "Traceback" not in text
