"""Shows what this host supports: `python -m baton_native.probe`.

Says which ways of moving blocks work between two processes here, and why not, what it costs to ask for many
scattered blocks, and what an idle agent costs. For speed, see `python -m baton_native.bench` and, of GPUs,
`python -m baton_native.bench_cuda`.
"""

from __future__ import annotations

import random
import select
import sys
import time

from baton_native import Agent, DeviceMemory, GpuUnavailable, Report
from baton_native.bench import SourceProcess
from baton_native.bench_cuda import BACKENDS as CUDA_BACKENDS
from baton_native.bench_cuda import Pair
from baton_native.bench_source import Memory, Path, Shape, make_agent

BACKENDS = ("direct", "shm", "cma", "verbs", "ucx", "tcp")
SMALL = Shape("probe", 2, 16, 64 << 10)
MANY = Shape("many", 1, 15_000, 4 << 10)
WAIT_S = 10.0
IDLE_S = 2.0


def pull(agent: Agent, source: SourceProcess, number: int, endpoint: str, shape: Shape) -> tuple[Report, float]:
    """Return how a pull of everything ended, and how long it took to ask for it."""
    key = number.to_bytes(16, "little")
    order = random.Random(number).sample(range(shape.blocks), shape.blocks)
    source.tell("open", path=number, key=key.hex(), ready=True)
    began_s = time.perf_counter()
    agent.pull(key, endpoint, 0, shape.tokens, order, WAIT_S)
    asked_s = time.perf_counter() - began_s
    while True:
        select.select([agent.fileno()], [], [], WAIT_S)
        for report in agent.poll():
            if report.kind in ("pull_done", "pull_failed"):
                return report, asked_s


def try_cuda(backend: str) -> str:
    """Return whether the backend moves the right bytes within this host's first GPU, or why not."""
    try:
        device = DeviceMemory(1).device
    except GpuUnavailable as error:
        return str(error)
    pair = Pair("", backend, True, SMALL.layers, SMALL.blocks)
    try:
        pair.check_bytes()
    except RuntimeError as error:
        return str(error)
    finally:
        pair.close()
    return f"works ({device})"


def main() -> None:
    for backend in CUDA_BACKENDS:
        sys.stdout.write(f"{backend:<9}{try_cuda(backend)}\n")
    source = SourceProcess(None)
    try:
        for shape in (SMALL, MANY):
            paths = [Path(backend, True) for backend in BACKENDS]
            prepared = source.tell(
                "prepare",
                shape=[shape.name, shape.layers, shape.blocks, shape.block_bytes],
                order=list(range(shape.blocks)),
                paths=paths,
            )
            for number, path in enumerate(paths):
                agent, backend = make_agent(path), path.backend
                memory = Memory(shape)
                memory.lend_to(agent)
                report, asked_s = pull(agent, source, number, prepared["endpoints"][number], shape)
                agent.close()
                works = report.kind == "pull_done"
                if shape is SMALL:
                    sys.stdout.write(f"{backend:<9}{'works' if works else report.detail.rpartition(f'{backend}: ')[2]}")
                    sys.stdout.write(f" ({report.declined})\n" if works and report.declined else "\n")
                elif works:
                    sys.stdout.write(
                        f"{backend:<9}{shape.blocks} scattered blocks asked for in {asked_s * 1e3:.1f} ms\n"
                    )
        before_s = time.process_time(), source.cpu_s()
        time.sleep(IDLE_S)
        used_s = time.process_time() - before_s[0] + source.cpu_s() - before_s[1]
        sys.stdout.write(f"{len(BACKENDS)} idle agents use {used_s / IDLE_S:.2%} of a core\n")
    finally:
        source.close()


if __name__ == "__main__":
    main()
