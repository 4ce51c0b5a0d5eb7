"""The worker's processor time per streamed token: `make bench-worker`.

A decode worker, a process of its own on a real NATS, streams 64 answers at the same time to a gateway that only
collects. Its simulated engine has next to no KV. Beside it the same engine alone, whose output is read and dropped: the
difference is what the worker costs. Prompts are included. Rounds alternate; figures are processor time, because the
machine's other work would show in any other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import uvloop

from baton import subjects
from baton.bus import Delivery, NatsBus
from baton.cli.servers import nats_server
from baton.engines.engine import EngineRequest, Leg
from baton.engines.simulated.engine import SimulatedEngine
from baton.messages.attempts import Accepted, Acknowledge, DecodeTask, Frames, Sampling
from baton.messages.base import Context, WorkerAddress, pack_tokens
from baton.messages.workers import GatewayBeat, Heartbeat
from baton.transfer import AgentOptions
from benchmarks.report import Row, report

OPTIONS: Final[dict[str, object]] = {
    "blocks": 16_384,
    "running_max": 256,
    "step_tokens_max": 65_536,
    "context_tokens_max": 8192,
    "eos_probability": 0.0,
    "layers": 1,
    "kv_bytes_per_token": 8,
    "prefill_token_s": 0.0,
    "decode_sequence_s": 0.0,
    "attention_token_s": 0.0,
    "speed": 1.0,
}
STEPS_S: Final = {"steps of no time": 0.0, "a step every 10 ms": 0.01}
"""With pauses between steps, every step has a message of its own, and caches are cold."""
PROMPT_TOKENS: Final = 64
GATEWAY: Final = "benchmark"
START_TIMEOUT_S: Final = 60.0
ROUND_TIMEOUT_S: Final = 300.0


def prompt(round_number: int, stream: int) -> list[int]:
    return [300 + (round_number * 7919 + stream * 104_729 + place * 31) % 7000 for place in range(PROMPT_TOKENS)]


def sampling(tokens: int) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)


# ---------------------------------------------------------------- the engine alone


async def engine_round(engine: SimulatedEngine, number: int, streams: int, tokens: int) -> float:
    """Return the processor time of one round, in seconds."""

    async def read(stream: int) -> None:
        request = EngineRequest(
            request=f"{number}-{stream}",
            attempt=0,
            leg=Leg.WHOLE,
            tokens=prompt(number, stream),
            sampling=sampling(tokens),
            budget_s=ROUND_TIMEOUT_S,
        )
        seen = 0
        async for delta in engine.generate(request):
            seen += len(delta.tokens)
        assert seen == tokens, f"{seen} tokens of {tokens}"

    began_s = time.process_time()
    async with asyncio.timeout(ROUND_TIMEOUT_S):
        await asyncio.gather(*(read(stream) for stream in range(streams)))
    return time.process_time() - began_s


# ---------------------------------------------------------------- the worker


class Gateway:
    """Sends tasks to one worker and counts what comes back."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self._address: WorkerAddress | None = None
        self._running: set[str] = set()
        self.tokens = 0
        self.frames = 0
        self._changed = asyncio.Event()

    async def hear(self, delivery: Delivery) -> None:
        match delivery.message:
            case Heartbeat(address=address):
                self._address = address
            case Frames(frames=frames):
                self.frames += sum(1 for frame in frames if frame.tokens)
                for frame in frames:
                    self.tokens += len(frame.tokens) // 4
                    if frame.finish is not None:
                        assert frame.finish.error is None, frame.finish.error
                        self._running.discard(frame.request)
            case _:
                return
        self._changed.set()

    async def beat(self) -> None:
        while True:
            await self._bus.publish(subjects.GATEWAY_BEAT, GatewayBeat(gateway=GATEWAY))
            await asyncio.sleep(0.3)

    async def round(self, number: int, streams: int, tokens: int) -> None:
        """Stream one round of answers to their ends."""
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            while self._address is None:
                await self._wait()
            address, before = self._address, self.tokens
            contexts = [
                Context(request=f"{number}-{stream}", attempt=0, budget_s=ROUND_TIMEOUT_S) for stream in range(streams)
            ]
            self._running = {context.request for context in contexts}
            subject = subjects.task(address.worker)

            async def ask(stream: int, context: Context) -> None:
                task = DecodeTask(
                    context=context,
                    gateway=GATEWAY,
                    generation=address.generation,
                    tokens=pack_tokens(prompt(number, stream)),
                    prompt_tokens=PROMPT_TOKENS,
                    sampling=sampling(tokens),
                )
                answer = await self._bus.request(subject, task, timeout_s=START_TIMEOUT_S)
                assert isinstance(answer, Accepted), answer

            await asyncio.gather(*(ask(stream, context) for stream, context in enumerate(contexts)))
            while self._running:
                await self._wait()
            assert self.tokens - before == streams * tokens, f"{self.tokens - before} tokens of {streams * tokens}"
            for context in contexts:
                await self._bus.publish(subject, Acknowledge(context=context))

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


@asynccontextmanager
async def running_worker(folder: Path, options: Mapping[str, object]) -> AsyncGenerator[tuple[Gateway, psutil.Process]]:
    """Run NATS and a decode worker, with a gateway that beats, until the block ends."""
    server = nats_server(folder, os.environ)
    command = [
        *(sys.executable, "-m", "baton_decode", "--worker", "d0", "--model", "simulated", "--engine", "simulated"),
        *("--engine-options", json.dumps(options)),
    ]
    environ = {**os.environ, "BATON_DECODE_NATS_URL": server.url}
    processes: list[asyncio.subprocess.Process] = []
    with (folder / "worker.log").open("wb") as log:
        try:
            processes.append(await asyncio.create_subprocess_exec(*server.program.command, stdout=log, stderr=log))
            bus = await NatsBus.connect(server.url, name="benchmark", timeout_s=START_TIMEOUT_S)
            processes.append(await asyncio.create_subprocess_exec(*command, env=environ, stdout=log, stderr=log))
            gateway = Gateway(bus)
            await bus.subscribe(subjects.HEARTBEAT, gateway.hear)
            await bus.subscribe(subjects.gateway(GATEWAY), gateway.hear)
            beating = asyncio.create_task(gateway.beat())
            yield gateway, psutil.Process(processes[1].pid)
            beating.cancel()
            await bus.close()
        finally:
            for process in reversed(processes):
                process.kill()
                await process.wait()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@dataclass(frozen=True)
class Samples:
    """The µs per token of each round, of the worker with its engine and of the engine alone."""

    together: list[float]
    alone: list[float]
    tokens_per_frame: float

    @property
    def worker(self) -> float:
        return statistics.median(both - engine for both, engine in zip(self.together, self.alone, strict=True))


async def measure(folder: Path, step_s: float, rounds: int, streams: int, tokens: int) -> Samples:
    options = {**OPTIONS, "step_fixed_s": step_s}
    engine = SimulatedEngine("simulated", options=options, agent=AgentOptions())
    await engine.start()
    together, alone = list[float](), list[float]()
    try:
        async with running_worker(folder, options) as (gateway, process):
            # The first round imports, connects and touches memory.
            for number in range(rounds + 1):
                began_s = 0.0 if number == 0 else cpu_s(process)
                await gateway.round(number, streams, tokens)
                together.append((cpu_s(process) - began_s) / (streams * tokens) * 1e6)
                alone.append(await engine_round(engine, number, streams, tokens) / (streams * tokens) * 1e6)
    finally:
        await engine.close()
    return Samples(together[1:], alone[1:], gateway.tokens / gateway.frames)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500, help="tokens of each answer")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name, step_s in STEPS_S.items():
        with tempfile.TemporaryDirectory() as folder:
            rounds = arguments.rounds, arguments.streams, arguments.tokens
            samples = uvloop.run(measure(Path(folder), step_s, *rounds))
        together, alone = statistics.median(samples.together), statistics.median(samples.alone)
        rows += [
            Row(name=f"{name}: worker beside its engine", unit="µs per token", ours=samples.worker),
            Row(name=f"{name}: both", unit="µs per token", ours=together, peers={"engine alone": alone}),
            Row(name=f"{name}: output of one frame", unit="tokens", ours=samples.tokens_per_frame),
        ]
    notes = f"{arguments.streams} streams of {arguments.tokens} tokens, medians of {arguments.rounds} rounds. "
    report("worker", rows, notes=notes + f"Load of the machine at the end: {os.getloadavg()[0]:.1f}.")


if __name__ == "__main__":
    main()
