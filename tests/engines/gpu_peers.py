"""Connectors whose KV other engines read by CUDA IPC or GPUDirect, over the stand-ins for GPUs and adapters.

The tensors of vLLM on a CPU become memory that the stand-in's processes share (`fake_gpu_adopt`). The stream writes the
blocks of each step; a kernel that reads them without waiting for that is refused. `$BATON_TEST_GATE/fault`, beside
those of `stand_in`:

    early    what is posted is ready at once, instead of after the stream
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from gate import read_order
from staged import StagedConnector

from baton.pool.gpu_agent import DIRECT_BACKENDS
from baton.transfer import AgentOptions, NativeAgent, Pool

PAGE = os.sysconf("SC_PAGE_SIZE")


class DeviceAgent(NativeAgent):
    """An agent whose pool, host memory, is taken for a GPU's."""

    def __init__(self, options: AgentOptions, library: str, gate: Path) -> None:
        super().__init__(replace(options, gpu_library=library))
        self._adopt: Any = ctypes.CDLL(library).fake_gpu_adopt
        self._adopt.argtypes, self._adopt.restype = [ctypes.c_uint64] * 2, None
        self._fault = gate / "fault"

    def set_pool(self, pool: Pool) -> None:
        for pages in _pages(pool):
            self._adopt(pages.start, len(pages))
        super().set_pool(replace(pool, device=0))

    def post_ready_after(self, key: bytes, generation: int, layer: int, tokens: int, *, stream: int) -> None:
        if read_order(self._fault) == "early":
            self.post_ready(key, generation, layer, tokens)
        else:
            super().post_ready_after(key, generation, layer, tokens, stream=stream)


class NearConnector(StagedConnector):
    """Use with kv_path=gpu."""

    def make_direct(self, options: AgentOptions) -> NativeAgent | None:
        return DeviceAgent(options, os.environ["BATON_TEST_GPU"], Path(os.environ["BATON_TEST_GATE"]))

    def note_written(self, kv_layer: Any, attn_metadata: Any) -> None:
        """Say which blocks the stream writes in this layer."""
        for block in {slot // self._block_tokens for slot in attn_metadata.slot_mapping.tolist() if slot >= 0}:
            self._stand_in.wrote(kv_layer[block])


class FarConnector(NearConnector):
    """The same, on a host of its own that has RDMA adapters."""

    def make_direct(self, options: AgentOptions) -> NativeAgent | None:
        library, host = os.environ["BATON_TEST_VERBS"], f"the host of {os.getpid()}"
        return super().make_direct(replace(options, backends=DIRECT_BACKENDS, verbs_library=library, host_id=host))


def _pages(pool: Pool) -> list[range]:
    """Return the pages of the pool, those together that lie side by side."""
    size = (pool.blocks - 1) * pool.block_stride_bytes + pool.block_bytes
    whole: list[range] = []
    for address in sorted(pool.layer_addresses):
        pages = range(address // PAGE * PAGE, -(-(address + size) // PAGE) * PAGE)
        if whole and pages.start <= whole[-1].stop:
            whole[-1] = range(whole[-1].start, max(whole[-1].stop, pages.stop))
        else:
            whole.append(pages)
    return whole
