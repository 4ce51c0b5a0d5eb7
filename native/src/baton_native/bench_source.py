"""The source's process of `baton_native.bench`: executes commands in lines of JSON, and answers each with one."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from baton_native import Agent, Options, Region

BLOCK_TOKENS = 16
STREAM_PIECE_BYTES = 1 << 20
STAMP_BYTES = 8
UCX_LIBRARY = "BATON_UCX_LIBRARY"
"""The environment variable that names `libucp` where the loader does not find it."""


@dataclass(frozen=True)
class Shape:
    """A paged KV cache, all of which one pull moves."""

    name: str
    layers: int
    blocks: int
    block_bytes: int

    @property
    def tokens(self) -> int:
        return self.blocks * BLOCK_TOKENS

    @property
    def bytes(self) -> int:
        return self.layers * self.blocks * self.block_bytes


class Memory:
    """Memory for one shape; `stamp` marks both ends of each block with where it belongs."""

    def __init__(self, shape: Shape, *, shared: bool = False) -> None:
        self.shape = shape
        self.region = Region(shape.bytes) if shared else None
        if self.region is None:
            self.view = memoryview(mmap.mmap(-1, shape.bytes))
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        else:
            self.address = self.region.address
            self.view = memoryview((ctypes.c_char * shape.bytes).from_address(self.address)).cast("B")
        ctypes.memset(self.address, 7, shape.bytes)

    def _stamps(self, order: Sequence[int]) -> list[tuple[int, bytes]]:
        shape = self.shape
        stamps: list[tuple[int, bytes]] = []
        for layer in range(shape.layers):
            for position, block in enumerate(order):
                at = (layer * shape.blocks + block) * shape.block_bytes
                stamp = (layer << 32 | position).to_bytes(STAMP_BYTES, "little")
                stamps += [(at, stamp), (at + shape.block_bytes - STAMP_BYTES, stamp)]
        return stamps

    def stamp(self, order: Sequence[int]) -> None:
        for at, stamp in self._stamps(order):
            self.view[at : at + STAMP_BYTES] = stamp

    def check(self, order: Sequence[int]) -> None:
        """Raise unless every block holds what `stamp` wrote on the other side; then forget it."""
        for at, stamp in self._stamps(order):
            if self.view[at : at + STAMP_BYTES] != stamp:
                raise RuntimeError("a pull succeeded with wrong bytes")
            self.view[at : at + STAMP_BYTES] = bytes(STAMP_BYTES)

    def lend_to(self, agent: Agent) -> None:
        shape = self.shape
        addresses = [self.address + layer * shape.blocks * shape.block_bytes for layer in range(shape.layers)]
        agent.set_pool(
            addresses, shape.blocks, shape.block_bytes, shape.block_bytes, BLOCK_TOKENS, "bench", self.region
        )


class Path(NamedTuple):
    """A way that blocks can come."""

    backend: str
    checksum: bool
    streams: int = 1

    def __str__(self) -> str:
        streams = f", {self.streams} streams" if self.streams > 1 else ""
        return f"{self.backend}{streams}, {'checksum' if self.checksum else 'no checksum'}"


def make_agent(path: Path) -> Agent:
    options = Options()
    options.backends = [path.backend]
    options.checksum = path.checksum
    options.streams = path.streams
    options.connect_timeout_s = 10.0  # A busy machine is no reason to measure nothing.
    options.ucx_library = os.environ.get(UCX_LIBRARY, options.ucx_library)
    return Agent(options, ("127.0.0.1:0",))


def pin(core: int) -> None:
    """Keep all threads of this process that start from now on on one core."""
    os.sched_setaffinity(0, {core})


class Source:
    """Executes the lines of the driver."""

    def __init__(self) -> None:
        self.memory: Memory | None = None
        self.order: list[int] = []
        self.agents: list[Agent] = []
        self.generation = 0
        self.streams: list[socket.socket] = []

    def prepare(self, shape: list[Any], order: list[int], paths: list[list[Any]]) -> dict[str, Any]:
        """Take memory for a shape, and an agent for each path."""
        for agent in self.agents:
            agent.close()
        # The engine's own memory, and a pool that lies in a region of ours.
        self.memory, own_pool = Memory(Shape(*shape)), Memory(Shape(*shape), shared=True)
        self.order = order
        self.memory.stamp(order)
        own_pool.stamp(order)
        ways = [Path(*path) for path in paths]
        self.agents = [make_agent(way) for way in ways]
        for agent, way in zip(self.agents, ways, strict=True):
            (own_pool if way.backend == "direct" else self.memory).lend_to(agent)
        return {"address": self.memory.address, "endpoints": [agent.endpoint for agent in self.agents]}

    def open(self, path: int, key: str, ready: bool) -> dict[str, Any]:
        """Lease all blocks; `ready`: all at once, else `post` follows."""
        assert self.memory is not None
        agent, name = self.agents[path], bytes.fromhex(key)
        self.generation = agent.open_lease(name, 60.0)
        agent.extend_lease(name, self.generation, self.order)
        if ready:
            agent.post_ready(name, self.generation, -1, self.memory.shape.tokens)
        return {}

    def post(self, path: int, key: str) -> dict[str, Any]:
        """Say layer by layer that it is ready, as an engine does that computes infinitely fast."""
        assert self.memory is not None
        for layer in range(self.memory.shape.layers):
            self.agents[path].post_ready(bytes.fromhex(key), self.generation, layer, self.memory.shape.tokens)
        return {}

    def listen(self, streams: int) -> dict[str, Any]:
        listener = socket.create_server(("127.0.0.1", 0))

        def accept() -> None:
            for _ in range(streams):
                self.streams.append(listener.accept()[0])
            listener.close()

        threading.Thread(target=accept).start()
        return {"port": listener.getsockname()[1]}

    def send(self, streams: int) -> dict[str, Any]:
        """Send all memory over some of the raw connections at once."""
        assert self.memory is not None
        share = self.memory.shape.bytes // streams
        view = self.memory.view

        def send(number: int) -> None:
            for at in range(number * share, (number + 1) * share, STREAM_PIECE_BYTES):
                self.streams[number].sendall(view[at : min(at + STREAM_PIECE_BYTES, (number + 1) * share)])

        threads = [threading.Thread(target=send, args=(number,)) for number in range(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {}

    def cpu(self) -> dict[str, Any]:
        return {"cpu_s": time.process_time()}


def main() -> None:
    if len(sys.argv) > 1:
        pin(int(sys.argv[1]))
    source = Source()
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(source, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
