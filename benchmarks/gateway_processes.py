"""Requests per second of one and of two gateway processes on a port: `make bench-gateway-processes`.

Two deployments as `baton up` starts them, which differ in the number of gateway processes, get the same load in turn:
requests of 100 words and one token. Engines take no time. Where processors are short, all other processes of the path
compete with the gateways; the processor time that the gateways get says how much of the rest they had.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.deployment import Ports, deployment
from benchmarks.gateway_load import Job, carry_out
from benchmarks.processes import threads, used_s
from benchmarks.report import Row, report
from benchmarks.streams import gateway_pids

ENGINE_OPTIONS = {"running_max": 256, "speed": 1e6}
UP_FLAGS = ("--engine", "simulated", "--disaggregation", "never", "--prefill", "0", "--decode", "2")
CLIENTS = 32


def measured(ports: Ports, seconds: float, seed: int) -> tuple[float, float, float]:
    """Return requests per second, the gateways' processor time per request, and cores that they used."""
    gateways = gateway_pids(ports.launcher_pid)
    before, began_s = threads(gateways), time.perf_counter()
    outcome = asyncio.run(
        carry_out(Job(port=ports.http, model="tiny", concurrency=CLIENTS, seconds=seconds, words=100, seed=seed))
    )
    used, wall_s = used_s(before, threads(gateways)), time.perf_counter() - began_s
    if outcome.failure:
        raise SystemExit(f"a request failed: {outcome.failure}")
    return outcome.answers / outcome.wall_s, used / outcome.answers, used / wall_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="measures of each kind (default 5)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each measure (default 10)")
    arguments = parser.parse_args()
    found: dict[int, list[tuple[float, float, float]]] = {1: [], 2: []}
    with ExitStack() as stack:
        deployments = {
            processes: stack.enter_context(
                deployment(
                    Path(stack.enter_context(tempfile.TemporaryDirectory())),
                    (*UP_FLAGS, "--engine-options", json.dumps(ENGINE_OPTIONS), "--gateway-processes", str(processes)),
                )
            )
            for processes in found
        }
        for ports in deployments.values():
            measured(ports, 2.0, seed=0)  # Warms everything up.
        for number in range(arguments.rounds):
            for processes in sorted(found, reverse=bool(number % 2)):
                found[processes].append(measured(deployments[processes], arguments.seconds, seed=number + 1))
    one, two = ([statistics.median(column) for column in zip(*found[processes], strict=True)] for processes in (1, 2))
    rows = [
        Row.against("requests of two processes", "requests/s", two[0], one_process=one[0]),
        Row.against("gateway CPU per request, two processes", "ms", two[1] * 1e3, one_process=one[1] * 1e3),
        Row.against("cores used by the gateways, two processes", "", two[2], one_process=one[2]),
    ]
    notes = f"{CLIENTS} clients; medians of {arguments.rounds} measures of {arguments.seconds:g} s in turn"
    report("gateway_processes", rows, notes=notes)


if __name__ == "__main__":
    main()
