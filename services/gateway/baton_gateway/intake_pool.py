"""Pool of intake processes, which read bodies outside the gateway so that no body holds up its event loop.

Threads would not help: decoding, rendering and validating hold the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Protocol, TypeVar
from zlib import crc32

import msgspec

from baton.clock import Clock
from baton.errors import BatonError, Overloaded, Unavailable
from baton_gateway.byte_shares import ByteShares
from baton_gateway.conversion import Conversion, Converted
from baton_gateway.intake import Intake, Operation, Parsed, Plan
from baton_gateway.intake_messages import (
    LARGE_BYTES,
    LENGTH_BYTES,
    MODELS_MAX,
    Convert,
    DropBody,
    EnvelopeRead,
    Failed,
    LoadModel,
    MakePlan,
    ParseBody,
    ReadEnvelope,
    Reply,
    Request,
    decode_prompt,
    decode_reply,
    encode,
    frame_head,
    frame_length,
)
from baton_gateway.responses.bodies import Envelope, ResponseContext, read_envelope
from baton_gateway.tokenise import ModelFacts, ModelTokenizer
from baton_gateway.workers import Model

log = logging.getLogger(__name__)

BEGINNING_BYTES: Final = 1024
"""Length of a body's beginning. Bodies that come here are longer, and a conversation's next one begins alike."""
BEGINNINGS_MAX: Final = 1024
WRITE_BYTES: Final = 256 << 10
"""Bytes of a body copied at a time."""
READ_BYTES: Final = 1 << 20
NICENESS: Final = 5
"""Niceness of the processes above the gateway's: where processors are short, its streams come before prompts."""
LARGE_NICENESS: Final = 10
"""Niceness of those for large bodies: other prompts come before these."""
DROP_S: Final = 10.0
"""Time in which a process frees a body's memory."""

Awaited = TypeVar("Awaited", bound=Reply)


class IntakeWorker(Protocol):
    """Takes in one body, as `Intake` does: first `parse`, then `plan` or `convert`."""

    async def parse(
        self, operation: Operation | Conversion, payload: bytes | bytearray, context: ResponseContext | None = None
    ) -> Parsed: ...

    async def read_envelope(self, payload: bytes | bytearray) -> Envelope: ...

    async def convert(self, model: Model, *, salt: str) -> Converted: ...

    async def plan(self, model: Model, *, model_defaults: bool, salt: str = "") -> Plan: ...


class IntakePool(Protocol):
    async def load(self, path: str, digest: str) -> ModelFacts:
        """Have a worker load a model, and return its facts. Raises ConfigurationError."""
        ...

    def lend(
        self, body: bytes | bytearray, until_s: float | None, *, tenant: str = ""
    ) -> AbstractAsyncContextManager[IntakeWorker]:
        """Lend a worker for `body`, if possible one that has read a body with the same beginning. Raises Overloaded.

        Work that a borrower leaves unfinished may run until the clock reaches `until_s`; then it is ended. Tenants
        share the room for bodies that wait.
        """
        ...

    async def close(self) -> None: ...


class LocalPool:
    """Takes in bodies in the caller's process, and blocks its event loop meanwhile."""

    def __init__(self, load: Callable[[str], ModelTokenizer]) -> None:
        self._load = load

    async def load(self, path: str, digest: str) -> ModelFacts:
        del digest
        return self._load(path).facts

    @asynccontextmanager
    async def lend(
        self, body: bytes | bytearray, until_s: float | None, *, tenant: str = ""
    ) -> AsyncGenerator[IntakeWorker]:
        del body, until_s, tenant
        yield LocalWorker(self._load)

    async def close(self) -> None:
        pass


class LocalWorker:
    def __init__(self, load: Callable[[str], ModelTokenizer]) -> None:
        self._load = load
        self._intake = Intake()

    async def parse(
        self, operation: Operation | Conversion, payload: bytes | bytearray, context: ResponseContext | None = None
    ) -> Parsed:
        return self._intake.parse(operation, payload, context)

    async def read_envelope(self, payload: bytes | bytearray) -> Envelope:
        return read_envelope(payload)

    async def plan(self, model: Model, *, model_defaults: bool, salt: str = "") -> Plan:
        return self._intake.plan(self._load(model.path), model, model_defaults=model_defaults, salt=salt)

    async def convert(self, model: Model, *, salt: str) -> Converted:
        return self._intake.convert(self._load(model.path), model, salt=salt)


class _Processes:
    """Processes for bodies of one kind of length, with a bounded queue before them."""

    def __init__(self, processes_max: int, waiting_bytes_max: int, command: tuple[str, ...], niceness: int) -> None:
        self._command = command
        self._niceness = niceness
        self._processes_max = processes_max
        self._turns = asyncio.Semaphore(processes_max)
        self.waiting = ByteShares(waiting_bytes_max)
        self._idle: list[IntakeProcess] = []
        self.lent: set[IntakeProcess] = set()
        self._freed = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None

    async def wait_turn(self, tenant: str, size_bytes: int) -> None:
        if self._turns.locked() and not self.waiting.fits(tenant, size_bytes):
            raise Overloaded("too many long prompts are waiting to be read", retry_after_s=1.0)
        self.waiting.take(tenant, size_bytes)
        try:
            await self._turns.acquire()
        finally:
            self.waiting.take(tenant, -size_bytes)

    async def take(self, beginning: int, models: Mapping[str, str]) -> IntakeProcess:
        """Take a process, in the caller's turn.

        If none is idle, one more is started, and whichever is ready first is taken: a start takes seconds, most bodies
        take milliseconds. If none is at work either, the new one is taken at once. `models`: path → digest of what it
        loads before.
        """
        try:
            while (process := self._take_idle(beginning)) is None:
                if not any(each.is_warm for each in self.lent):
                    process = IntakeProcess(self._command, self._niceness)
                    break
                if self._starting is None or self._starting.done():
                    self._starting = asyncio.create_task(self._start(models))
                self._freed.clear()
                await self._freed.wait()
        except BaseException:
            self._turns.release()
            raise
        process.note_beginning(beginning)
        self.lent.add(process)
        return process

    def _take_idle(self, beginning: int) -> IntakeProcess | None:
        """Take the idle process that knows most of a body's tokens: the one that read the conversation's last turn."""
        idle = self._idle = [process for process in self._idle if process.is_alive]
        chosen = next((process for process in idle if beginning in process.beginnings), idle[-1] if idle else None)
        if chosen is not None:
            idle.remove(chosen)
        return chosen

    async def _start(self, models: Mapping[str, str]) -> None:
        process = IntakeProcess(self._command, self._niceness)
        try:
            for path, digest in models.items():
                await process.load(path, digest)
        except BatonError as error:
            log.warning("one more process that reads prompts did not start: %s", error)
            process.end()
        except BaseException:
            await process.kill()
            raise
        else:
            # Where others died meanwhile, bodies may have begun new ones.
            if len(self._idle) + len(self.lent) < self._processes_max:
                self._idle.append(process)
                self._freed.set()
            else:
                process.end()

    def take_back(self, process: IntakeProcess) -> None:
        self.lent.discard(process)
        if process.is_alive:
            self._idle.append(process)
        else:
            process.end()
        self._turns.release()
        self._freed.set()

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        for process in [*self._idle, *self.lent]:
            await process.kill()


class ProcessPool:
    """Pool of intake processes, started on first need and replaced when they die.

    Large bodies have processes and a queue of their own, so that others neither wait for them nor are refused.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        processes_max: int,
        waiting_bytes_max: int,
        command: tuple[str, ...] = (sys.executable, "-m", "baton_gateway.intake_process"),
    ) -> None:
        self._clock = clock
        self._processes = _Processes(processes_max, waiting_bytes_max, command, NICENESS)
        self._large_processes = _Processes(max(1, processes_max - 1), waiting_bytes_max, command, LARGE_NICENESS)
        self._models: dict[str, str] = {}
        """Path → digest of the models that were loaded last."""
        self._recovering: set[asyncio.Task[None]] = set()

    async def load(self, path: str, digest: str) -> ModelFacts:
        async with self.lend(b"", None) as process:
            facts = await process.load(path, digest)
        self._models.pop(path, None)
        self._models[path] = digest
        if len(self._models) > MODELS_MAX:
            del self._models[next(iter(self._models))]
        return facts

    @asynccontextmanager
    async def lend(
        self, body: bytes | bytearray, until_s: float | None, *, tenant: str = ""
    ) -> AsyncGenerator[IntakeProcess]:
        is_large = len(body) >= LARGE_BYTES
        processes = self._large_processes if is_large else self._processes
        await processes.wait_turn(tenant, len(body))
        process = await processes.take(crc32(body[:BEGINNING_BYTES]), self._models)
        try:
            yield process
        finally:
            # The borrower may be gone before the work is done. The process is lent again once it is free.
            if process.is_busy or process.holds_body or is_large:
                task = asyncio.create_task(self._recover(process, processes, until_s))
                self._recovering.add(task)
                task.add_done_callback(self._recovering.discard)
            else:
                processes.take_back(process)

    async def _recover(self, process: IntakeProcess, processes: _Processes, until_s: float | None) -> None:
        """Wait until a process has finished its work and dropped the body; kill it if that takes too long."""
        try:
            async with self._clock.timeout(None if until_s is None else max(0.0, until_s - self._clock.now_s())):
                await process.settle()
            process.drop_body()
            async with self._clock.timeout(DROP_S):
                await process.settle()
        except TimeoutError:
            await process.kill()
        finally:
            processes.take_back(process)

    @property
    def lent(self) -> int:
        """Number of processes that are lent."""
        return len(self._processes.lent) + len(self._large_processes.lent)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the bodies that wait for a process."""
        return self._processes.waiting.held_bytes + self._large_processes.waiting.held_bytes

    async def close(self) -> None:
        await self._processes.close()
        await self._large_processes.close()
        await asyncio.gather(*self._recovering)


class IntakeProcess:
    """One intake process. It starts with the first request; after an error of its pipes it counts as dead."""

    def __init__(self, command: tuple[str, ...], niceness: int) -> None:
        self._command = command
        self._niceness = niceness
        self._process: asyncio.subprocess.Process | None = None
        self._exchange: asyncio.Task[Reply] | None = None
        self._is_broken = False
        self._prompts = 0
        self._has_loaded = False
        self.holds_body = False
        """Whether a body was parsed, and neither planned nor converted."""
        self.beginnings: dict[int, None] = {}
        """Checksums of the beginnings of bodies, oldest first."""

    def note_beginning(self, beginning: int) -> None:
        self.beginnings.pop(beginning, None)
        self.beginnings[beginning] = None
        if len(self.beginnings) > BEGINNINGS_MAX:
            del self.beginnings[next(iter(self.beginnings))]

    @property
    def is_busy(self) -> bool:
        return self._exchange is not None and not self._exchange.done()

    @property
    def is_alive(self) -> bool:
        process = self._process
        if self._is_broken or process is None or process.stdout is None:
            return False
        return process.returncode is None and not process.stdout.at_eof()

    @property
    def is_warm(self) -> bool:
        """Whether it has loaded a model, and is alive."""
        return self._has_loaded and self.is_alive

    async def load(self, path: str, digest: str) -> ModelFacts:
        return await self._ask(ModelFacts, LoadModel(path, digest))

    async def read_envelope(self, payload: bytes | bytearray) -> Envelope:
        return (await self._ask(EnvelopeRead, ReadEnvelope(), payload)).envelope

    async def parse(
        self, operation: Operation | Conversion, payload: bytes | bytearray, context: ResponseContext | None = None
    ) -> Parsed:
        parsed = await self._ask(Parsed, ParseBody(operation, context), payload)
        self._prompts = parsed.prompts
        return parsed

    async def plan(self, model: Model, *, model_defaults: bool, salt: str = "") -> Plan:
        return await self._ask(Plan, MakePlan(model, model_defaults, salt))

    async def convert(self, model: Model, *, salt: str) -> Converted:
        return await self._ask(Converted, Convert(model, salt))

    async def _ask(self, kind: type[Awaited], request: Request, body: bytes | bytearray | None = None) -> Awaited:
        self._exchange = asyncio.create_task(self._converse(request, body))
        # An exchange runs to its end even if its caller is gone, so that the next one finds empty pipes.
        reply = await asyncio.shield(self._exchange)
        if isinstance(reply, Failed):
            raise reply.error.to_error()
        assert isinstance(reply, kind), f"{type(reply).__name__} in reply to {type(request).__name__}"
        return reply

    async def _converse(self, request: Request, body: bytes | bytearray | None) -> Reply:
        try:
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    limit=READ_BYTES,
                )
                niceness = os.getpriority(os.PRIO_PROCESS, 0) + self._niceness
                os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)
            await self._write(encode(request))
            if body is not None:
                await self._write(body)
            reply = decode_reply(await self._read())
            self.holds_body = isinstance(reply, Parsed)
            self._has_loaded = self._has_loaded or isinstance(reply, ModelFacts | Plan | Converted)
            if isinstance(reply, Plan):
                prompts = [decode_prompt(await self._read()) for _ in range(self._prompts)]
                reply = msgspec.structs.replace(reply, prompts=tuple(prompts))
        except (OSError, EOFError) as error:
            self._is_broken = True
            raise Unavailable(
                "the process that reads prompts has ended; it is started again", retry_after_s=1.0
            ) from error
        except BaseException:
            self._is_broken = True
            raise
        return reply

    async def _write(self, payload: bytes | bytearray) -> None:
        assert self._process is not None and self._process.stdin is not None
        pipe = self._process.stdin
        pipe.write(frame_head(payload))
        view = memoryview(payload)
        for start in range(0, len(payload), WRITE_BYTES):
            pipe.write(bytes(view[start : start + WRITE_BYTES]))
            await pipe.drain()

    async def _read(self) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        pipe = self._process.stdout
        return await pipe.readexactly(frame_length(await pipe.readexactly(LENGTH_BYTES)))

    def drop_body(self) -> None:
        """Begin to have the body dropped, unless the process is dead."""
        if self.is_alive:
            self._exchange = asyncio.create_task(self._converse(DropBody(), None))

    async def settle(self) -> None:
        """Wait for the end of the exchange, whether it succeeds or fails."""
        if self._exchange is not None:
            await asyncio.wait({self._exchange})
            with contextlib.suppress(asyncio.CancelledError):
                self._exchange.exception()

    def end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def kill(self) -> None:
        """End the process, and with it the exchange that waits for its reply."""
        if self._exchange is not None:
            self._exchange.cancel()
            await self.settle()
        self.end()
        if self._process is not None:
            await self._process.wait()
