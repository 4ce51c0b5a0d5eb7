"""What a wait does to the cost of the work after it: `make bench-after-waits`.

One process on one core reads and plans a chat of 100 words, as a gateway does first with a request: right after another
one, or after something in between. Counted is the processor time of the plan alone. Other memory read in between shows
what cold caches cost; a wait, what the wake-up, the clock rate and other processes on the core cost beyond that. The
figures are first deciles: the rounds with the least other work in them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from baton_gateway.intake import Intake
from baton_gateway.tokenise import ModelTokenizer
from baton_gateway.workers import Model

from baton.cli.tiny_model import make_tiny_model
from benchmarks.gateway_load import conversation
from benchmarks.report import Row, report

WORDS: Final = 100
WAIT_S: Final = 0.005
"""Time between two parts of a gateway's work for one client."""
BLOCK_TOKENS: Final = 32
CONTEXT_TOKENS_MAX: Final = 8192
WARM_UP: Final = 200
FIRST: Final = "right after another"


def spin() -> None:
    until_s = time.perf_counter() + WAIT_S
    while time.perf_counter() < until_s:
        pass


def things_between() -> dict[str, Callable[[], object]]:
    """Return what comes before a plan, by name."""
    memory = np.ones(1 << 20)
    return {
        FIRST: lambda: None,
        "after 5 ms of a busy processor": spin,
        "after 8 MiB of other memory": memory.sum,
        "after a wait of 5 ms": lambda: time.sleep(WAIT_S),
        "after 8 MiB of other memory and a wait of 5 ms": lambda: (memory.sum(), time.sleep(WAIT_S)),
    }


def measure(folder: Path, rounds: int) -> dict[str, float]:
    """Return the first decile of the processor time of a plan after each thing, in seconds."""
    make_tiny_model(folder)
    tokenizer = ModelTokenizer(str(folder))
    model = Model(
        name="tiny",
        path=str(folder),
        digest="0" * 64,
        block_tokens=BLOCK_TOKENS,
        context_tokens_max=CONTEXT_TOKENS_MAX,
    )
    number = 0

    def body() -> bytes:
        nonlocal number
        number += 1
        return msgspec.json.encode({"model": model.name, "messages": conversation(0, number, WORDS, 1)})

    def plan(payload: bytes) -> float:
        began_s, intake = time.thread_time(), Intake()
        intake.parse("chat", payload)
        intake.plan(tokenizer, model, model_defaults=False)
        return time.thread_time() - began_s

    for _ in range(WARM_UP):
        plan(body())
    between = things_between()
    spent_s: dict[str, list[float]] = {name: [] for name in between}
    for _ in range(rounds):
        for name, thing in between.items():
            payload = body()
            plan(body())
            thing()
            spent_s[name].append(plan(payload))
    return {name: statistics.quantiles(each, n=10)[0] for name, each in spent_s.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=300, help="plans after each thing (default 300)")
    arguments = parser.parse_args()
    load_before = os.getloadavg()[0]
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    with tempfile.TemporaryDirectory() as folder:
        deciles = measure(Path(folder), arguments.rounds)
    rows = [Row.against(name, "µs", s * 1e6, first=deciles[FIRST] * 1e6) for name, s in deciles.items()]
    notes = f"first deciles of {arguments.rounds} interleaved plans; the machine's load was {load_before:.1f} before"
    report("after_waits", rows, notes=notes)


if __name__ == "__main__":
    main()
