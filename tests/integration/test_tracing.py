"""Traces of real processes: received by a collector, and shown by `baton trace` without one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.cli.servers import free_port
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.limits import HANG_S
from tests.harness.telemetry import (
    STORY,
    Answer,
    Collector,
    Trace,
    TracedSpan,
    ask,
    ask_while_decode_is_killed,
    check_retried,
    check_whole,
    export_traces,
    running_collector,
    start_all,
)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with running_collector() as running:
        yield running


@pytest.fixture
async def cluster(tmp_path: Path, model: Path) -> AsyncIterator[Cluster]:
    """NATS and Redis; the test configures the services' export and starts them."""
    async with running_cluster(tmp_path, model=model) as cluster:
        yield cluster


async def collected(collector: Collector, answer: Answer, *legs: str, after_kill: bool = False) -> Trace:
    """Return an answer's trace once the request's own span and those of all `legs` have arrived."""

    def trace_of(spans: list[TracedSpan]) -> list[TracedSpan]:
        roots = [span.trace for span in spans if span.attributes.get("baton.request_id") == answer.request_id]
        return [span for span in spans if span.trace in roots]

    def complete(spans: list[TracedSpan]) -> bool:
        names = [span.name for span in trace_of(spans)]
        return {*legs, "match", "send"} <= set(names)

    return Trace(trace_of(await asyncio.to_thread(collector.wait_for, complete)), after_kill=after_kill)


async def baton_trace(cluster: Cluster, *arguments: str, **environ: str) -> tuple[int, str, str]:
    """Run the command as a user would, and return its status, output and errors."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton.cli", "trace", "--nats-url", cluster.nats_url, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", **environ},
    )
    out, errors = await process.communicate()
    return process.returncode or 0, out.decode(), errors.decode()


async def test_a_request_is_one_tree_through_all_services_also_after_a_killed_worker(
    cluster: Cluster, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_traces(monkeypatch, collector.url)
    await start_all(cluster, prefill=1, decode=2)
    for number in range(5):
        whole = await collected(collector, await ask(cluster, prompt=f"{number} {STORY}"), "prefill", "decode")
        check_whole(whole)
        if whole.is_accounted_for():
            break  # A busy machine may stop between two stages, now and then.
    else:
        raise AssertionError("no trace accounts for the time of its request")
    assert {span.service for span in whole.spans.values()} == {
        *("baton-gateway", "baton-scheduler", "baton-kvindex", "baton-prefill", "baton-decode"),
    }
    struck = await ask_while_decode_is_killed(cluster, prompt="another " * 300)
    assert struck.text.rstrip().endswith("data: [DONE]")
    retried = await collected(collector, struck, "decode", after_kill=True)
    check_retried(retried)
    failed, again = retried.named("attempt")
    assert again.links == (failed.span,)


async def test_baton_trace_shows_a_request_without_any_back_end(cluster: Cluster) -> None:
    await start_all(cluster, prefill=1, decode=2)
    answer = await ask_while_decode_is_killed(cluster, prompt="a story " * 300)

    async def as_json() -> dict[str, Any]:
        status, out, _ = await baton_trace(cluster, answer.request_id, "--json")
        assert status == 0
        return json.loads(out)

    names = [answer.request_id, (await as_json())["trace"], json.loads(answer.text.split("\n")[0][6:])["id"]]
    shown = by_trace = by_answer = ""
    async with asyncio.timeout(HANG_S):  # The last spans may still be on their way to those who keep them.
        while not shown == by_trace == by_answer != "":
            shown, by_trace, by_answer = [(await baton_trace(cluster, name, COLUMNS="120"))[1] for name in names]
    assert "\x1b" not in shown, "no colour where output is not a terminal"
    assert all(len(line) <= 120 for line in shown.splitlines())
    for part in ("chat tiny", "tokenise", "place (scheduler)", "match (kvindex)", "prefill (prefill-0)", "by shm"):
        assert part in shown, shown
    assert "attempt 0: " in shown
    assert "Ended by worker_lost: " in shown
    assert "attempt 1: " in shown

    spans = {span["span"]: span for span in (await as_json())["spans"]}
    (root,) = [span for span in spans.values() if span.get("parent", "") not in spans]
    assert root["name"] == "chat tiny"


async def test_baton_trace_of_what_is_unknown_malformed_or_out_of_reach_is_one_sentence(cluster: Cluster) -> None:
    nobody = await baton_trace(cluster, "some-id")
    await cluster.start("kvindex", "baton_kvindex", "--redis-url", cluster.redis_url)
    answers = ""
    give_up_at_s = time.monotonic() + 20
    while "none of the 1 services" not in answers:
        assert time.monotonic() < give_up_at_s, answers
        status, _, answers = await baton_trace(cluster, "some-id")
        assert status == 1
    malformed = await baton_trace(cluster, "no id")
    absent = await baton_trace(cluster, "some-id", "--nats-url", f"nats://127.0.0.1:{free_port()}")
    no_deployment = await baton_trace(cluster, "some-id", "--nats-url", "", "--port", "1", NATS_URL="")
    for (status, out, errors), sentence in (
        (nobody, "no service answered"),
        ((1, "", answers), "none of the 1 services that answered knows some-id"),
        (malformed, "'no id' is no request's id"),
        (absent, "127.0.0.1"),
        (no_deployment, "no `baton up` runs in"),
    ):
        assert (status, out) == (1, ""), errors
        assert errors.startswith("baton: ")
        assert sentence in errors
        assert errors.count("\n") == 1, errors


async def test_of_unsampled_requests_the_failed_are_exported_by_every_service(
    cluster: Cluster, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_traces(monkeypatch, collector.url, share=0.0)
    await start_all(cluster, prefill=1, decode=2)
    well = await ask(cluster)
    struck = await ask_while_decode_is_killed(cluster, prompt="a story " * 300)
    check_retried(await collected(collector, struck, "decode", after_kill=True))
    assert not [span for span in collector.spans if span.attributes.get("baton.request_id") == well.request_id]
    assert len({span.trace for span in collector.spans}) == 1


@pytest.mark.nightly
async def test_a_collector_that_is_down_loses_traces_and_nothing_else(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_traces(monkeypatch, f"http://127.0.0.1:{free_port()}")
    await start_all(cluster, prefill=1, decode=1)
    assert (await ask(cluster)).status == 200
    for name in cluster.services:
        await cluster.wait_log(name, "takes no traces")
    assert (await ask(cluster)).status == 200
    for name, service in cluster.services.items():
        log = service.log.read_text()
        assert log.count("takes no traces") == 1, f"{name}: {log}"
        assert "Transient error" not in log
        assert "Traceback" not in log
    began_s = time.monotonic()
    for name in ("kvindex", "scheduler", "gateway"):
        cluster.services[name].signal(signal.SIGTERM)
    await asyncio.gather(*(cluster.services[name].end() for name in ("kvindex", "scheduler", "gateway")))
    assert time.monotonic() - began_s < 4.0
