"""A peer's library moving the blocks of `baton_native.bench`, for `benchmarks.transfer`. Needs that library installed.

    python peer_blocks.py nixl|mooncake CORE_OF_SINK CORE_OF_SOURCE

The input begins with a line of JSON: layers, blocks, block_bytes, the order on both sides, and whether each layer is
a transfer of its own. The answer is a zero once the library is ready. Each "run" after it reads everything once and
answers with three durations in seconds: until everything was requested, until it had arrived, and CPU time.
"""

# These libraries are not dependencies of this project.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Protocol

import numpy

Pieces = Any
"""Rows of (address, bytes, device), the form that NIXL takes."""


class Library(Protocol):
    ASKS_AHEAD: ClassVar[bool]
    """Whether `ask` returns once the transfer has begun."""

    def __init__(self, name: str, pool: Any) -> None:
        """Register `pool` for reading."""
        ...

    def address(self) -> Any:
        """Return the data with which a sink connects to this source."""
        ...

    def connect(self, address: Any) -> None: ...

    def ask(self, local: Pieces, remote: Pieces) -> None:
        """Begin a read."""
        ...

    def wait(self) -> None:
        """Return once everything requested has arrived."""
        ...


class Nixl:
    MEMORY = "DRAM"
    ASKS_AHEAD: ClassVar[bool] = True

    def __init__(self, name: str, pool: Any) -> None:
        from nixl._api import nixl_agent, nixl_agent_config  # pyright: ignore

        self._agent: Any = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], self.MEMORY)
        self._handles: list[Any] = []

    def address(self) -> Any:
        return self._agent.get_agent_metadata()

    def connect(self, address: Any) -> None:
        self._agent.add_remote_agent(address)

    def ask(self, local: Pieces, remote: Pieces) -> None:
        lists = [self._agent.get_xfer_descs(pieces, self.MEMORY) for pieces in (local, remote)]
        handle = self._agent.initialize_xfer("READ", *lists, "source")
        self._agent.transfer(handle)
        self._handles.append(handle)

    def wait(self) -> None:
        for handle in self._handles:
            while (state := self._agent.check_xfer_state(handle)) != "DONE":
                if state != "PROC":
                    raise RuntimeError(f"NIXL's transfer ended as {state}")
            self._agent.release_xfer_handle(handle)
        self._handles.clear()


class Mooncake:
    ASKS_AHEAD: ClassVar[bool] = False
    BATCH = 128
    """Mooncake. Each read is a task of its own, and thousands at once get its connections reset."""

    def __init__(self, name: str, pool: Any) -> None:
        from mooncake.engine import TransferEngine  # pyright: ignore

        del name
        self._engine: Any = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("Mooncake does not start")
        if self._engine.register_memory(pool.ctypes.data, pool.nbytes):
            raise RuntimeError("Mooncake does not take the memory")
        self._source = ""
        self._asked: list[tuple[Pieces, Pieces]] = []

    def address(self) -> Any:
        return f"127.0.0.1:{self._engine.get_rpc_port()}"

    def connect(self, address: Any) -> None:
        self._source = address

    def ask(self, local: Pieces, remote: Pieces) -> None:
        self._asked.append((local, remote))

    def wait(self) -> None:
        for local, remote in self._asked:
            for first in range(0, len(local), self.BATCH):
                batch = slice(first, first + self.BATCH)
                addresses = [pieces[batch, 0].tolist() for pieces in (local, remote)]
                if self._engine.batch_transfer_sync_read(self._source, *addresses, local[batch, 1].tolist()):
                    raise RuntimeError("Mooncake's transfer failed")
        self._asked.clear()


LIBRARIES: dict[str, type[Library]] = {"nixl": Nixl, "mooncake": Mooncake}


def be_source(library: str, core: int, size: int, line: Connection) -> None:
    os.sched_setaffinity(0, {core})
    pool = numpy.full(size, 7, dtype=numpy.uint8)
    source = LIBRARIES[library]("source", pool)
    line.send((source.address(), pool.ctypes.data))
    while line.recv():
        line.send(time.process_time())


def main(library: str, sink_core: int, source_core: int) -> None:
    os.sched_setaffinity(0, {sink_core})
    # The libraries log to standard output, which is reserved for the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    shape = json.loads(sys.stdin.readline())
    size = shape["layers"] * shape["blocks"] * shape["block_bytes"]
    context = multiprocessing.get_context("spawn")
    line, child_line = context.Pipe()
    child = context.Process(target=be_source, args=(library, source_core, size, child_line), daemon=True)
    child.start()
    pool = numpy.zeros(size, dtype=numpy.uint8)
    sink = LIBRARIES[library]("sink", pool)
    address, source_pool = line.recv()
    sink.connect(address)

    def pieces(pool_address: int, layer: int, order: list[int]) -> Pieces:
        rows = [(pool_address + (layer * shape["blocks"] + block) * shape["block_bytes"]) for block in order]
        return numpy.array([(row, shape["block_bytes"], 0) for row in rows], dtype=numpy.uint64)

    layers = [
        (pieces(pool.ctypes.data, layer, shape["order"]), pieces(source_pool, layer, shape["source_order"]))
        for layer in range(shape["layers"])
    ]
    if not shape["layerwise"]:
        layers = [tuple(numpy.concatenate(side) for side in zip(*layers, strict=True))]
    print(0, file=answers, flush=True)
    for _ in sys.stdin:
        line.send(True)
        began_s, began_cpu_s = time.perf_counter(), time.process_time() + line.recv()
        for layer in layers:
            sink.ask(*layer)  # pyright: ignore
        asked_s = time.perf_counter() - began_s if sink.ASKS_AHEAD else 0.0
        sink.wait()
        wall_s = time.perf_counter() - began_s
        line.send(True)
        cpu_s = time.process_time() + line.recv() - began_cpu_s
        if not (pool[:: shape["block_bytes"]] == 7).all():
            raise RuntimeError("the transfer succeeded with wrong bytes")
        pool[:: shape["block_bytes"]] = 0
        print(json.dumps([asked_s, wall_s, cpu_s]), file=answers, flush=True)
    line.send(False)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
