"""The gateway's processor time per streamed token, with the gateway alone on one core: `make bench-gateway-tokens`.

A scripted scheduler and worker, the clients and NATS have another core. The worker sends one `Frames` message per step
for all streams: each 5 ms, or as fast as the clients get the tokens, with some steps in flight. Beside it a bare ASGI
function streams as many events, and the gateway of another checkout if there is one. Rounds alternate. Figures are
processor time between each stream's first and last token, so requests are not included.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import uvloop
from tokenizers import Tokenizer

from baton import subjects
from baton.bus import Delivery, NatsBus
from baton.cli.servers import free_port, nats_server
from baton.messages.attempts import Accepted, DecodeTask, Finish, FinishReason, Frame, Frames, Usage
from baton.messages.base import WorkerAddress, pack_tokens
from baton.messages.placement import Candidate, Place, Placement
from baton.messages.workers import Heartbeat, Role, StepFit
from benchmarks.gateway import cores, make_model
from benchmarks.gateway_engine import PACE_S
from benchmarks.gateway_load import EVENT, HOST, LAST_CHUNK, Job, request
from benchmarks.processes import family, pin, threads, used_s
from benchmarks.report import Row, report

MODEL: Final = "tiny"
WORKER: Final = WorkerAddress(worker="d0", generation=1)
BEAT_S: Final = 0.25
POLL_S: Final = 0.02
READY_S: Final = 180.0
ROUND_S: Final = 300.0
WORDS: Final = 20
EVENT_END: Final = b"\n\n"
FLOOR: Final = "asgi"
FLOOR_WORD: Final = b" word"
STEPS: Final = StepFit(
    prompt_step_s=0.0, prompt_token_s=0.0, prompt_pair_s=0.0, decode_step_s=0.005, sequence_s=0.0, kv_s=0.0
)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    paced: bool
    tokens_per_frame: int = 1


CASES: Final = (
    Case("paced", paced=True),
    Case("saturated", paced=False),
    Case("saturated, 2 tokens per frame", paced=False, tokens_per_frame=2),
)


class Clients:
    """Streams of one round. Each gets tokens with the same text, which is counted."""

    def __init__(self, word: bytes) -> None:
        self._word = word
        self.begun = 0
        self.words = 0
        self.events = 0
        self.ended = 0
        self._changed = asyncio.Event()

    def note(self, events: bytes, *, begun: bool, ended: bool) -> bool:
        """Count whole events of a stream that had tokens before if `begun`; return whether it has now."""
        words = events.count(self._word)
        self.words += words
        self.events += events.count(EVENT)
        self.begun += words > 0 and not begun
        self.ended += ended
        self._changed.set()
        return begun or words > 0

    async def wait(self, done: Callable[[], bool]) -> None:
        while not done():
            self._changed.clear()
            await self._changed.wait()


class Client(asyncio.Protocol):
    def __init__(self, clients: Clients, request: bytes) -> None:
        self._clients = clients
        self._request = request
        self._begun = False
        self._rest = b""
        """Bytes after the last whole event: a read may end anywhere."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        events, _, self._rest = (self._rest + data).rpartition(EVENT_END)
        self._begun = self._clients.note(events, begun=self._begun, ended=self._rest.endswith(LAST_CHUNK))


class Script:
    """A scheduler and a worker, whose streams all advance with each step."""

    def __init__(self, bus: NatsBus, model_path: Path, token: int) -> None:
        self._bus = bus
        self._model_path = model_path
        self._token = token
        self._gateway = ""
        self._requests: list[str] = []
        self._emitted = 0
        self._started = asyncio.Event()

    async def hear(self, delivery: Delivery) -> None:
        match delivery.message:
            case Place():
                predicted = Candidate(decode=WORKER.worker, predicted_ttft_s=0.0)
                await delivery.respond(Placement(decode=WORKER, reason="scripted", predicted=predicted))
            case DecodeTask(context=context, gateway=gateway):
                await delivery.respond(Accepted(worker=WORKER.worker, generation=WORKER.generation))
                self._gateway = gateway
                self._requests.append(context.request)
                self._started.set()
            case _:
                pass

    async def beat(self) -> None:
        while True:
            beat = Heartbeat(
                address=WORKER,
                role=Role.DECODE,
                model=MODEL,
                model_path=str(self._model_path),
                model_digest="digest",
                engine="scripted",
                block_tokens=32,
                engine_block_tokens=32,
                context_tokens_max=1 << 16,
                running_max=1024,
                kv_blocks_total=1 << 16,
                step_tokens_max=1 << 16,
                kv_bytes_per_token=1,
                steps=STEPS,
            )
            await self._bus.publish(subjects.HEARTBEAT, beat)
            await asyncio.sleep(BEAT_S)

    async def begin(self, streams: int) -> None:
        """Wait for this many tasks."""
        while len(self._requests) < streams:
            self._started.clear()
            await self._started.wait()
        self._emitted = 0

    async def step(self, tokens: int, finish: Finish | None = None) -> None:
        packed = pack_tokens([self._token] * tokens)
        usage = Usage(prompt_tokens=1, completion_tokens=0) if self._emitted == 0 else None
        frames = tuple(
            Frame(request=name, attempt=0, index=self._emitted, tokens=packed, finish=finish, usage=usage)
            for name in self._requests
        )
        self._emitted += tokens
        message = Frames(worker=WORKER.worker, generation=WORKER.generation, frames=frames)
        await self._bus.publish(subjects.gateway(self._gateway), message)
        if finish is not None:
            self._requests.clear()


@dataclass(frozen=True, slots=True)
class Contender:
    port: int
    pid: int


@dataclass(frozen=True, slots=True)
class Sample:
    cpu_us: float
    """Processor time per token."""
    events: float
    """Events per token."""
    tokens_per_s: float
    """By the clock, with the clients on the same core as the worker."""


@dataclass(frozen=True, slots=True)
class Shape:
    streams: int
    tokens: int
    in_flight: int


async def measure(
    contender: Contender, script: Script | None, case: Case, shape: Shape, clients: Clients, seed: int
) -> Sample:
    """Stream one round of answers. `script`: None where the contender makes the tokens itself."""
    streams = shape.streams
    job = Job(port=contender.port, model=MODEL, words=WORDS, tokens=shape.tokens, paced=case.paced, seed=seed)
    loop = asyncio.get_running_loop()
    connections: list[Client] = []
    steps: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(ROUND_S):
            for number in range(streams):
                made = Client(clients, request(job, number))
                await loop.create_connection(lambda made=made: made, HOST, contender.port)
                connections.append(made)
            if script is not None:
                await script.begin(streams)
                steps = asyncio.create_task(_steps(script, case, shape, clients))
            await clients.wait(lambda: clients.begun == streams)
            pids = family([contender.pid])
            before, words, events, began_s = threads(pids), clients.words, clients.events, time.monotonic()
            await clients.wait(lambda: clients.words >= streams * (shape.tokens - case.tokens_per_frame))
            used, wall_s = used_s(before, threads(pids)), time.monotonic() - began_s
            words, events = clients.words - words, clients.events - events
            await clients.wait(lambda: clients.ended == streams)
            if steps is not None:
                await steps
    finally:
        for each in connections:
            each.transport.close()
    assert clients.words == streams * shape.tokens, f"{clients.words} tokens of {streams * shape.tokens}"
    return Sample(used / words * 1e6, events / words, words / wall_s)


async def _steps(script: Script, case: Case, shape: Shape, clients: Clients) -> None:
    each = case.tokens_per_frame
    sent, due_s = 0, asyncio.get_running_loop().time()
    await script.step(1)
    await clients.wait(lambda: clients.words >= shape.streams)
    sent += 1
    while sent + each < shape.tokens:
        if case.paced:
            due_s = max(due_s + PACE_S, asyncio.get_running_loop().time())
            await asyncio.sleep(due_s - asyncio.get_running_loop().time())
        else:
            behind = sent - shape.in_flight * each
            await clients.wait(lambda behind=behind: clients.words >= behind * shape.streams)
        await script.step(each)
        sent += each
    await clients.wait(lambda: clients.words >= sent * shape.streams)
    usage = Usage(prompt_tokens=1, completion_tokens=shape.tokens)
    await script.step(shape.tokens - sent, Finish(reason=FinishReason.LENGTH, usage=usage))


@contextmanager
def program(command: Sequence[str], log: Path, core: Sequence[int]) -> Generator[int]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            pin([process.pid], core)
            yield process.pid
        finally:
            process.kill()
            process.wait()


async def wait_ready(port: int, path: str) -> None:
    """Wait until an HTTP server answers 200."""
    async with asyncio.timeout(READY_S):
        while True:
            try:
                reader, writer = await asyncio.open_connection(HOST, port)
                writer.write(f"GET {path} HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n\r\n".encode())
                status = await reader.readline()
                writer.close()
                if b" 200 " in status:
                    return
            except OSError:
                pass
            await asyncio.sleep(POLL_S)


def token_of(tokenizer: Tokenizer) -> tuple[int, bytes]:
    """Return a token of letters, and its text; an event may have the text of several tokens."""
    for token in range(tokenizer.get_vocab_size() - 1, 0, -1):
        text = tokenizer.decode([token])
        if len(text) > 2 and text.strip().isascii() and text.strip().isalpha():
            return token, text.encode()
    raise AssertionError("the tokenizer has no such token")


async def run(folder: Path, against: str, rounds: int, shape: Shape) -> dict[tuple[str, str], list[Sample]]:
    path, other = cores()
    os.sched_setaffinity(0, other)
    model = make_model(folder)
    token, word = token_of(Tokenizer.from_file(str(model / "tokenizer.json")))
    nats = nats_server(folder, os.environ)
    samples: dict[tuple[str, str], list[Sample]] = {}
    with ExitStack() as stack:
        stack.enter_context(program(nats.program.command, folder / "nats.log", other))
        bus = await NatsBus.connect(nats.url, name="benchmark", timeout_s=READY_S)
        script = Script(bus, model, token)
        for subject in (subjects.PLACE, subjects.task(WORKER.worker)):
            await bus.subscribe(subject, script.hear)
        beating = asyncio.create_task(script.beat())
        contenders: dict[str, Contender] = {}
        for name, python in {"baton": sys.executable, "against": against}.items():
            if python:
                port = free_port()
                # The script knows one attempt of each request, so none may fail while the machine is busy.
                flags = ("--nats-url", nats.url, "--port", str(port), "--accept-s", str(READY_S))
                pid = stack.enter_context(program((python, "-m", "baton_gateway", *flags), folder / name, path))
                await wait_ready(port, "/ready")
                contenders[name] = Contender(port, pid)
        port = free_port()
        command = (sys.executable, "-m", "benchmarks.gateway_floors", FLOOR, str(port))
        contenders[FLOOR] = Contender(port, stack.enter_context(program(command, folder / FLOOR, path)))
        await wait_ready(port, "/")
        # The first round imports, connects and touches memory.
        for number in range(rounds + 1):
            names = list(contenders)
            start = number % len(names)
            for case in CASES:
                for name in names[start:] + names[:start]:
                    actor, shown = (None, FLOOR_WORD) if name == FLOOR else (script, word)
                    sample = await measure(contenders[name], actor, case, shape, Clients(shown), number)
                    if number:
                        samples.setdefault((case.name, name), []).append(sample)
            print(f"round {number} of {rounds}", file=sys.stderr)
        beating.cancel()
        await bus.close()
    return samples


def rows_of(samples: dict[tuple[str, str], list[Sample]]) -> list[Row]:
    names = [name for case, name in samples if case == CASES[0].name]
    rows: list[Row] = []
    for case in CASES:
        medians = {
            name: Sample(
                cpu_us=statistics.median(each.cpu_us for each in samples[case.name, name]),
                events=statistics.median(each.events for each in samples[case.name, name]),
                tokens_per_s=statistics.median(each.tokens_per_s for each in samples[case.name, name]),
            )
            for name in names
        }
        ours, floor = medians.pop("baton"), medians[FLOOR]
        figures: dict[str, tuple[str, Callable[[Sample], float]]] = {
            "processor time per token": ("µs", lambda each: each.cpu_us),
            "tokens per second of one core": ("", lambda each: 1e6 / each.cpu_us),
            "events per token": ("", lambda each: each.events),
            "tokens per second by the clock": ("", lambda each: each.tokens_per_s),
        }
        for figure, (unit, read) in figures.items():
            peers = {name: read(each) for name, each in medians.items()}
            ratio = read(ours) / read(floor)
            rows.append(Row(name=f"{case.name}: {figure}", unit=unit, ours=read(ours), peers=peers, ratio=ratio))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway_tokens", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=513, help="tokens of each answer")
    parser.add_argument("--in-flight", type=int, default=8, help="steps that clients have not got, where saturated")
    parser.add_argument("--against", default="", help="Python of another checkout; writes no results")
    arguments = parser.parse_args()
    shape = Shape(arguments.streams, arguments.tokens, arguments.in_flight)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        samples = uvloop.run(run(Path(folder), arguments.against, arguments.rounds, shape))
    rows = rows_of(samples)
    notes = f"{shape.streams} streams of {shape.tokens} tokens, {shape.in_flight} steps in flight where saturated; "
    notes += f"medians of {arguments.rounds} rounds; ratios are to {FLOOR}; the machine's load was {load:.1f} before"
    if arguments.against:
        for row in rows:
            print(row.name, f"{row.ours:.4g}", row.unit, {name: f"{value:.4g}" for name, value in row.peers.items()})
    else:
        report("gateway_tokens", rows, notes=notes)


if __name__ == "__main__":
    main()
