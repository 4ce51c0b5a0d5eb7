"""compose.yaml unchanged: real vLLM on the CPU and the tiny model, made by the first start."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.compose.clients import connect, stream
from tests.compose.project import Project, docker, running, torch_wheel

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    settings = {"ENGINE": "vllm", "DISAGGREGATION": "always"}
    if not os.environ.get("WHEELS") and not os.environ.get("TORCH_INDEX_URL"):
        settings["WHEELS"] = str(torch_wheel())
    with running(Project(name="baton-test-vllm", settings=settings), scale={}, timeout_s=3000.0) as started:
        yield started


def test_real_engines_stream_over_containers(project: Project) -> None:
    for image in ("baton-prefill:vllm", "baton-decode:vllm"):
        print(f"{image}: {int(docker('image', 'inspect', '-f', '{{.Size}}', image)) // 1_000_000} MB")
    prompt = "Once upon a time there was a router. " * 30
    with connect(project.url) as client:
        texts = {"".join(stream(client, prompt, tokens=40)) for _ in range(3)}
    assert len(texts) == 1
    (decode,) = project.containers("decode")
    assert project.metric(decode, 'baton_pulls_total{backend="shm"}') >= 1, "KV came from the other container"
    log = project.compose("logs", "decode")
    assert "KV comes over tcp" not in log
