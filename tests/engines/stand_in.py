"""The stand-in for GPUs inside an engine of these tests: the tensors of an engine on a CPU are the device's memory.

Its copies read and write when they end, and are refused where they do not come after the stream that wrote last (see
native/tests/fabric/fake_copies.h). `$BATON_TEST_GATE/fault` plants one fault:

    to_host, to_device    batches of this direction are announced as ended when they are submitted
    unordered             batches come after no stream
    hook                  a layer is posted in the engine's hook for it

`$BATON_TEST_GATE/mode` says when that hook is called, as an engine on a GPU does:

    queued      when a layer's writes are queued, before any is carried out: eager mode, piecewise graphs
    replayed    never: full graphs
    captured    for all layers at once, before the step writes anything: the capture of a graph
"""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from gate import read_order

from baton.transfer.device import Copy, CopyEnded, CopyEngine, cuda_copies

STREAM: Final = 7
HOOK_TIMEOUT_S: Final = 30.0


class FaultyCopies:
    """The copies of another engine, and a fault."""

    def __init__(self, copies: CopyEngine, fault: Callable[[], str]) -> None:
        self._copies = copies
        self._fault = fault
        self._hosts: list[range] = []
        self._announced: dict[int, bool] = {}
        """Tickets that were announced too early, and whether that was told."""
        self._submitted: list[int] = []
        """Tickets since the last `drain`."""
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
        fault = self._fault()
        ticket = self._copies.submit(copies, after=None if fault == "unordered" else after)
        self._submitted.append(ticket)
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

    def drain(self) -> None:
        """Wait until all that was submitted so far has ended."""
        while self._submitted:
            self.wait(self._submitted.pop(), timeout_s=HOOK_TIMEOUT_S)

    def close(self) -> None:
        self._copies.close()


class StandIn:
    def __init__(self) -> None:
        self._gate = Path(os.environ["BATON_TEST_GATE"])
        os.environ["FAKE_GPU_DIR"] = str(self._gate)
        library = os.environ["BATON_TEST_GPU"]
        self._write: Any = ctypes.CDLL(library).fake_gpu_write
        self._write.argtypes, self._write.restype = [ctypes.c_uint64] * 4, None
        self.copies = FaultyCopies(cuda_copies(0, library=library), lambda: self.fault)

    @property
    def fault(self) -> str:
        return read_order(self._gate / "fault")

    @property
    def mode(self) -> str:
        return read_order(self._gate / "mode")

    def wrote(self, tensor: Any) -> None:
        """Say that the engine's stream writes a tensor."""
        self._write(STREAM, tensor.data_ptr(), 0, tensor.nbytes)

    def hook(self, layers: Sequence[int], hook: Callable[[int], None], post: Callable[[int], None]) -> None:
        """Call the engine's hook for layers that are not written yet, or `post` if that fault is planted.

        What is copied because of it is read before the write.
        """
        for layer in layers:
            (post if self.fault == "hook" else hook)(layer)
        self.copies.drain()
