"""The rate at which the queue for workers drains: `make bench-burst`.

A complete deployment as `baton up` starts it, with eight idle workers of simulated engines. Requests are sent in two
ways, turn by turn: all at once, so that schedulers hold most of them, and a few at a time, so that none does. The
benchmark compares the rates of answers. Every answer must be 200.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.deployment import deployment
from benchmarks.report import Row, report

WORKERS = 8
ENGINE_OPTIONS = {"running_max": 64, "speed": 100.0}
UP_FLAGS = ("--engine", "simulated", "--disaggregation", "never", "--prefill", "0", "--decode", str(WORKERS))
CONCURRENCY = 32
"""Concurrency of the requests that find no queue: far fewer than the workers can run."""
OUTPUT_TOKENS = 4


async def ask(port: int, number: int) -> None:
    """Send one request on a connection of its own, and check that it is answered."""
    body = json.dumps({"model": "tiny", "prompt": f"request {number}", "max_tokens": OUTPUT_TOKENS}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise SystemExit(f"a request was not served:\n{answer.decode(errors='replace')}")


async def requests_per_s(port: int, requests: int, at_once: int) -> float:
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            await ask(port, number)

    began_s = time.monotonic()
    await asyncio.gather(*(client() for _ in range(at_once)))
    return requests / (time.monotonic() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind (default 5)")
    parser.add_argument("--requests", type=int, default=2000, help="requests of each round (default 2000)")
    arguments = parser.parse_args()
    rates: dict[int, list[float]] = {arguments.requests: [], CONCURRENCY: []}
    flags = (*UP_FLAGS, "--engine-options", json.dumps(ENGINE_OPTIONS))
    with tempfile.TemporaryDirectory() as folder, deployment(Path(folder), flags) as ports:
        port = ports.http
        asyncio.run(requests_per_s(port, CONCURRENCY * WORKERS, CONCURRENCY))  # Warms everything up.
        for number in range(arguments.rounds):
            for at_once in sorted(rates, reverse=bool(number % 2)):
                rates[at_once].append(asyncio.run(requests_per_s(port, arguments.requests, at_once)))
    burst, steady = (statistics.median(rates[at_once]) for at_once in (arguments.requests, CONCURRENCY))
    row = Row.against(f"{arguments.requests} requests at once", "requests/s", burst, steady=steady)
    report("burst", [row], notes=f"{WORKERS} workers; steady: {CONCURRENCY} at a time; {arguments.rounds} rounds each")


if __name__ == "__main__":
    main()
