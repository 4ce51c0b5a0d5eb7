"""The cost of a hand-off for each combination of engines: `make bench-engines`.

vLLM and SGLang on CPU with the tiny model in float32, one request at a time: prompts of 1,500 tokens in chunks of
at most 512, answers of 32. Each combination of engines is compared with its decode engine alone, in interleaved runs.
"Moving" is the time of the pull's transfer, including checksums and, between different layouts, the conversion that
both sides do chunk by chunk; most of it overlaps with prefill's computation. "Converting" is the conversion alone:
the processor time of one core to gather the prompt's KV out of the source's blocks and to scatter it into the sink's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from baton.cli.tiny_model import HEAD_DIM, KV_HEADS, LAYERS, make_tiny_model
from baton.engines.engine import EngineFacts, EngineRequest, Leg
from baton.messages.attempts import Sampling
from baton.messages.base import WorkerAddress
from baton.messages.workers import Role
from baton.transfer.layout import Layout
from benchmarks.layout import LAYOUTS, Case
from benchmarks.remote_engine.engine import RemoteEngine
from benchmarks.remote_engine.settings import EngineName, engine_environ, engine_options, engine_python
from benchmarks.report import Row, report

PROMPT_TOKENS: Final = 1500
OUTPUT_TOKENS: Final = 32
GREEDY: Final = Sampling(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
ENGINES: Final[dict[str, EngineName]] = {"vllm": "vllm", "vllm 2": "vllm", "sglang": "sglang", "sglang 2": "sglang"}
BLOCKS: Final[dict[EngineName, str]] = {"vllm": "vec, blocks of 32", "sglang": "NHD, pages of 32"}
PAIRS: Final = (("vllm 2", "vllm"), ("sglang", "vllm"), ("sglang 2", "sglang"), ("vllm", "sglang"))


@dataclass(frozen=True)
class Run:
    ttft_s: float
    interval_s: float
    moving_s: float


@asynccontextmanager
async def running(name: str, model: Path, folder: Path) -> AsyncGenerator[tuple[RemoteEngine, EngineFacts]]:
    engine = ENGINES[name]
    python = engine_python(engine)
    if python is None:
        raise SystemExit(f"there is no environment with {engine}: make environment-{engine}")
    settings = {"engine": engine, "model": str(model), "role": Role.DECODE, "options": engine_options(engine)}
    remote = RemoteEngine(python, settings, engine_environ(engine), folder / f"{name}.log")
    try:
        yield remote, await remote.start()
    finally:
        await remote.close()


def request(name: str, leg: Leg, tokens: list[int], source: EngineFacts | None = None) -> EngineRequest:
    address = WorkerAddress(worker="source", generation=1, agents=source.agents) if source else None
    return EngineRequest(
        request=name,
        attempt=0,
        leg=leg,
        tokens=tokens,
        sampling=GREEDY,
        cache_salt=name,
        source=address if address else None,
        budget_s=60.0,
    )


async def answer(engine: RemoteEngine, asked: EngineRequest) -> Run:
    began_s, moving_s = time.monotonic(), 0.0
    arrivals_s: list[float] = []
    async with aclosing(engine.generate(asked)) as deltas:
        async for delta in deltas:
            arrivals_s.append(time.monotonic())
            moving_s = delta.transfer_s
    interval_s = (arrivals_s[-1] - arrivals_s[0]) / (OUTPUT_TOKENS - 1)
    return Run(arrivals_s[0] - began_s, interval_s, moving_s)


async def measure(model: Path, folder: Path, runs: int) -> list[Row]:
    rows: list[Row] = []
    chance = random.Random(0)

    def prompt() -> list[int]:
        return [chance.randrange(300, 8192) for _ in range(PROMPT_TOKENS)]

    for source_name, sink_name in PAIRS:
        async with (
            running(source_name, model, folder) as (source, facts),
            running(sink_name, model, folder) as (sink, _),
        ):
            handed: list[Run] = []
            alone: list[Run] = []
            for number in range(runs + 1):
                tokens, name = prompt(), f"{source_name}-{sink_name}-{number}"
                prefill = asyncio.create_task(answer(source, request(name, Leg.PREFILL, tokens)))
                handed.append(await answer(sink, request(name, Leg.DECODE, tokens, facts)))
                await prefill
                alone.append(await answer(sink, request(f"{name}-alone", Leg.WHOLE, tokens)))
            # The first run of each also pays for setup and connections.
            engines = ENGINES[source_name], ENGINES[sink_name]
            rows += _rows(" → ".join(engines), handed[1:], alone[1:])
            if engines[0] != engines[1]:
                took_ms = converting_ms(*engines, runs)
                rows.append(Row(name=f"{' → '.join(engines)}: converting", unit="ms", ours=took_ms))
    return rows


def converting_ms(source: EngineName, sink: EngineName, runs: int) -> float:
    """Return the time of both sides' conversions of one prompt's KV, in milliseconds of one core."""

    def took_s(engine: EngineName, *, to_wire: bool) -> float:
        order, form, packing, block_tokens = LAYOUTS[BLOCKS[engine]]
        layout = Layout(
            layers=LAYERS,
            kv_heads=KV_HEADS,
            dim=HEAD_DIM,
            dtype="float32",
            order=order,
            form=form,
            packing=packing,
            block_tokens=block_tokens,
        )
        case = Case(layout, -(-PROMPT_TOKENS // block_tokens) * block_tokens)
        return statistics.median(case.took_s(case.ours, to_wire=to_wire) for _ in range(runs))

    return (took_s(source, to_wire=True) + took_s(sink, to_wire=False)) * 1e3


def _rows(pair: str, handed: list[Run], alone: list[Run]) -> list[Row]:
    def median_ms(runs: list[Run], figure: str) -> float:
        return statistics.median(getattr(run, figure) for run in runs) * 1e3

    return [
        Row.against(f"{pair}: {what}", "ms", median_ms(handed, figure), aggregated=median_ms(alone, figure))
        for what, figure in (("time to first token", "ttft_s"), ("token interval", "interval_s"))
    ] + [Row(name=f"{pair}: moving", unit="ms", ours=median_ms(handed, "moving_s"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=9, help="counted runs of each kind (default 9)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder) / "tiny")
        rows = asyncio.run(measure(Path(folder) / "tiny", Path(folder), arguments.runs))
    report("engines", rows, notes=f"prompts of {PROMPT_TOKENS} tokens, medians of {arguments.runs} interleaved runs")


if __name__ == "__main__":
    main()
