"""A connector that stages over the stand-in for GPUs: the tensors of vLLM on a CPU are the device's memory.

Its copies read and write when they end, and are refused where they do not come after the stream that wrote last (see
native/tests/fabric/fake_copies.h). `$BATON_TEST_GATE/fault` plants one fault in the copies:

    to_host, to_device    batches of this direction are announced as ended when they are submitted
    unordered             batches come after no stream
"""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from gated import GatedConnector

from baton.transfer.device import Copy, CopyEnded, CopyEngine, cuda_copies

STREAM: Final = 7


class FaultyCopies:
    """The copies of another engine, and a fault."""

    def __init__(self, copies: CopyEngine, gate: Path) -> None:
        self._copies = copies
        self._fault = gate / "fault"
        self._hosts: list[range] = []
        self._announced: dict[int, bool] = {}
        """Tickets that were announced too early, and whether that was told."""
        self._early = os.eventfd(0, os.EFD_NONBLOCK)
        self._news = select.epoll()
        for descriptor in (self._early, copies.fileno()):
            self._news.register(descriptor, select.EPOLLIN)

    def fileno(self) -> int:
        return self._news.fileno()

    def register(self, address: int, size: int) -> None:
        self._copies.register(address, size)
        self._hosts.append(range(address, address + size))

    def unregister(self, address: int) -> None:
        self._copies.unregister(address)

    def submit(self, copies: Sequence[Copy], *, after: int | None) -> int:
        fault = self._fault.read_text() if self._fault.exists() else ""
        ticket = self._copies.submit(copies, after=None if fault == "unordered" else after)
        if fault == ("to_host" if any(copies[0].to in host for host in self._hosts) else "to_device"):
            self._announced[ticket] = False
            os.eventfd_write(self._early, 1)
        return ticket

    def poll(self) -> list[CopyEnded]:
        ended = [end for end in self._copies.poll() if self._announced.pop(end.ticket, None) is None]
        for ticket, told in self._announced.items():
            if not told:
                ended.append(CopyEnded(ticket))
                self._announced[ticket] = True
        if select.select([self._early], [], [], 0)[0]:
            os.eventfd_read(self._early)
        return ended

    def wait(self, ticket: int, *, timeout_s: float) -> bool:
        return self._copies.wait(ticket, timeout_s=timeout_s)

    def close(self) -> None:
        self._copies.close()


class StagedConnector(GatedConnector):
    """Use with kv_path=staged."""

    def make_copies(self) -> CopyEngine:
        gate = os.environ["BATON_TEST_GATE"]
        os.environ["FAKE_GPU_DIR"] = gate
        library = os.environ["BATON_TEST_GPU"]
        self._wrote: Any = ctypes.CDLL(library).fake_gpu_write
        self._wrote.argtypes, self._wrote.restype = [ctypes.c_uint64] * 4, None
        return FaultyCopies(cuda_copies(0, library=library), Path(gate))

    def stream(self) -> int | None:
        return STREAM

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: object) -> None:
        self.note_written(kv_layer, attn_metadata)
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def note_written(self, kv_layer: Any, attn_metadata: Any) -> None:
        """Say that the stream writes this layer."""
        self._wrote(STREAM, kv_layer.data_ptr(), 0, kv_layer.nbytes)
