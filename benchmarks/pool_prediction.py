"""Predicted against actual time to first token of prefixes from a peer's KV pool and from a file: real vLLM on a CPU.

`make bench-pool-prediction` runs two deployments as `baton up` starts them. In the first, two workers take requests in
turn, so each prompt's second request is placed where the prompt has to be borrowed or computed. In the second, one
worker has room for two prompts on its device and in its pool, so each second request reads the file or computes. What
was predicted is what `baton explain` tells of the attempt; computing is the same prompt's first request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from baton.pool.memory import slot_bytes
from benchmarks.deployment import Ports, deployment
from benchmarks.report import Row, report

BLOCK_TOKENS: Final = 32
LAYERS: Final = 4
BLOCK_BYTES: Final = BLOCK_TOKENS * 2 * 2 * 64 * 4
"""One layer of the tiny model's block: K and V, two heads of 64 numbers, four bytes each."""
PROMPT_BLOCKS_MAX: Final = 64
ENGINE: Final = {
    "dtype": "float32",
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 2 * PROMPT_BLOCKS_MAX,
    "block_size": BLOCK_TOKENS,
}
WARM_UP: Final = 20
"""Prompts that are not counted: from them, workers learn their rates."""
SETTLED_S: Final = 0.5
"""Time after an answer in which its KV is saved and the index hears of it."""


@dataclass(frozen=True)
class Second:
    """The second request for a prompt; times from the placement to the first token."""

    computing_s: float
    actual_s: float
    predicted_s: float
    bound_s: float


def prompt(number: int) -> str:
    return f"story {number}: " + "it is interrupted " * (100 + 40 * (number % 5))


def explained(ports: Ports, folder: Path, request: str) -> dict[str, Any]:
    """Return what became of the last attempt of a request."""
    command = [sys.executable, "-m", "baton.cli", "explain", "--json", "--port", str(ports.http)]
    said = subprocess.run([*command, "--folder", str(folder), request], capture_output=True, text=True, check=True)
    return json.loads(said.stdout)["attempts"][-1]["report"]


async def ask(client: httpx.AsyncClient, text: str, name: str) -> None:
    body = {"model": "tiny", "prompt": text, "max_tokens": 2, "temperature": 0}
    answer = await client.post("/v1/completions", json=body, headers={"x-request-id": name})
    answer.raise_for_status()
    await asyncio.sleep(SETTLED_S)


async def ask_twice(ports: Ports, count: int, behind: int) -> None:
    """Ask for each prompt twice, the second time after `behind` others."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports.http}", timeout=120.0) as client:
        for number in range(count + behind):
            if number < count:
                await ask(client, prompt(number), f"first-{number}")
            if number >= behind:
                await ask(client, prompt(number - behind), f"second-{number - behind}")


def measure(count: int, flags: Sequence[str], settings: Mapping[str, str], *, behind: int) -> list[Second]:
    """Return the second requests for which placement chose not to compute all of the prompt."""
    seconds: list[Second] = []
    with tempfile.TemporaryDirectory() as name, deployment(Path(name), flags, settings) as ports:
        asyncio.run(ask_twice(ports, WARM_UP + count, behind))
        for number in range(WARM_UP, WARM_UP + count):
            first, second = (explained(ports, Path(name), f"{which}-{number}") for which in ("first", "second"))
            predicted = second["predicted"]
            # Zeros are left out of the report.
            if predicted.get("borrowed_tokens") or predicted.get("cached_tokens"):
                times = predicted["predicted_ttft_s"], predicted["ttft_bound_s"]
                seconds.append(Second(first["ttft_s"], second["ttft_s"], *times))
    return seconds


def rows_of(what: str, count: int, seconds: Sequence[Second]) -> list[Row]:
    if not seconds:
        return [Row(name=f"{what}: chosen, of {count}", unit="", ours=0)]
    actual, computing = ([getattr(each, name) * 1e3 for each in seconds] for name in ("actual_s", "computing_s"))
    by_predicted = sorted(each.actual_s / each.predicted_s for each in seconds)
    low, *_, high = statistics.quantiles(by_predicted, n=10)
    median = statistics.median
    return [
        Row(name=f"{what}: chosen, of {count}", unit="", ours=len(seconds)),
        Row.against(f"{what}: TTFT", "ms", median(actual), computing=median(computing)),
        Row(name=f"{what}: TTFT at most that of computing", unit="", ours=_share(seconds, "computing_s")),
        Row(name=f"{what}: TTFT at most what was predicted", unit="", ours=_share(seconds, "predicted_s")),
        Row(name=f"{what}: TTFT at most the prediction's bound", unit="", ours=_share(seconds, "bound_s")),
        Row(
            name=f"{what}: bound by prediction, p50",
            unit="",
            ours=median(each.bound_s / each.predicted_s for each in seconds),
        ),
        *(
            Row(name=f"{what}: actual by predicted TTFT, {name}", unit="", ours=value)
            for name, value in (("p10", low), ("p50", median(by_predicted)), ("p90", high))
        ),
    ]


def _share(seconds: Sequence[Second], bound: str) -> float:
    return sum(each.actual_s <= getattr(each, bound) for each in seconds) / len(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompts", type=int, default=60, help="prompts that count (default 60)")
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python", help="interpreter that has vLLM")
    arguments = parser.parse_args()
    slot = slot_bytes(LAYERS, BLOCK_BYTES)
    # The large one holds all prompts.
    large, small = str((arguments.prompts + WARM_UP) * PROMPT_BLOCKS_MAX * slot), str(2 * PROMPT_BLOCKS_MAX * slot)
    common = ("--disaggregation", "never", "--engine-options", json.dumps(ENGINE), "--prefill", "0")
    common = (*common, "--vllm-python", arguments.vllm_python)
    count = arguments.prompts
    in_turn = {"BATON_SCHEDULER_POLICY": "round-robin"}
    lent = measure(count, (*common, "--decode", "2", "--kv-pool-bytes", large), in_turn, behind=0)
    with tempfile.TemporaryDirectory() as folder:
        file = ("--decode", "1", "--kv-pool-bytes", small, "--kv-file-bytes", large, "--kv-folder", folder)
        filed = measure(count, (*common, *file), {}, behind=8)
    rows = [*rows_of("lent by a peer", count, lent), *rows_of("from the file", count, filed)]
    report("pool_prediction", rows, notes="vLLM on CPU, prompts of 505 to 1,306 tokens, one request at a time")


if __name__ == "__main__":
    main()
