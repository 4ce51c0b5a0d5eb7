"""Copies between host memory and the memory of a device, in batches: the protocol, and its two implementations.

Staging uses them: a KV pool's slots are host memory, an engine's cache is the device's.

    submit ─▶ (the work that is in the stream `after`) ─▶ copies, in any order ─▶ fileno ─▶ poll

**To the host**, a batch is submitted behind the stream that writes the cache. Until it has ended, the cache's blocks
must not be freed and the slots must not be offered. **To the device**, it is submitted behind the stream that last used
those blocks. Once it has ended, the engine may be told that the KV is there, since what it launches then comes later.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple, Protocol

import baton_native

from baton.errors import ConfigurationError, TransferFailed

COPIES_MAX: Final = 1 << 16
"""Copies of one batch."""
BATCHES_MAX: Final = 1024
"""Batches that have not been polled."""


class Copy(NamedTuple):
    to: int
    source: int
    size: int
    """Bytes; no copy is empty."""


@dataclass(frozen=True, slots=True)
class CopyEnded:
    ticket: int
    failure: str = ""
    """Reason why the bytes did not arrive; empty if all of them did."""


class CopyEngine(Protocol):
    """Thread-safe; no method but `wait` and `close` waits for copies.

    Raises ValueError if the caller is wrong, TransferFailed if the device refuses, and after `close`.
    """

    def fileno(self) -> int:
        """Return a descriptor that is readable when batches have ended."""
        ...

    def register(self, address: int, size: int) -> None:
        """Register host memory, whole pages, which must outlive its registration. A device pins it."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register` of memory that no batch uses any more."""
        ...

    def submit(self, copies: Sequence[Copy], *, after: int | None) -> int:
        """Start a batch and return its ticket.

        Each copy has one end in registered memory; it is the target of all of them, or the source. `after`: the stream
        (a cudaStream_t that is not being captured into a graph) of which the present work must end first; None: nothing
        else has to. Batches may end in any order.
        """
        ...

    def poll(self) -> list[CopyEnded]:
        """Return each batch that has ended since the last call.

        If a device fails, its batches fail, which `fileno` does not announce: whoever waits polls at its deadline.
        """
        ...

    def wait(self, ticket: int, *, timeout_s: float) -> bool:
        """Wait until a batch has ended, and say whether it has; `poll` returns it as well."""
        ...

    def close(self) -> None:
        """Wait until every batch has ended. No other method may run meanwhile."""
        ...


def host_copies() -> CopyEngine:
    """Return an engine for a device whose memory is the host's: copies by a thread of its own.

    It ignores `after`: what a CPU writes is written.
    """
    return _NativeCopies(baton_native.CopyEngine())


def cuda_copies(device: int, *, library: str = "") -> CopyEngine:
    """Return an engine for a CUDA device. Raises ConfigurationError where it cannot be used.

    `library`: the CUDA part of baton_native; empty: the one that its build made.
    """
    try:
        return _NativeCopies(baton_native.CopyEngine(device, library))
    except baton_native.GpuError as failure:
        raise ConfigurationError(f"nothing is copied to or from GPU {device}: {failure}") from failure


class _NativeCopies:
    def __init__(self, engine: baton_native.CopyEngine) -> None:
        self._engine = engine

    def fileno(self) -> int:
        with _typed_failure():
            return self._engine.fileno()

    def register(self, address: int, size: int) -> None:
        with _typed_failure():
            self._engine.register(address, size)

    def unregister(self, address: int) -> None:
        with _typed_failure():
            self._engine.unregister(address)

    def submit(self, copies: Sequence[Copy], *, after: int | None) -> int:
        words = array("Q", chain.from_iterable(copies))
        with _typed_failure():
            return self._engine.submit(words.tobytes(), after)

    def poll(self) -> list[CopyEnded]:
        with _typed_failure():
            return [CopyEnded(ticket, failure) for ticket, failure in self._engine.poll()]

    def wait(self, ticket: int, *, timeout_s: float) -> bool:
        with _typed_failure():
            return self._engine.wait(ticket, timeout_s)

    def close(self) -> None:
        self._engine.close()


@contextmanager
def _typed_failure() -> Generator[None]:
    try:
        yield
    except baton_native.GpuError as failure:
        raise TransferFailed(str(failure)) from failure
