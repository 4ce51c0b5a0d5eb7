"""The cost of long prompts from body to plan, beside the bare tokenizer's: `make bench-plans`.

A gateway's pool of intake processes gets the body of a chat, and that of its second turn, as it comes from a client;
the plan that returns has tokens and block ids. Counted is the processor time of both processes: of the gateway's side
of the pipe, and of the intake process, which parses, renders, tokenises, hashes and collects its garbage. The bare
tokenizer encodes the first turn's text in this process, in the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from baton_gateway.intake_pool import ProcessPool
from baton_gateway.workers import Model
from tokenizers import Tokenizer

from baton.cli.tiny_model import make_tiny_model
from baton.clock import SystemClock
from benchmarks.gateway_load import conversation
from benchmarks.processes import family, threads, used_s
from benchmarks.report import Row, report

WORDS: Final = (3000, 8000)
TURNS: Final = (1, 2)
BLOCK_TOKENS: Final = 32
CONTEXT_TOKENS_MAX: Final = 1 << 16
REST_S: Final = 0.02
"""Pause after a plan, within which the intake process collects its garbage."""


@dataclass(frozen=True, slots=True)
class Cost:
    cpu_s: float
    wall_s: float


FIGURES: Final[dict[str, Callable[[Cost], float]]] = {
    "processor time": lambda cost: cost.cpu_s,
    "time": lambda cost: cost.wall_s,
}


class Bench:
    def __init__(self, pool: ProcessPool, model: Model, tokenizer: Tokenizer) -> None:
        self._pool = pool
        self._model = model
        self._tokenizer = tokenizer

    def tokenise(self, number: int, words: int) -> Cost:
        """Return what the tokenizer alone takes for a conversation's first turn."""
        (message,) = conversation(0, number, words, 1)
        began_s, used = time.perf_counter(), time.process_time()
        self._tokenizer.encode_batch_fast([message["content"]])
        return Cost(time.process_time() - used, time.perf_counter() - began_s)

    async def plan(self, number: int, words: int, turn: int) -> Cost:
        """Return what a turn of a conversation takes from its body to its plan."""
        body = msgspec.json.encode({"model": self._model.name, "messages": conversation(0, number, words, turn)})
        children = family([os.getpid()])[1:]
        before, used, began_s = threads(children), time.process_time(), time.perf_counter()
        async with self._pool.lend(body, None) as process:
            await process.parse("chat", body)
            plan = await process.plan(self._model, model_defaults=False)
        wall_s, used_here_s = time.perf_counter() - began_s, time.process_time() - used
        assert len(plan.prompts) == 1, "a conversation is one prompt"
        await asyncio.sleep(REST_S)
        return Cost(used_here_s + used_s(before, threads(children)), wall_s)


async def measure(folder: Path, rounds: int) -> tuple[dict[int, list[Cost]], dict[tuple[int, int], list[Cost]]]:
    """Return the costs of the tokenizer by number of words, and of plans by words and turn, one for each round."""
    make_tiny_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = Model(
        name="tiny",
        path=str(folder),
        digest="digest",
        block_tokens=BLOCK_TOKENS,
        context_tokens_max=CONTEXT_TOKENS_MAX,
    )
    bare = {words: list[Cost]() for words in WORDS}
    planned = {(words, turn): list[Cost]() for words in WORDS for turn in TURNS}
    pool = ProcessPool(clock=SystemClock(), processes_max=1, waiting_bytes_max=64 << 20)
    try:
        await pool.load(model.path, model.digest)
        bench = Bench(pool, model, tokenizer)
        for number in range(-1, rounds):
            for words in WORDS:
                costs = (bench.tokenise(number, words), *[await bench.plan(number, words, turn) for turn in TURNS])
                if number >= 0:  # The first round warms everything up.
                    bare[words].append(costs[0])
                    for turn, cost in zip(TURNS, costs[1:], strict=True):
                        planned[words, turn].append(cost)
    finally:
        await pool.close()
    return bare, planned


def median_ms(costs: Sequence[Cost], figure: Callable[[Cost], float]) -> float:
    return statistics.median(map(figure, costs)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=40, help="conversations of each length (default 40)")
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        bare, planned = asyncio.run(measure(Path(folder), arguments.rounds))
    rows: list[Row] = []
    for words in WORDS:
        for name, figure in FIGURES.items():
            tokenizer = median_ms(bare[words], figure)
            first, second = (median_ms(planned[words, turn], figure) for turn in TURNS)
            rows += [
                Row.against(f"{words:,} words, first turn: {name}", "ms", first, tokenizer=tokenizer),
                Row.against(f"{words:,} words, second turn: {name}", "ms", second, first_turn=first),
            ]
    notes = f"medians of {arguments.rounds} interleaved conversations; the machine's load was {load_before:.1f} before"
    report("plans", rows, notes=notes)


if __name__ == "__main__":
    main()
