"""The share of a hand-off that overlaps with prefill's computation: `make bench-overlap`.

Real vLLM on CPU, prompts of 1,500 tokens in three chunks of at most 512. The figure is the share of bytes that
have arrived on decode when prefill reports the end of the prompt; without layer-wise pulling it would be zero.
TTFT is compared with that of the decode engine alone, aggregated, and with that of a pair that stages its KV through
host memory, in interleaved runs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.cli.tiny_model import make_tiny_model
from baton.engines.engine import Leg
from baton.messages.workers import Role
from benchmarks.report import Row, report
from benchmarks.vllm_pair import VllmPair, running_pair

PROMPT_TOKENS = 1500


@dataclass(frozen=True)
class HandOff:
    ttft_s: float
    after_prefill_s: float
    """Time from prefill's end to decode's first token: the part of the hand-off that does not overlap."""
    arrived_share: float
    """Share of the bytes that had arrived when prefill ended."""


async def first_token_s(pair: VllmPair, leg: Leg, number: int) -> tuple[float, int]:
    """Return the time of decode's first token, and the bytes pulled before it."""
    came_s, pulled_bytes = 0.0, 0
    async for delta in pair.generate(
        Role.DECODE, leg, name=f"{leg}-{number}", prompt=number, prompt_tokens=PROMPT_TOKENS, output_tokens=2
    ):
        came_s, pulled_bytes = came_s or time.monotonic(), delta.transferred_bytes
    return came_s, pulled_bytes


async def hand_off(pair: VllmPair, number: int) -> HandOff:
    decode = pair.engines[Role.DECODE]

    async def pulled_bytes() -> int:
        return sum(int(rank["pulled_bytes"]) for rank in await decode.transfer_stats())

    async def prefill() -> tuple[float, int]:
        async for _ in pair.generate(
            Role.PREFILL,
            Leg.PREFILL,
            name=f"{Leg.DECODE}-{number}",
            prompt=number,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=1,
        ):
            pass
        return time.monotonic(), await pulled_bytes()

    before, began_s = await pulled_bytes(), time.monotonic()
    (computed_s, at_the_end), (came_s, total) = await asyncio.gather(prefill(), first_token_s(pair, Leg.DECODE, number))
    return HandOff(came_s - began_s, came_s - computed_s, (at_the_end - before) / total)


async def measure(model: Path, runs: int) -> list[Row]:
    handed: list[HandOff] = []
    staged: list[HandOff] = []
    whole_s: list[float] = []
    async with running_pair(model) as pair, running_pair(model, kv_path="staged") as staged_pair:
        await hand_off(pair, 0)
        await hand_off(staged_pair, 0)
        for number in range(1, runs + 1):
            handed.append(await hand_off(pair, 2 * number))
            staged.append(await hand_off(staged_pair, 2 * number))
            began_s = time.monotonic()
            came_s, _ = await first_token_s(pair, Leg.WHOLE, 2 * number + 1)
            whole_s.append(came_s - began_s)
    whole_ms = statistics.median(whole_s) * 1e3
    (ttft_ms, after_ms), (staged_ttft_ms, staged_after_ms) = medians_ms(handed), medians_ms(staged)
    return [
        Row(
            name="bytes on decode when prefill ended",
            unit="share",
            ours=statistics.median(run.arrived_share for run in handed),
        ),
        Row(name="prefill's end to decode's first token", unit="ms", ours=after_ms),
        Row.against("time to first token, prefill to decode", "ms", ttft_ms, aggregated=whole_ms),
        Row.against("prefill's end to decode's first token, staged", "ms", staged_after_ms, direct=after_ms),
        Row.against("time to first token, prefill to decode, staged", "ms", staged_ttft_ms, direct=ttft_ms),
    ]


def medians_ms(runs: Sequence[HandOff]) -> tuple[float, float]:
    """Return the time to the first token, and the part of it after prefill's end."""
    return (
        statistics.median(run.ttft_s for run in runs) * 1e3,
        statistics.median(run.after_prefill_s for run in runs) * 1e3,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=9, help="counted runs of each kind (default 9)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder))
        rows = asyncio.run(measure(Path(folder), arguments.runs))
    report("overlap", rows, notes=f"prompts of {PROMPT_TOKENS} tokens, medians of {arguments.runs} interleaved runs")


if __name__ == "__main__":
    main()
