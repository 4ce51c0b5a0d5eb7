"""Thousands of open streams in one gateway process, and a tenth of them never read: `make bench-streams`.

Two deployments as `baton up` starts them, with simulated engines whose steps take a second, so that each stream gets
a token per second. Both are measured at the same time, so that other work on the machine slows both: all streams of
one are read; of the other a tenth is not, so that buffers fill, the kernel's first. Then they change places. The tenth
asks for four choices with log-probabilities in both, for long events. What is compared are the times between two
tokens of the other nine tenths.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import re
import resource
import socket
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import psutil
import uvloop

from baton.processes.probes import http_status
from benchmarks.deployment import Ports, deployment
from benchmarks.gateway_load import EVENT, HOST, percentile
from benchmarks.processes import family, memory_bytes, threads, used_s
from benchmarks.report import Row, report

WORKERS = 4
STEP_S = 1.0
ENGINE_OPTIONS = {
    "running_max": 1024,
    "blocks": 16384,
    "kv_bytes_per_token": 32,
    "context_tokens_max": 4096,
    "speed": 1.0,
    "step_fixed_s": STEP_S,
    "prefill_token_s": 0.0,
    "decode_sequence_s": 0.0,
    "attention_token_s": 0.0,
    "eos_probability": 0.0,
    "step_tokens_max": 16384,
}
UP_FLAGS = ("--engine", "simulated", "--disaggregation", "never", "--prefill", "0", "--decode", str(WORKERS))
OPENING_MAX = 64
"""Streams opened at once, so that no listener's queue overflows."""
OPEN_S = 300.0
RECEIVE_BYTES = 2048
"""Receive buffer of the tenth."""
SEGMENT_BYTES = 536
"""Their longest segment. The kernel sizes the sender's buffer by it, and with loopback's 64 KiB none would be full."""
WARM_STREAMS = 64
CHOICES = 4
TENTH = 10


@dataclass(slots=True)
class Measure:
    """What the read streams have seen since the measure began."""

    running: bool = False
    gaps_s: array[float] = field(default_factory=lambda: array("d"))
    tokens: dict[int, int] = field(default_factory=dict[int, int])


class Stream(asyncio.Protocol):
    """One stream; the gaps of the tenth are left out of the measure in both cases."""

    def __init__(self, number: int, measure: Measure, *, stalled: bool) -> None:
        self._number = number
        self._measure = measure
        self._stalled = stalled
        self._counts = number % TENTH != 0
        self._token_s = 0.0
        self.opened = asyncio.Event()
        self.failure = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = cast("asyncio.Transport", transport)
        if self._stalled:
            connection.pause_reading()
            self.opened.set()
        body: dict[str, object] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"stream {self._number}"}],
            "max_tokens": 3000,
            "stream": True,
            "ignore_eos": True,
        }
        if not self._counts:
            body |= {"n": CHOICES, "logprobs": True, "top_logprobs": 20}
        content = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-length: {len(content)}\r\n\r\n"
        connection.write(head.encode() + content)
        self.transport = connection

    def data_received(self, data: bytes) -> None:
        tokens = data.count(EVENT)
        if not tokens:
            if not self.opened.is_set() and not data.startswith(b"HTTP/1.1 200"):
                self.failure = data[:300].decode(errors="replace")
                self.opened.set()
            return
        self.opened.set()
        now_s = time.perf_counter()
        measure = self._measure
        if measure.running and self._counts:
            if self._token_s:
                measure.gaps_s.append(now_s - self._token_s)
            measure.tokens[self._number] = measure.tokens.get(self._number, 0) + tokens
        self._token_s = now_s

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._stalled and not self.transport.is_closing():
            self.failure = self.failure or "a stream that was read has ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Figures of one measure."""

    gap_p50_s: float
    gap_p99_s: float
    tokens_min: int
    tokens_median: float
    gateway_s_per_token: float
    gateway_bytes: int
    """Memory of the gateway when all streams are open."""
    end_bytes: int
    """The same at the end of the measure."""
    running: int
    """Answers that still run at the end: those that were cut off are missing."""


async def running(ports: Ports) -> int:
    """Return the number of answers in progress, as the gateway counts them."""
    status, text = await http_status(HOST, ports.gateway_status, "/metrics")
    found = re.search(r"^baton_answers_running (\S+)$", text, re.MULTILINE)
    if status != 200 or found is None:
        return -1
    return round(float(found[1]))


async def until(condition: Callable[[int], bool], ports: Ports) -> None:
    async with asyncio.timeout(OPEN_S):
        while not condition(await running(ports)):  # noqa: ASYNC110 - another process.
            await asyncio.sleep(0.5)


async def measured(ports: Ports, streams: int, seconds: float, together: asyncio.Barrier, *, stalled: bool) -> Seen:
    """Open all streams, measure while others do, and close them."""
    gateway = gateway_pids(ports.launcher_pid)
    measure, opening = Measure(), asyncio.Semaphore(OPENING_MAX)
    loop = asyncio.get_running_loop()

    async def opened(number: int) -> Stream:
        silent = stalled and number % TENTH == 0
        async with opening:
            connection = socket.socket()
            connection.setblocking(False)
            if number % TENTH == 0:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
            await loop.sock_connect(connection, (HOST, ports.http))
            _, stream = await loop.create_connection(lambda: Stream(number, measure, stalled=silent), sock=connection)
            await asyncio.wait_for(stream.opened.wait(), OPEN_S)
        return stream

    every = await asyncio.gather(*(opened(number) for number in range(streams)))
    tenth = len(range(0, streams, TENTH))
    await until(lambda answers: answers >= streams + (CHOICES - 1) * tenth, ports)
    gc.collect()
    open_bytes = memory_bytes(gateway)
    await together.wait()
    before = threads(gateway)
    measure.running = True
    await asyncio.sleep(seconds)
    measure.running = False
    used = used_s(before, threads(gateway))
    still, end_bytes = await running(ports), memory_bytes(gateway)
    failures = {stream.failure for stream in every} - {""}
    for stream in every:
        stream.transport.abort()
    if failures:
        raise SystemExit(f"streams failed: {sorted(failures)}")
    await until(lambda answers: answers == 0, ports)
    counts = [measure.tokens.get(number, 0) for number in range(streams) if number % TENTH]
    tokens = sum(counts)
    return Seen(
        gap_p50_s=percentile(measure.gaps_s, 0.5),
        gap_p99_s=percentile(measure.gaps_s, 0.99),
        tokens_min=min(counts),
        tokens_median=statistics.median(counts),
        # The tenth has as many tokens for each choice, read or not.
        gateway_s_per_token=used / (tokens * (1 + CHOICES * tenth / len(counts))),
        gateway_bytes=open_bytes,
        end_bytes=end_bytes,
        running=still,
    )


async def measured_together(both: Sequence[Ports], streams: int, seconds: float) -> list[Seen]:
    """Measure two deployments at the same time; the second one has the unread streams."""
    together = asyncio.Barrier(len(both))
    return await asyncio.gather(
        *(measured(ports, streams, seconds, together, stalled=bool(number)) for number, ports in enumerate(both))
    )


@contextmanager
def deployed(flags: Sequence[str]) -> Generator[Ports]:
    with tempfile.TemporaryDirectory() as folder, deployment(Path(folder), flags) as ports:
        yield ports


def gateway_pids(launcher_pid: int) -> list[int]:
    """Return the processes of the gateway without those that read bodies."""
    return [
        pid
        for pid in family([launcher_pid])
        if "baton_gateway" in (line := psutil.Process(pid).cmdline()) and "baton_gateway.intake_process" not in line
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=2000, help="open streams (default 2000)")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each measure (default 60)")
    parser.add_argument("--rounds", type=int, default=2, help="measures of each kind (default 2)")
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    flags = (*UP_FLAGS, "--engine-options", json.dumps(ENGINE_OPTIONS))
    found: dict[bool, list[Seen]] = {False: [], True: []}
    with ExitStack() as stack:
        both = [stack.enter_context(deployed(flags)) for _ in range(2)]
        uvloop.run(measured_together(both, WARM_STREAMS, 5.0))
        idle_bytes = statistics.median(memory_bytes(gateway_pids(ports.launcher_pid)) for ports in both)
        for _ in range(arguments.rounds):
            seen = uvloop.run(measured_together(both, arguments.streams, arguments.seconds))
            for stalled, figures in zip((False, True), seen, strict=True):
                found[stalled].append(figures)
                print(f"{'a tenth unread' if stalled else 'all read':<15}", figures, flush=True)
            both.reverse()

    def median(figure: Callable[[Seen], float], *, stalled: bool) -> float:
        return statistics.median(map(figure, found[stalled]))

    def compared(name: str, unit: str, figure: Callable[[Seen], float]) -> Row:
        return Row.against(name, unit, median(figure, stalled=True), all_read=median(figure, stalled=False))

    rows = [
        compared("p99 of the time between tokens, a tenth unread", "ms", lambda seen: seen.gap_p99_s * 1e3),
        compared("p99 of it beyond the step, a tenth unread", "ms", lambda seen: (seen.gap_p99_s - STEP_S) * 1e3),
        compared("p50 of the time between tokens, a tenth unread", "ms", lambda seen: seen.gap_p50_s * 1e3),
        compared("gateway CPU per token, a tenth unread", "µs", lambda seen: seen.gateway_s_per_token * 1e6),
        compared("slowest stream's tokens / median, a tenth unread", "", lambda s: s.tokens_min / s.tokens_median),
        compared("answers in progress at the end, a tenth unread", "", lambda seen: seen.running),
        compared("gateway memory at the end, a tenth unread", "MB", lambda seen: seen.end_bytes / 1e6),
        Row(
            name="gateway memory per open stream",
            unit="kB",
            ours=(median(lambda seen: seen.gateway_bytes, stalled=False) - idle_bytes) / arguments.streams / 1e3,
        ),
    ]
    notes = (
        f"{arguments.streams} streams in each of two deployments, a token each {STEP_S:g} s; {arguments.rounds} "
        f"measures of {arguments.seconds:g} s of both at the same time; {WORKERS} workers each"
    )
    report("streams", rows, notes=notes)


if __name__ == "__main__":
    main()
