"""Predicted against actual time to first token with real vLLM: `make bench-prediction`.

A complete deployment as `baton up` starts it, one prefill and one decode worker on CPU. Requests arrive at random, with
prompts of 16 to 1,024 words, of which a part continues an earlier prompt. The figures come from the gateway's metric
`baton_ttft_prediction_ratio`: actual by predicted time, from the placement to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
from itertools import pairwise
from pathlib import Path
from random import Random

import httpx

from benchmarks.deployment import deployment
from benchmarks.report import Row, report

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "seven", "wizards", "box")
WORDS_MIN, WORDS_MAX = 16, 1024
CONTINUED_SHARE = 0.3
WARM_UP = 60
"""Requests that are not counted: from them, workers learn their rates."""
BUCKET = re.compile(r'^baton_ttft_prediction_ratio_bucket\{.*le="([^"]+)".*\} (\S+)', re.MULTILINE)

Histogram = dict[float, float]
"""Upper bound → observations up to there."""


def prompts(count: int, random: Random) -> list[str]:
    """Return prompts of log-uniform length; a part of them begins with the last one."""
    made: list[str] = []
    for number in range(count):
        words = random.choices(WORDS, k=round(WORDS_MIN * (WORDS_MAX / WORDS_MIN) ** random.random()))
        begins = [made[-1]] if made and random.random() < CONTINUED_SHARE else [f"prompt {number}"]
        text = " ".join([*begins, *words])
        made.append(" ".join(text.split()[:WORDS_MAX]))
    return made


async def send(url: str, texts: list[str], rate: float, random: Random) -> None:
    """Send requests at random times, `rate` per second on average; each must be answered."""

    async def ask(text: str) -> None:
        body = {"model": "tiny", "prompt": text, "max_tokens": random.randint(4, 24), "temperature": 0}
        (await client.post("/v1/completions", json=body)).raise_for_status()

    async with httpx.AsyncClient(base_url=url, timeout=120.0) as client, asyncio.TaskGroup() as group:
        for text in texts:
            group.create_task(ask(text))
            await asyncio.sleep(random.expovariate(rate))


def read(port: int) -> Histogram:
    shown = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return {float(bound): float(count) for bound, count in BUCKET.findall(shown)}


def quantile(counts: Histogram, share: float) -> float:
    """Return a quantile, taking observations as spread evenly within each bucket."""
    total = max(counts.values())
    for (low, below), (high, up_to) in pairwise([(0.0, 0.0), *sorted(counts.items())]):
        if up_to >= share * total > below:
            return low if high == float("inf") else low + (high - low) * (share * total - below) / (up_to - below)
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=240, help="requests that count (default 240)")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second (default 2)")
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python", help="interpreter that has vLLM")
    arguments = parser.parse_args()
    random = Random(1)
    texts = prompts(WARM_UP + arguments.requests, random)
    flags = ("--disaggregation", "always", "--prefill", "1", "--decode", "1", "--vllm-python", arguments.vllm_python)
    with tempfile.TemporaryDirectory() as folder, deployment(Path(folder), flags) as ports:
        url = f"http://127.0.0.1:{ports.http}"
        asyncio.run(send(url, texts[:WARM_UP], arguments.rate, random))
        before = read(ports.gateway_status)
        asyncio.run(send(url, texts[WARM_UP:], arguments.rate, random))
        counts = {bound: count - before[bound] for bound, count in read(ports.gateway_status).items()}
    rows = [
        Row(name=f"actual by predicted TTFT, p{share * 100:.0f}", unit="", ours=quantile(counts, share))
        for share in (0.1, 0.5, 0.9)
    ]
    within = (counts[1.5] - counts[0.67]) / max(counts.values())
    rows.append(Row(name="predictions within a factor of 1.5", unit="", ours=within))
    report("prediction", rows, notes=f"vLLM on CPU, 1 prefill and 1 decode; {arguments.requests} requests")


if __name__ == "__main__":
    main()
