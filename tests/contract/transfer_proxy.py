"""A rail that can fail: a proxy before an agent's address that cuts its connections or goes silent."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from math import inf

CHUNK_BYTES = 256 << 10


class Proxy:
    """Forwards connections to `address`, until it breaks: then it cuts them, or goes silent if it `hangs`."""

    def __init__(self, address: str, *, hangs: bool) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._limit_bytes = inf
        self._hangs = hangs
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._goes_on = threading.Event()
        self.passed_bytes = 0
        self.broke = threading.Event()
        self._goes_on.set()
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    def break_after(self, more_bytes: int) -> None:
        """Break once this many more bytes have come from the address."""
        self._limit_bytes = self.passed_bytes + more_bytes

    def break_now(self) -> None:
        if self._hangs:
            self._goes_on.clear()
        else:
            self._shut()
        self.broke.set()

    def mend(self) -> None:
        """Resume the connections that hang."""
        self._goes_on.set()

    def close(self) -> None:
        self.mend()
        self._shut()
        for thread in self._threads:
            thread.join(5.0)
            assert not thread.is_alive()

    def _start(self, run: object, *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)  # pyright: ignore[reportArgumentType]
        self._threads.append(thread)
        thread.start()

    def _shut(self) -> None:
        with self._lock:
            for each in (self._listener, *self._sockets):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                theirs = socket.create_connection(self._target)
                with self._lock:
                    self._sockets += [ours, theirs]
                self._start(self._pump, ours, theirs, False)
                self._start(self._pump, theirs, ours, True)

    def _pump(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                self._goes_on.wait()
                sink.sendall(data)
                if counts:
                    self.passed_bytes += len(data)
                if counts and self.passed_bytes >= self._limit_bytes and not self.broke.is_set():
                    self.break_now()
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
