"""The effect of slow KV transfers on other requests: `make bench-interference`.

Real vLLM on CPU, one prefill and one decode engine. Other requests run on both engines, each prefilled and
decoded in one place, while hand-offs run beside them. In half of the rounds the source delays every pull by
200 ms. Rounds are interleaved, so that a drift of the machine affects both alike. The figure compared is the
p99 token interval of the other requests.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from baton.cli.tiny_model import make_tiny_model
from baton.engines.engine import Leg
from baton.messages.workers import Role
from baton.transfer import TransferFaults
from benchmarks.report import Row, report
from benchmarks.vllm_pair import VllmPair, running_pair

BYSTANDERS = 2
"""Number on each engine."""
PROMPT_TOKENS = 300
HANDOFF_OUTPUT_TOKENS = 8


@dataclass
class Round:
    intervals_s: dict[Role, list[float]] = field(default_factory=lambda: {role: [] for role in Role})
    handoffs_s: list[float] = field(default_factory=list[float])


class Bench:
    def __init__(self, pair: VllmPair) -> None:
        self.pair = pair
        self.count = 0

    async def _bystand(self, role: Role, intervals_s: list[float], until_s: float) -> None:
        self.count += 1
        last_s = 0.0
        stream = self.pair.generate(
            role,
            Leg.WHOLE,
            name=f"bystander-{self.count}",
            prompt=self.count,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=3500,
        )
        async with aclosing(stream) as deltas:
            async for _ in deltas:
                now_s = time.monotonic()
                if last_s:
                    intervals_s.append(now_s - last_s)
                last_s = now_s
                if now_s > until_s:
                    return

    async def _hand_off(self, durations_s: list[float]) -> None:
        self.count += 1
        number, began_s = self.count, time.monotonic()

        async def run(role: Role, leg: Leg) -> None:
            async for _ in self.pair.generate(
                role,
                leg,
                name=f"handoff-{number}",
                prompt=number,
                prompt_tokens=PROMPT_TOKENS,
                output_tokens=HANDOFF_OUTPUT_TOKENS,
            ):
                pass

        await asyncio.gather(run(Role.PREFILL, Leg.PREFILL), run(Role.DECODE, Leg.DECODE))
        durations_s.append(time.monotonic() - began_s)

    async def round(self, *, delay_s: float, duration_s: float) -> Round:
        """Run the other requests for `duration_s` and hand off one request after another beside them."""
        await self.pair.engines[Role.PREFILL].set_faults(TransferFaults(delay_s=delay_s))
        result = Round()
        until_s = time.monotonic() + duration_s

        async def hand_off_at_a_fixed_rate() -> None:
            # One per 0.6 s in every round: a delayed hand-off must not thin out the load that it causes.
            async with asyncio.TaskGroup() as group:
                while time.monotonic() < until_s:
                    group.create_task(self._hand_off(result.handoffs_s))
                    await asyncio.sleep(0.6)

        async with asyncio.TaskGroup() as group:
            for role, intervals_s in result.intervals_s.items():
                for _ in range(BYSTANDERS):
                    group.create_task(self._bystand(role, intervals_s, until_s))
            group.create_task(hand_off_at_a_fixed_rate())
        return result


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


async def measure(model: Path, *, rounds: int, duration_s: float, delay_s: float) -> list[Row]:
    plain: list[Round] = []
    delayed: list[Round] = []
    async with running_pair(model) as pair:
        bench = Bench(pair)
        await bench.round(delay_s=0.0, duration_s=3.0)
        for number in range(rounds):
            # The order of the two alternates as well.
            for slow in (False, True) if number % 2 == 0 else (True, False):
                done = await bench.round(delay_s=delay_s if slow else 0.0, duration_s=duration_s)
                (delayed if slow else plain).append(done)
    rows: list[Row] = []
    for role in Role:
        for name, figure in (("p50", statistics.median), ("p99", p99)):
            ours, undelayed = (
                statistics.median(figure(done.intervals_s[role]) for done in series) * 1e3
                for series in (delayed, plain)
            )
            rows.append(Row.against(f"bystanders on {role}, {name} token interval", "ms", ours, undelayed=undelayed))
    whole, undelayed = (
        statistics.median(value for done in series for value in done.handoffs_s) * 1e3 for series in (delayed, plain)
    )
    rows.append(Row.against("hand-offs themselves, median duration", "ms", whole, undelayed=undelayed))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each kind (default 7)")
    parser.add_argument("--duration-s", type=float, default=8.0, help="length of a round in seconds (default 8)")
    parser.add_argument("--delay-s", type=float, default=0.2, help="injected delay of each pull (default 0.2)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder))
        rows = asyncio.run(
            measure(Path(folder), rounds=arguments.rounds, duration_s=arguments.duration_s, delay_s=arguments.delay_s)
        )
    report(
        "interference",
        rows,
        notes=f"ours: every pull held back by {arguments.delay_s * 1e3:g} ms; "
        f"medians of {arguments.rounds} interleaved rounds of {arguments.duration_s:g} s",
    )


if __name__ == "__main__":
    main()
