"""Traces in a real back end: Arize Phoenix, queried over REST.

Phoenix has an environment of its own, `.venv-phoenix`, which `make test-nightly` creates if the packages are available.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.cli.servers import free_port
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.telemetry import (
    Answer,
    Trace,
    TracedSpan,
    ask,
    ask_while_decode_is_killed,
    check_retried,
    check_whole,
    export_traces,
    start_all,
)

ENVIRONMENT = Path(__file__).parents[2] / ".venv-phoenix"
START_TIMEOUT_S = 240.0


def _is_installed() -> bool:
    stamps = ENVIRONMENT / "baton-stamps.json"
    return stamps.exists() and "phoenix" in json.loads(stamps.read_text())


pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not _is_installed(), reason="Phoenix is not installed here: `make environment-phoenix` installs it, given PyPI"
    ),
]


@dataclass
class Phoenix:
    url: str

    def spans(self) -> list[TracedSpan]:
        """Return everything that Phoenix has stored."""
        spans: list[TracedSpan] = []
        cursor: str | None = None
        while True:
            query = {"limit": "1000", **({"cursor": cursor} if cursor else {})}
            response = httpx.get(f"{self.url}/v1/projects/default/spans", params=query, timeout=30.0)
            if response.status_code == 404:
                return spans  # Its project appears with the first span.
            content: dict[str, Any] = response.raise_for_status().json()
            spans += [_span(span) for span in content["data"]]
            cursor = content["next_cursor"]
            if not cursor:
                return spans


def _span(span: dict[str, Any]) -> TracedSpan:
    return TracedSpan(
        trace=span["context"]["trace_id"],
        span=span["context"]["span_id"],
        parent=span["parent_id"] or "",
        name=span["name"],
        start_ns=_ns(span["start_time"]),
        end_ns=_ns(span["end_time"]),
        error=span["status_message"] if span["status_code"] == "ERROR" else "",
        attributes=span["attributes"],
    )


def _ns(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1e6) * 1000


@pytest.fixture(scope="module")
def phoenix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Phoenix]:
    folder, port = tmp_path_factory.mktemp("phoenix"), free_port()
    environ = {
        **os.environ,
        "HOME": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false",
    }
    log = folder / "log"
    with log.open("wb") as output:
        command = [str(ENVIRONMENT / "bin" / "python"), "-m", "phoenix.server.main", "serve"]
        process = subprocess.Popen(command, env=environ, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
    try:
        running = Phoenix(f"http://127.0.0.1:{port}")
        give_up_at_s = time.monotonic() + START_TIMEOUT_S
        while not _answers(running):
            assert process.poll() is None and time.monotonic() < give_up_at_s, log.read_text()[-3000:]
            time.sleep(0.2)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(phoenix: Phoenix) -> bool:
    try:
        return httpx.get(f"{phoenix.url}/healthz", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
async def cluster(
    tmp_path: Path, model: Path, phoenix: Phoenix, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    export_traces(monkeypatch, phoenix.url)
    async with running_cluster(tmp_path, model=model) as cluster:
        yield cluster


async def stored(phoenix: Phoenix, answer: Answer, *legs: str, after_kill: bool = False) -> Trace:
    """Return an answer's trace as Phoenix has it, once the request's span and those of all `legs` are there."""
    give_up_at_s = time.monotonic() + 60
    while True:
        spans = await asyncio.to_thread(phoenix.spans)
        roots = [span.trace for span in spans if _request_id(span) == answer.request_id]
        trace = [span for span in spans if span.trace in roots]
        if {*legs, "match", "send"} <= {span.name for span in trace}:
            return Trace(trace, after_kill=after_kill)
        assert time.monotonic() < give_up_at_s, f"Phoenix has only {sorted(span.name for span in trace)}"
        await asyncio.sleep(0.5)


def _request_id(span: TracedSpan) -> object:
    return span.attributes.get("baton.request_id")


@pytest.mark.timeout(600)
async def test_phoenix_shows_a_request_as_one_tree_also_after_a_killed_worker(
    cluster: Cluster, phoenix: Phoenix
) -> None:
    await start_all(cluster, prefill=1, decode=2)
    whole = await stored(phoenix, await ask(cluster), "prefill", "decode")
    check_whole(whole)
    struck = await ask_while_decode_is_killed(cluster, prompt="another " * 300)
    retried = await stored(phoenix, struck, "decode", after_kill=True)
    check_retried(retried)
    assert whole.is_accounted_for()
    assert retried.is_accounted_for()
