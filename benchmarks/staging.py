"""The effect of staged hand-offs on decode's token interval: `make bench-staging`.

Real vLLM, one prefill and one decode engine, KV staged on both sides. Two requests stream from the decode engine.
Beside them come, in turn: nothing; requests whose prompts prefill has computed and staged before, so that their KV is
pulled and copied to decode's cache, and one token is computed; the same requests again, whose prompts are cached by
then, so that one token is computed and nothing is copied. Compared are the two streams' token intervals.

After that, without streams: the time from prefill's end to decode's first token.

    --device cuda    on an NVIDIA GPU, which both engines share; part of `make test-gpu`. There the figures have goals,
                     and it ends with status 1 where one is missed
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from baton.cli.tiny_model import make_tiny_model
from baton.engines.engine import Leg
from baton.messages.workers import Role
from benchmarks.overlap import hand_off
from benchmarks.report import RESULTS, Row, report
from benchmarks.vllm_pair import STEP_TOKENS, VllmPair, running_pair

Window = Literal["staging", "alone", "cached"]
Device = Literal["cpu", "cuda"]

STREAMS: Final = 2
STREAM_TOKENS: Final = 2500
PROMPTS: Final = 4
PROMPT_TOKENS: Final = 1500
ALONE_S: Final = 0.3
PAUSE_S: Final = 0.1
HAND_OFFS: Final = 9
INTERVAL_GOAL: Final = 1.05
"""Token interval beside staging, as a multiple of that beside the same requests without it."""
AFTER_PREFILL_GOAL_MS: Final = 5.0
"""Time from prefill's end to decode's first token, beyond what copies and transfer of the last chunk take."""
ORDERS: Final[tuple[tuple[Window, ...], ...]] = (("alone", "staging", "cached"), ("staging", "cached", "alone"))
"""Orders of the windows, in turn, so that a drift of the machine affects all alike."""
OPTIONS: Final[dict[Device, dict[str, object]]] = {
    "cpu": {},
    "cuda": {"device": "cuda", "gpu_memory_utilization": 0.2},
}


@dataclass(frozen=True)
class Step:
    """One delta of a stream."""

    began_s: float
    """Instant of the delta before it."""
    ended_s: float
    tokens: int


class Bench:
    def __init__(self, pair: VllmPair) -> None:
        self.pair = pair
        self._numbers = 0

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    async def round(self, order: Sequence[Window]) -> dict[Window, float]:
        """Return the mean token interval of the streams in each window, in seconds."""
        numbers = [self.number() for _ in range(PROMPTS)]
        async with self._streams() as steps:
            for number in numbers:
                await self._run(Role.PREFILL, Leg.PREFILL, number, f"staged-{number}")
            windows: dict[Window, tuple[float, float]] = {}
            for window in order:
                began_s = time.monotonic()
                if window == "alone":
                    await asyncio.sleep(ALONE_S)
                else:
                    leg, name = (Leg.DECODE, "staged") if window == "staging" else (Leg.WHOLE, "cached")
                    runs = [self._run(Role.DECODE, leg, number, f"{name}-{number}") for number in numbers]
                    pulled = await asyncio.gather(*runs)
                    if pulled != [PROMPT_TOKENS - 1 if window == "staging" else 0] * PROMPTS:
                        raise RuntimeError(f"{window}: {pulled} tokens were pulled")
                windows[window] = began_s, time.monotonic()
                # The step in which the window ends belongs to it, too, and not to the next one.
                await asyncio.sleep(PAUSE_S)
        return {window: _interval_s(steps, *span) for window, span in windows.items()}

    async def _run(self, role: Role, leg: Leg, number: int, name: str) -> int:
        """Run one leg of one token; return how many tokens of the prompt were pulled."""
        pulled_tokens = 0
        async for delta in self.pair.generate(
            role, leg, name=name, prompt=number, prompt_tokens=PROMPT_TOKENS, output_tokens=1
        ):
            pulled_tokens = delta.transferred_tokens
        return pulled_tokens

    @asynccontextmanager
    async def _streams(self) -> AsyncGenerator[list[Step]]:
        """Yield the steps of streams that run on the decode engine meanwhile."""
        steps: list[Step] = []
        streaming = [asyncio.Event() for _ in range(STREAMS)]
        tasks = [asyncio.create_task(self._stream(steps, each)) for each in streaming]
        try:
            for each in streaming:
                await each.wait()
            yield steps
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, steps: list[Step], streaming: asyncio.Event) -> None:
        number = self.number()
        last_s = 0.0
        async for delta in self.pair.generate(
            Role.DECODE,
            Leg.WHOLE,
            name=f"stream-{number}",
            prompt=number,
            prompt_tokens=64,
            output_tokens=STREAM_TOKENS,
        ):
            now_s = time.monotonic()
            if last_s and delta.tokens:
                steps.append(Step(last_s, now_s, len(delta.tokens)))
                streaming.set()
            last_s = now_s


def _interval_s(steps: list[Step], began_s: float, ended_s: float) -> float:
    """Return the mean token interval of the steps that lie in a window, even with a part."""
    inside = [step for step in steps if step.ended_s > began_s and step.began_s < ended_s]
    return sum(step.ended_s - step.began_s for step in inside) / sum(step.tokens for step in inside)


def goal_ms(chunk_bytes: float, gb_per_s: Sequence[float]) -> float:
    """Return the goal for the time from prefill's end to decode's first token.

    `chunk_bytes`: KV of prefill's last chunk, which takes its ways one after the other, at these speeds.
    """
    return AFTER_PREFILL_GOAL_MS + sum(chunk_bytes / speed / 1e6 for speed in gb_per_s)


def copy_speeds() -> list[float]:
    """Return the speeds of copies from the GPU and to it, in GB/s, which `baton_native.bench_cuda` has measured."""
    measured = RESULTS / "gpu.json"
    if not measured.exists():
        sys.exit(f"{measured} is missing; `python -m baton_native.bench_cuda --out {measured}` measures it")
    figures = json.loads(measured.read_text())["figures"]
    speeds = {figure["what"]: float(figure["gb_per_s"]) for figure in figures}
    return [speeds[f"{way}, 16 KiB pieces"] for way in ("GPU to host", "host to GPU")]


async def measure(model: Path, *, rounds: int, device: Device) -> list[Row]:
    copies_gb_per_s = copy_speeds() if device == "cuda" else []
    async with running_pair(model, kv_path="staged", **OPTIONS[device]) as pair:
        bench = Bench(pair)
        await bench.round(ORDERS[0])
        done = [await bench.round(ORDERS[number % 2]) for number in range(rounds)]
        handed = [await hand_off(pair, bench.number()) for _ in range(HAND_OFFS)]
        (moved,) = pair.engines[Role.DECODE].transfers().pulls.done.values()
    median_ms = {window: statistics.median(each[window] for each in done) * 1e3 for window in done[0]}
    rows = [
        Row.against(
            "token interval beside staged hand-offs",
            "ms",
            median_ms["staging"],
            cached=median_ms["cached"],
            alone=median_ms["alone"],
        ),
        Row.against("the same, beside cached prompts", "ms", median_ms["cached"], alone=median_ms["alone"]),
    ]
    after_ms = statistics.median(each.after_prefill_s for each in handed) * 1e3
    goals: dict[str, float] = {}
    if device == "cuda":
        token_bytes = moved.moved_bytes / moved.pulls / (PROMPT_TOKENS - 1)
        chunk_bytes = token_bytes * (PROMPT_TOKENS % STEP_TOKENS)
        goals = {"goal": goal_ms(chunk_bytes, [*copies_gb_per_s, moved.moved_bytes / moved.moving_s / 1e9])}
    return [*rows, Row.against("prefill's end to decode's first token", "ms", after_ms, **goals)]


def missed(rows: Sequence[Row]) -> list[str]:
    """Print whether each goal is met; return the figures that miss theirs."""
    interval, _, after = rows
    found = ((interval, interval.peers["cached"] * INTERVAL_GOAL), (after, after.peers["goal"]))
    for row, goal in found:
        print(f"{row.name}: goal {goal:.4g} {row.unit}: {'met' if row.ours <= goal else 'missed'}")
    return [row.name for row, goal in found if row.ours > goal]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds (default 15)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the engines run (default cpu)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder))
        rows = asyncio.run(measure(Path(folder), rounds=arguments.rounds, device=arguments.device))
    prompts = f"{PROMPTS} prompts of {PROMPT_TOKENS} tokens at a time, {STREAMS} streams"
    notes = f"{prompts}, medians of {arguments.rounds} rounds; device: {arguments.device}"
    report("staging" if arguments.device == "cpu" else "staging_gpu", rows, notes=notes)
    if arguments.device == "cuda" and (late := missed(rows)):
        sys.exit(f"goals missed: {', '.join(late)}")


if __name__ == "__main__":
    main()
