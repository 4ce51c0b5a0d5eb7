"""A whole Baton whose services export their traces, and the requests that tests trace through it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
import pytest

from baton.messages import AttemptState, Role
from tests.cluster import Cluster
from tests.traces import Trace

SERVICES = ("gateway", "scheduler", "kvindex", "prefill", "decode")
OUTPUT_TOKENS = 240
STORY = " ".join(f"line {number}: the quick brown fox" for number in range(60))
OPTIONS: Mapping[str, object] = {"eos_probability": 0.0, "speed": 2.0, "layers": 4, "seed": 1}
"""Some seconds for an answer: what messages take on their way is small against it, even on a busy machine."""
PATIENT = ("--accept-s", "5", "--place-resend-s", "5", "--worker-dead-s", "4")
"""On a busy machine only the worker that is killed is taken for lost, so that traces have the attempts they should."""

PATHS = {
    "chat tiny",
    "chat tiny / read",
    "chat tiny / tokenise",
    "chat tiny / attempt",
    "chat tiny / attempt / place",
    "chat tiny / attempt / place / place",
    "chat tiny / attempt / place / place / match",
    "chat tiny / attempt / dispatch",
    "chat tiny / attempt / dispatch / prefill",
    "chat tiny / attempt / dispatch / prefill / queue",
    "chat tiny / attempt / dispatch / prefill / compute",
    "chat tiny / attempt / dispatch / decode",
    "chat tiny / attempt / dispatch / decode / queue",
    "chat tiny / attempt / dispatch / decode / transfer",
    "chat tiny / attempt / dispatch / decode / transfer / layers",
    "chat tiny / attempt / dispatch / decode / first token",
    "chat tiny / attempt / dispatch / decode / generate",
    "chat tiny / attempt / first token",
    "chat tiny / attempt / stream",
    "chat tiny / send",
}
"""Of a streamed, disaggregated chat: every stage, below what caused it."""


@dataclass(frozen=True)
class Answer:
    request_id: str
    status: int
    text: str


def export_traces(monkeypatch: pytest.MonkeyPatch, endpoint: str, *, share: float = 1.0) -> None:
    """Have every service that is started from now on export to `endpoint`."""
    for service in SERVICES:
        monkeypatch.setenv(f"BATON_{service.upper()}_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv(f"BATON_{service.upper()}_TRACE_SHARE", str(share))


async def start_all(cluster: Cluster, *, prefill: int, decode: int) -> None:
    """Start one of each service and so many workers."""
    await cluster.start_control_plane(gateway_flags=PATIENT)
    for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for number in range(count):
            await cluster.start_worker(role, f"{role}-{number}", "--digest-s", "0.1", options=OPTIONS)
    await cluster.wait_ready()


async def ask(cluster: Cluster, *, prompt: str = STORY, headers: Mapping[str, str] | None = None) -> Answer:
    """Stream one answer as a client would."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "temperature": 0,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
    }
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60.0) as client:
        response = await client.post("/v1/chat/completions", json=body, headers=dict(headers or {}))
    return Answer(response.headers["x-request-id"], response.status_code, response.text)


async def ask_while_decode_is_killed(cluster: Cluster, *, prompt: str) -> Answer:
    """Kill the decode worker that streams the answer; another one goes on."""
    answer = asyncio.create_task(ask(cluster, prompt=prompt))
    worker = await cluster.observer.worker_in(Role.DECODE, AttemptState.RUNNING)
    cluster.services[worker].signal(signal.SIGKILL)
    return await answer


def check_whole(trace: Trace) -> None:
    """One tree with every stage, whose leaves account for its time."""
    assert trace.paths() == PATHS
    prefill, decode = trace.named("prefill")[0], trace.named("decode")[0]
    dispatched = {span.span: span.attributes["baton.worker"] for span in trace.named("dispatch")}
    for leg in (prefill, decode):
        assert leg.attributes["baton.worker"] == dispatched[leg.parent]
    (transfer,) = trace.named("transfer")
    layers = trace.named("layers")
    assert sum(int(str(span.attributes["baton.transfer.layers"])) for span in layers) == OPTIONS["layers"]
    moved_bytes = [int(str(span.attributes["baton.transfer.bytes"])) for span in layers]
    assert 0 < sum(moved_bytes) == transfer.attributes["baton.transfer.bytes"]
    assert {span.attributes["baton.transfer.backend"] for span in layers} <= {"shm", "tcp"}
    assert all(
        "baton.transfer.waiting_s" in span.attributes and span.attributes["baton.transfer.rail"] for span in layers
    )
    assert trace.root.attributes["gen_ai.usage.output_tokens"] == OUTPUT_TOKENS
    assert trace.leaf_coverage() >= 0.95


def check_retried(trace: Trace) -> None:
    """One tree with two attempts side by side, of which the second makes up for the first."""
    failed, again = trace.named("attempt")
    assert failed.parent == again.parent == trace.root.span
    assert failed.attributes["error.type"] == "worker_lost"
    assert failed.error
    assert again.attributes["baton.retry_of"] == failed.span
    assert failed.attributes["baton.placement.decode"] != again.attributes["baton.placement.decode"]
    (decode,) = trace.named("decode")
    assert decode.attributes["baton.worker"] == again.attributes["baton.placement.decode"]
    assert [span.name for span in (trace.spans[decode.parent], trace.spans[trace.spans[decode.parent].parent])] == [
        "dispatch",
        "attempt",
    ]
    assert trace.spans[trace.spans[decode.parent].parent].span == again.span
    assert not trace.root.error
    assert trace.leaf_coverage() >= 0.95
