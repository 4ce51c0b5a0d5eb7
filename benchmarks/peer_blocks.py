"""NIXL moving the blocks of `baton_native.bench`, for `benchmarks.transfer`. Runs in an environment that has NIXL.

    python nixl_blocks.py CORE_OF_SINK CORE_OF_SOURCE

A line of JSON says the shape: layers, blocks, block_bytes, the order on both sides, and whether each layer is a
transfer of its own. Each "run" after it reads everything once and answers with wall and CPU seconds.
"""

# NIXL is not among this project's packages.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy
from nixl._api import nixl_agent, nixl_agent_config  # pyright: ignore

MEMORY = "DRAM"


def make_agent(name: str, size: int) -> tuple[Any, Any]:
    pool = numpy.full(size, 7 if name == "source" else 0, dtype=numpy.uint8)
    agent: Any = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(pool.ctypes.data, size, 0, "")], MEMORY)
    return agent, pool


def be_source(core: int, size: int, line: Connection) -> None:
    os.sched_setaffinity(0, {core})
    agent, pool = make_agent("source", size)
    line.send((agent.get_agent_metadata(), pool.ctypes.data))
    while line.recv():
        line.send(time.process_time())


def read_all(agent: Any, layers: list[tuple[Any, Any]]) -> None:
    handles: list[Any] = []
    for local, remote in layers:
        local_list, remote_list = agent.get_xfer_descs(local, MEMORY), agent.get_xfer_descs(remote, MEMORY)
        handle = agent.initialize_xfer("READ", local_list, remote_list, "source")
        agent.transfer(handle)
        handles.append(handle)
    for handle in handles:
        while (state := agent.check_xfer_state(handle)) != "DONE":
            if state != "PROC":
                raise RuntimeError(f"NIXL's transfer ended as {state}")
        agent.release_xfer_handle(handle)


def main(sink_core: int, source_core: int) -> None:
    os.sched_setaffinity(0, {sink_core})
    # NIXL logs to standard output, which is for the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    shape = json.loads(sys.stdin.readline())
    size = shape["layers"] * shape["blocks"] * shape["block_bytes"]
    context = multiprocessing.get_context("spawn")
    line, child_line = context.Pipe()
    child = context.Process(target=be_source, args=(source_core, size, child_line), daemon=True)
    child.start()
    agent, pool = make_agent("sink", size)
    metadata, source_address = line.recv()
    agent.add_remote_agent(metadata)

    def pieces(address: int, layer: int, order: list[int]) -> Any:
        rows = [(address + (layer * shape["blocks"] + block) * shape["block_bytes"]) for block in order]
        return numpy.array([(row, shape["block_bytes"], 0) for row in rows], dtype=numpy.uint64)

    layers = [
        (pieces(pool.ctypes.data, layer, shape["order"]), pieces(source_address, layer, shape["source_order"]))
        for layer in range(shape["layers"])
    ]
    if not shape["layerwise"]:
        layers = [tuple(numpy.concatenate(side) for side in zip(*layers, strict=True))]
    for _ in sys.stdin:
        line.send(True)
        began = time.perf_counter(), time.process_time() + line.recv()
        read_all(agent, layers)  # pyright: ignore
        wall_s = time.perf_counter() - began[0]
        line.send(True)
        cpu_s = time.process_time() + line.recv() - began[1]
        if not (pool[:: shape["block_bytes"]] == 7).all():
            raise RuntimeError("NIXL's transfer succeeded with wrong bytes")
        pool[:: shape["block_bytes"]] = 0
        print(json.dumps([wall_s, cpu_s]), file=answers, flush=True)
    line.send(False)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
