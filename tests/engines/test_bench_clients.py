"""The load clients of vLLM and SGLang run against Baton as they are, each in its own environment."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from baton.messages.workers import Role
from benchmarks.remote_engine.settings import engine_environ, engine_python
from tests.harness.cluster import Cluster, running_cluster

REQUESTS: Final = 24
INPUT_TOKENS: Final = 64
OUTPUT_TOKENS: Final = 16
VLLM_CLIENT: Final = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
"""`vllm bench serve`: the `vllm` command itself does not start with the build for the CPU."""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path_factory.mktemp("clients"), model=tiny_model) as cluster:
        await cluster.start_control_plane()
        for role in (Role.PREFILL, Role.DECODE):
            await cluster.start_worker(role, f"{role}-0")
        await cluster.wait_ready()
        yield cluster


async def ran(command: list[str], environ: dict[str, str] | None = None) -> str:
    """Run a client to its end and return what it printed."""
    process = await asyncio.create_subprocess_exec(
        *command, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 500)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = output.decode(errors="replace")
    assert process.returncode == 0, text[-3000:]
    return text


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")]
)
async def test_vllm_bench_serve(cluster: Cluster, tmp_path: Path, backend: str, endpoint: str) -> None:
    pytest.importorskip("vllm")
    flags = [
        *("--backend", backend, "--base-url", cluster.url, "--endpoint", endpoint),
        *("--model", "tiny", "--tokenizer", str(cluster.model), "--dataset-name", "random", "--ignore-eos"),
        *("--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(OUTPUT_TOKENS)),
        *("--num-prompts", str(REQUESTS), "--save-result", "--result-dir", str(tmp_path)),
    ]
    await ran([sys.executable, "-c", VLLM_CLIENT, *flags])
    (written,) = await asyncio.to_thread(lambda: list(tmp_path.glob("*.json")))
    result: dict[str, Any] = json.loads(written.read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * OUTPUT_TOKENS


@pytest.mark.parametrize("backend", ["sglang-oai-chat", "sglang-oai"])
async def test_sglang_bench_serving(cluster: Cluster, tmp_path: Path, backend: str) -> None:
    python = engine_python("sglang")
    if python is None:
        pytest.skip("there is no environment with sglang: make environment-sglang")
    written = tmp_path / "result.jsonl"
    flags = [
        *("--backend", backend, "--base-url", cluster.url, "--model", "tiny", "--tokenizer", str(cluster.model)),
        *("--dataset-name", "random-ids", "--random-input-len", str(INPUT_TOKENS)),
        *("--random-output-len", str(OUTPUT_TOKENS), "--random-range-ratio", "1.0"),
        *("--num-prompts", str(REQUESTS), "--output-file", str(written)),
    ]
    await ran([python, "-m", "sglang.bench_serving", *flags], engine_environ("sglang"))
    result: dict[str, Any] = json.loads(written.read_text().splitlines()[-1])
    assert result["completed"] == REQUESTS
    assert result["total_output_tokens"] == REQUESTS * OUTPUT_TOKENS
