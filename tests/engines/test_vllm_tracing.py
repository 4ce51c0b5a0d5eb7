"""A request over real vLLM is one trace: our stages with times out of vLLM's own processes, and vLLM's own spans."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.messages import Role
from tests.cluster import running_cluster
from tests.otlp import running_collector
from tests.traced_cluster import PATHS, ask, export_traces
from tests.traces import Trace, TracedSpan

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 200,
}
OF_VLLM = {
    "chat tiny / attempt / dispatch / prefill / llm_request",
    "chat tiny / attempt / dispatch / decode / llm_request",
}


async def test_stages_and_vllms_own_spans_are_in_the_requests_trace(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_collector() as collector:
        export_traces(monkeypatch, collector.url)
        async with running_cluster(tmp_path, model=tiny_model) as cluster:
            await cluster.start_control_plane(gateway_flags=("--accept-s", "2.0", "--worker-dead-s", "4.0"))
            for role in Role:
                await cluster.start_worker(role, f"{role}-0", engine="vllm", options=OPTIONS)
                await cluster.wait_worker(f"{role}-0", timeout_s=300)
            await cluster.wait_ready()
            # The first request pays for what is compiled and connected then.
            await ask(cluster, prompt="hello")
            answer = await ask(cluster)

            def spans_of(spans: list[TracedSpan]) -> list[TracedSpan]:
                roots = [span.trace for span in spans if span.attributes.get("baton.request_id") == answer.request_id]
                return [span for span in spans if span.trace in roots]

            def complete(spans: list[TracedSpan]) -> bool:
                names = [span.name for span in spans_of(spans)]
                return {"match", "send", "prefill", "decode"} <= set(names) and names.count("llm_request") == 2

            arrived = await asyncio.to_thread(collector.wait_for, complete, timeout_s=20)
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
    assert trace.leaf_coverage() >= 0.95
