"""Does a slow KV transfer disturb other requests? `make bench-interference`.

Real vLLM on CPU, one prefill and one decode engine. Bystanders generate on both engines, whole, while
hand-offs run beside them: in half of the rounds every pull is held back by 200 ms at its source, in the
other half it is not. Rounds are interleaved, so that a drift of the machine hits both alike. What is
compared is the bystanders' p99 token interval.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from baton.cli.tiny_model import make_tiny_model
from baton.engines.engine import EngineFacts, EngineRequest, Leg
from baton.engines.vllm import VllmEngine
from baton.messages import KvSource, Role, Sampling, WorkerAddress
from baton.transfer import AgentOptions, Faults
from benchmarks.report import Row, report

OPTIONS: dict[str, object] = {
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 400,
}
BYSTANDERS = 2
"""On each engine."""
PROMPT_TOKENS = 300
HANDOFF_OUTPUT_TOKENS = 8
BUDGET_S = 120.0


@dataclass
class Round:
    intervals_s: dict[Role, list[float]] = field(default_factory=lambda: {role: [] for role in Role})
    handoffs_s: list[float] = field(default_factory=list[float])


class Bench:
    def __init__(self, prefill: VllmEngine, decode: VllmEngine, source: EngineFacts) -> None:
        self.engines = {Role.PREFILL: prefill, Role.DECODE: decode}
        self.source = KvSource(address=WorkerAddress(worker="prefill", generation=1, agents=source.agents))
        self.count = 0

    def _request(self, leg: Leg, *, output_tokens: int, name: str, prompt: int) -> EngineRequest:
        # Every prompt differs from its first token on, so that nothing is cached and everything has to move.
        tokens = [(prompt * 7919 + index * 104729) % 8000 + 50 for index in range(PROMPT_TOKENS)]
        return EngineRequest(
            request=name,
            attempt=0,
            leg=leg,
            tokens=tokens,
            sampling=Sampling(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
            source=self.source if leg is Leg.DECODE else None,
            budget_s=BUDGET_S,
        )

    async def _bystand(self, role: Role, intervals_s: list[float], until_s: float) -> None:
        self.count += 1
        request = self._request(Leg.WHOLE, output_tokens=3500, name=f"bystander-{self.count}", prompt=self.count)
        last_s = 0.0
        stream = self.engines[role].generate(request)
        try:
            async for _ in stream:
                now_s = time.monotonic()
                if last_s:
                    intervals_s.append(now_s - last_s)
                last_s = now_s
                if now_s > until_s:
                    return
        finally:
            await stream.aclose()

    async def _hand_off(self, durations_s: list[float]) -> None:
        self.count += 1
        name, began_s = f"handoff-{self.count}", time.monotonic()

        async def run(role: Role, leg: Leg) -> None:
            request = self._request(leg, output_tokens=HANDOFF_OUTPUT_TOKENS, name=name, prompt=self.count)
            async for _ in self.engines[role].generate(request):
                pass

        await asyncio.gather(run(Role.PREFILL, Leg.PREFILL), run(Role.DECODE, Leg.DECODE))
        durations_s.append(time.monotonic() - began_s)

    async def round(self, *, delay_s: float, duration_s: float) -> Round:
        """Run bystanders for a while and hand off one request after another beside them."""
        await self.engines[Role.PREFILL].set_faults(Faults(delay_s=delay_s))
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
    agent = AgentOptions(secret="bench")
    engines: list[VllmEngine] = []
    try:
        facts: list[EngineFacts] = []
        for role in Role:
            engine = VllmEngine(str(model), role=role, options=OPTIONS, agent=agent)
            engines.append(engine)
            facts.append(await engine.start())
        bench = Bench(engines[0], engines[1], facts[0])
        await bench.round(delay_s=0.0, duration_s=3.0)
        plain: list[Round] = []
        delayed: list[Round] = []
        for number in range(rounds):
            # Which of the two comes first alternates as well.
            for slow in (False, True) if number % 2 == 0 else (True, False):
                done = await bench.round(delay_s=delay_s if slow else 0.0, duration_s=duration_s)
                (delayed if slow else plain).append(done)
    finally:
        for engine in engines:
            await engine.close()
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
