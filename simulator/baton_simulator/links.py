"""KV pulls over the workers' links, each shared evenly by the pulls that use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton_simulator.events import EventQueue


@dataclass(slots=True, eq=False)
class Pull:
    """One pull. It may begin while its prompt is computed; the last bytes exist only once that is done."""

    source: str
    sink: str
    size_bytes: int
    tail_bytes: int
    """Bytes that cannot move before `Links.release_tail`."""
    done: Callable[[Pull], None]
    moved_bytes: float = 0.0
    moving_s: float = 0.0
    """Time in which bytes moved."""
    rate_bytes_per_s: float = 0.0
    updated_s: float = 0.0
    tail_exists: bool = False
    version: int = 0
    """Number of rates so far: an end that was predicted from an earlier rate is void."""

    @property
    def limit_bytes(self) -> int:
        return self.size_bytes if self.tail_exists else self.size_bytes - self.tail_bytes


class Links:
    """The links of all workers: each has one rate out and the same rate in."""

    def __init__(self, queue: EventQueue, bytes_per_s: float) -> None:
        self._queue = queue
        self._bytes_per_s = bytes_per_s
        self._out: dict[str, dict[Pull, None]] = {}
        self._in: dict[str, dict[Pull, None]] = {}

    def begin(self, pull: Pull) -> None:
        """Begin to move what exists."""
        self._enter(pull)

    def release_tail(self, pull: Pull) -> None:
        """Let the last bytes move: the prompt is computed."""
        self._leave(pull)
        pull.tail_exists = True
        self._enter(pull)

    def cancel(self, pull: Pull) -> None:
        """End a pull before all of it has moved; `done` is not called."""
        self._leave(pull)

    def _enter(self, pull: Pull) -> None:
        pull.updated_s = self._queue.now_s
        self._out.setdefault(pull.source, {})[pull] = None
        self._in.setdefault(pull.sink, {})[pull] = None
        self._share(pull)

    def _leave(self, pull: Pull) -> None:
        if pull in self._out[pull.source]:
            self._move(pull)
            del self._out[pull.source][pull], self._in[pull.sink][pull]
            pull.rate_bytes_per_s = 0.0
            pull.version += 1
            self._share(pull)

    def _share(self, changed: Pull) -> None:
        """Give new rates to all pulls on the two links of `changed`."""
        out, into = self._out[changed.source], self._in[changed.sink]
        for pull in (*out, *(each for each in into if each not in out)):
            rate = self._bytes_per_s / max(len(self._out[pull.source]), len(self._in[pull.sink]))
            if rate != pull.rate_bytes_per_s:
                self._move(pull)
                pull.rate_bytes_per_s = rate
                pull.version += 1
                left_s = (pull.limit_bytes - pull.moved_bytes) / rate
                self._queue.add(self._queue.now_s + left_s, self._on_limit, (pull, pull.version))

    def _move(self, pull: Pull) -> None:
        elapsed_s = self._queue.now_s - pull.updated_s
        pull.moved_bytes += elapsed_s * pull.rate_bytes_per_s
        pull.moving_s += elapsed_s if pull.rate_bytes_per_s else 0.0
        pull.updated_s = self._queue.now_s

    def _on_limit(self, scheduled: tuple[Pull, int]) -> None:
        pull, version = scheduled
        if version == pull.version:
            self._leave(pull)
            # Exactly: rounding would leave a fraction of a byte.
            pull.moved_bytes = float(pull.limit_bytes)
            if pull.tail_exists:
                pull.done(pull)
