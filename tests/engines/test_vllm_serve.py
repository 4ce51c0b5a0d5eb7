"""Stock `vllm serve` and Baton over vLLM, with the same model and options: the same answers, but for what is listed."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import pytest_asyncio
from serving import PATIENCE
from surface import MESSAGES, Ask, asks, differences, whole

from baton.cli.servers import free_port
from baton.messages.workers import Role
from tests.harness.cluster import Cluster, running_cluster

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "vllm-serve.md"
OPTIONS: Final[dict[str, Any]] = {
    "dtype": "float32", "max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 200,
}  # fmt: skip
ENVIRON: Final = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.nightly]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stock(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """The address of vLLM's own server."""
    port, log = free_port(), tmp_path_factory.mktemp("stock") / "log"
    flags = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, "--trust-request-chat-template", "--exclude-tools-when-tool-choice-none", *flags,
            env={**os.environ, **ENVIRON}, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        async with asyncio.timeout(400), httpx.AsyncClient(base_url=url) as client:
            while True:
                with suppress(httpx.TransportError):
                    if (await client.get("/health")).status_code == 200:
                        break
                assert process.returncode is None, log.read_text()[-3000:]
                await asyncio.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 30)
        except TimeoutError:
            process.kill()
            await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(stock: str, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> AsyncIterator[Cluster]:
    del stock  # One engine after another.
    async with running_cluster(tmp_path_factory.mktemp("beside"), model=tiny_model) as cluster:
        await cluster.start_control_plane(gateway_flags=(*PATIENCE, "--trust-request-chat-template"))
        for role in (Role.PREFILL, Role.DECODE):
            await cluster.start_worker(role, f"{role}-0", engine="vllm", options=OPTIONS)
            await cluster.wait_worker(f"{role}-0", timeout_s=400)
        await cluster.wait_ready()
        yield cluster


async def answer(client: httpx.AsyncClient, ask: Ask) -> httpx.Response:
    if ask.body is None:
        return await client.get(ask.path)
    return await client.post(ask.path, json=ask.body)


def listed(heading: str) -> set[tuple[str, ...]]:
    """Return the first three cells of each row of a table in the document."""
    section = DOCUMENT.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    return {tuple(cell.strip().strip("`") for cell in row[:3]) for row in rows}


@pytest.mark.timeout(1800)
async def test_answers_differ_only_where_it_is_listed(stock: str, cluster: Cluster) -> None:
    """Every difference is in the document, and every line of the document is a difference."""
    fields: set[tuple[str, ...]] = set()
    statuses: set[tuple[str, ...]] = set()
    examples: dict[tuple[str, ...], object] = {}
    requests = asks()
    assert len(requests) >= 260
    async with (
        httpx.AsyncClient(base_url=stock, timeout=300) as theirs,
        httpx.AsyncClient(base_url=cluster.url, timeout=300) as ours,
    ):
        for ask in requests:
            stocks, batons = await answer(theirs, ask), await answer(ours, ask)
            if stocks.status_code != batons.status_code:
                row = (f"{ask.kind}: {ask.name}", str(stocks.status_code), str(batons.status_code))
                statuses.add(row)
                examples[row] = (stocks.text[:300], batons.text[:300])
                continue
            shape = "messages " if ask.path.startswith(MESSAGES) else ""
            kind = ask.kind if batons.status_code == 200 else f"{shape}error {batons.status_code}"
            found = differences(kind, whole(stocks.text), whole(batons.text))
            fields |= found
            examples.update(dict.fromkeys(found, (ask, stocks.text[:1500], batons.text[:1500])))
    expected = (listed("Fields"), listed("Statuses"))
    unlisted = sorted((fields - expected[0]) | (statuses - expected[1]))
    for row in unlisted:
        print(row, examples[row], sep="\n  ")
    gone = sorted((expected[0] - fields) | (expected[1] - statuses))
    assert (unlisted, gone) == ([], []), "bring docs/vllm-serve.md in line"
