"""Several equal processes of one service: started together, kept alive, restarted in turn, drained together.

The parent does none of the service's work. Each process answers for itself on a status port of its own, which only the
parent knows; the parent's status port answers for all.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Final

from baton.errors import ConfigurationError, Unavailable
from baton.processes.child import Child, Program, describe_exit
from baton.processes.keep_alive import START_INTERVAL_S, StartFailed, keep_alive, until_ready
from baton.processes.probes import http_probe, http_status, started_probe
from baton.stop import EXIT_MISCONFIGURED
from baton.telemetry.merge import merge_scrapes
from baton.telemetry.metrics import OPENMETRICS, content_type

log = logging.getLogger(__name__)

LOOPBACK: Final = "127.0.0.1"
START_TIMEOUT_S: Final = 120.0
ANSWER_S: Final = 1.5
"""Time for a process to answer: a scrape asks twice, for readiness and metrics, and has 5 s."""
LAST_WORDS_S: Final = 3.0
"""Time to end after a second signal."""


class ProcessGroup:
    """The processes 0 to `count` - 1, as a service of their parent. SIGHUP restarts them in turn."""

    def __init__(
        self, name: str, command: Sequence[str], *, count: int, drain_timeout_s: float, answer_s: float = ANSWER_S
    ) -> None:
        self._name = name
        self._command = command
        self._count = count
        self._drain_timeout_s = drain_timeout_s
        self._answer_s = answer_s
        self._children: dict[int, Child] = {}
        """Processes by their status ports."""
        self._keeping: list[asyncio.Task[None]] = []
        self._restart_wanted = asyncio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Start all and keep them alive inside this context; at its end, those that still run get a last signal.

        Raises Unavailable or ConfigurationError if one of them ends while they start for the first time.
        """
        loop = asyncio.get_running_loop()
        with ExitStack() as listeners:
            for number in range(self._count):
                listener = listeners.enter_context(socket.create_server((LOOPBACK, 0)))
                self._children[listener.getsockname()[1]] = Child(self._program(number, listener))
            children = list(self._children.values())
            loop.add_signal_handler(signal.SIGHUP, self._restart_wanted.set)
            try:
                for child in children:
                    child.start()
                await until_ready(children)
                async with asyncio.TaskGroup() as tasks:
                    self._keeping = [tasks.create_task(keep_alive(child, log.warning)) for child in children]
                    self._keeping.append(tasks.create_task(self._restart_in_turn()))
                    yield
                    self._stop_keeping()
            except StartFailed as failed:
                raise _start_failed(failed) from None
            finally:
                loop.remove_signal_handler(signal.SIGHUP)
                await asyncio.gather(*(child.stop() for child in children))

    async def drain(self) -> None:
        """Have each process drain, and wait until all have ended."""
        self._stop_keeping()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        children = self._children.values()
        for child in children:
            child.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout_s):
                await asyncio.gather(*(child.wait() for child in children))

    async def check_ready(self) -> None:
        """Raise Unavailable unless one process at least is ready. The first that says so is enough."""
        asking = [asyncio.create_task(question) for question in self._questions("/ready")]
        reason = "no process answers"
        try:
            for answer in asyncio.as_completed(asking):
                status, body = await answer
                if status == 200:
                    return
                if status == 503:
                    reason = json.loads(body)["reason"]
        finally:
            for task in asking:
                task.cancel()
        raise Unavailable(reason)

    async def scrape(self, accept: str) -> tuple[str, bytes]:
        """Return the metrics of all processes; those of one that does not answer now are missing."""
        openmetrics = OPENMETRICS in accept
        answers = await asyncio.gather(*self._questions("/metrics", accept=OPENMETRICS if openmetrics else "*/*"))
        texts = {str(number): text for number, (status, text) in enumerate(answers) if status == 200}
        return content_type(accept), merge_scrapes(texts, openmetrics=openmetrics).encode()

    def _questions(self, path: str, *, accept: str = "*/*") -> list[Coroutine[None, None, tuple[int, str]]]:
        """Return one question to the status port of each process, 0 to `count` - 1."""
        return [http_status(LOOPBACK, port, path, accept=accept, timeout_s=self._answer_s) for port in self._children]

    def _program(self, number: int, status: socket.socket) -> Program:
        port = status.getsockname()[1]
        return Program(
            name=f"{self._name}-{number}",
            command=(*self._command, "--status-fd", str(status.fileno())),
            environ=os.environ,
            log_path=None,
            ready=started_probe(LOOPBACK, port),
            alive=http_probe(LOOPBACK, port, "/health"),
            start_timeout_s=START_TIMEOUT_S,
            stop_timeout_s=LAST_WORDS_S,
            sockets=(status.fileno(),),
        )

    def _stop_keeping(self) -> None:
        for task in self._keeping:
            task.cancel()

    async def _restart_in_turn(self) -> None:
        """At each SIGHUP, have one process after the other drain and start again.

        The next one only follows once its predecessor serves again: settings with which it cannot start cost one.
        """
        while True:
            await self._restart_wanted.wait()
            self._restart_wanted.clear()
            for child in self._children.values():
                old_pid = child.pid
                log.info("restarting %s", child.name)
                child.terminate()
                while child.pid == old_pid or not await child.program.ready():  # noqa: ASYNC110 - another process.
                    await asyncio.sleep(START_INTERVAL_S)


def _start_failed(failed: StartFailed) -> Unavailable | ConfigurationError:
    how = "was not ready in time" if failed.status is None else f"{describe_exit(failed.status)} while it started"
    kind = ConfigurationError if failed.status == EXIT_MISCONFIGURED else Unavailable
    return kind(f"{failed.child.name} {how}")
