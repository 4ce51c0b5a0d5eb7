"""How fast the transfer agents move blocks on this machine: `python -m baton_native.bench [--mib 512]`.

Prints GB/s of one pull from a child process, per backend, with and without checksum, beside the
machine's limit: one core's memcpy between two buffers as large as the pools.
"""

from __future__ import annotations

import argparse
import ctypes
import select
import subprocess
import sys
import time

from baton_native import Agent, Options

LAYERS = 8
BLOCK_TOKENS = 32
KEY = bytes(16)
REPEATS = 5


class Memory:
    """A pool of `mib` MiB in blocks of `block_bytes`, over `LAYERS` layers."""

    def __init__(self, mib: int, block_bytes: int) -> None:
        self.blocks = (mib << 20) // (LAYERS * block_bytes)
        self.bytes = self.blocks * LAYERS * block_bytes
        self.buffer = ctypes.create_string_buffer(self.bytes)
        self.address = ctypes.addressof(self.buffer)
        ctypes.memset(self.address, 7, self.bytes)
        self.block_bytes = block_bytes

    def lend_to(self, agent: Agent) -> None:
        layer_bytes = self.blocks * self.block_bytes
        addresses = [self.address + layer * layer_bytes for layer in range(LAYERS)]
        agent.set_pool(addresses, self.blocks, self.block_bytes, self.block_bytes, BLOCK_TOKENS, "bench")


def make_agent(backend: str, checksum: bool) -> Agent:
    options = Options()
    options.backends = [backend]
    options.checksum = checksum
    return Agent(options, "127.0.0.1", 0)


def key_of(repeat: int) -> bytes:
    return repeat.to_bytes(16, "little")


def serve(backend: str, checksum: bool, mib: int, block_bytes: int) -> None:
    """Be the source: lease the whole pool once per repeat, until standard input ends."""
    memory = Memory(mib, block_bytes)
    agent = make_agent(backend, checksum)
    memory.lend_to(agent)
    for repeat in range(REPEATS + 1):
        generation = agent.open_lease(key_of(repeat), 60.0)
        agent.extend_lease(key_of(repeat), generation, list(range(memory.blocks)))
        agent.post_ready(key_of(repeat), generation, -1, memory.blocks * BLOCK_TOKENS)
    sys.stdout.write(agent.endpoint + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    agent.close()


def measure_pull(backend: str, checksum: bool, mib: int, block_bytes: int) -> float:
    """Return the best of some repeats, in bytes per second; the first is not counted."""
    command = [sys.executable, "-m", "baton_native.bench", "--serve", backend, "--mib", str(mib)]
    command += ["--block-kib", str(block_bytes >> 10)] + (["--checksum"] if checksum else [])
    memory = Memory(mib, block_bytes)
    agent = make_agent(backend, checksum)
    memory.lend_to(agent)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as source:
        assert source.stdin is not None and source.stdout is not None
        endpoint = source.stdout.readline().strip()
        best_s = float("inf")
        for repeat in range(REPEATS + 1):
            began_s = time.perf_counter()
            tokens = memory.blocks * BLOCK_TOKENS
            agent.pull(key_of(repeat), endpoint, 0, tokens, list(range(memory.blocks)), 60.0)
            wait_done(agent)
            if repeat > 0:
                best_s = min(best_s, time.perf_counter() - began_s)
        source.stdin.close()
    agent.close()
    return memory.bytes / best_s


def wait_done(agent: Agent) -> None:
    while True:
        select.select([agent.fileno()], [], [], 60.0)
        for report in agent.poll():
            if report.kind == "pull_done":
                return
            if report.kind == "pull_failed":
                raise SystemExit(f"the pull failed: {report.detail}")


def measure_memcpy(mib: int, block_bytes: int) -> float:
    source, target = Memory(mib, block_bytes), Memory(mib, block_bytes)
    best_s = float("inf")
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        ctypes.memmove(target.address, source.address, source.bytes)
        best_s = min(best_s, time.perf_counter() - began_s)
    return source.bytes / best_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m baton_native.bench", description="Transfer speed on this machine")
    parser.add_argument("--mib", type=int, default=256, help="size of the pull in MiB")
    parser.add_argument("--block-kib", type=int, default=64, help="size of one layer's block in KiB")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--checksum", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    block_bytes: int = arguments.block_kib << 10
    if arguments.serve:
        serve(arguments.serve, arguments.checksum, arguments.mib, block_bytes)
        return
    sys.stdout.write(f"{'path':<24}{'GB/s':>8}\n")
    sys.stdout.write(f"{'memcpy, one core':<24}{measure_memcpy(arguments.mib, block_bytes) / 1e9:>8.1f}\n")
    for backend in ("shm", "tcp"):
        for checksum in (False, True):
            rate = measure_pull(backend, checksum, arguments.mib, block_bytes)
            name = f"{backend}, {'checksum' if checksum else 'no checksum'}"
            sys.stdout.write(f"{name:<24}{rate / 1e9:>8.1f}\n")


if __name__ == "__main__":
    main()
