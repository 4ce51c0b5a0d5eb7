"""A real engine in another Python environment behind the `Engine` protocol: the client of `driver.py`.

Engines pin their own torch, so two of them never share a process. With this class a suite can combine any two
engines.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from baton.engines.engine import (
    EngineBlockEvent,
    EngineBlocksCleared,
    EngineBlocksRemoved,
    EngineBlocksStored,
    EngineDelta,
    EngineEventBatch,
    EngineFacts,
    EngineLoad,
    EngineRequest,
    TransferFigures,
)
from baton.errors import BatonError, EngineFailed
from baton.messages.attempts import Sampling
from baton.messages.index import Tier

DRIVER = Path(__file__).with_name("driver.py")
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 20.0
LINE_BYTES_MAX = 16 << 20

_EVENTS: Mapping[str, type[EngineBlockEvent]] = {
    kind.__name__: kind for kind in (EngineBlocksStored, EngineBlocksRemoved, EngineBlocksCleared)
}


def _error(code: str, detail: str) -> BatonError:
    kinds = [BatonError]
    for kind in kinds:
        if kind.code == code:
            return kind(detail)
        kinds += kind.__subclasses__()
    return EngineFailed(f"{code}: {detail}")


class RemoteEngine:
    """An `Engine` in another process; see `baton.engines.engine.Engine`."""

    def __init__(self, python: str, settings: Mapping[str, Any], environ: Mapping[str, str], log: Path) -> None:
        self._command = [python, str(DRIVER), json.dumps(settings)]
        self._environ = environ
        self._log = log
        self._numbers = itertools.count(1)
        self._answers: defaultdict[int, asyncio.Queue[dict[str, Any]]] = defaultdict(asyncio.Queue)
        self._batches: asyncio.Queue[EngineEventBatch] = asyncio.Queue()
        self._load = EngineLoad()
        self._transfers = TransferFigures()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> EngineFacts:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=dict(self._environ),
                limit=LINE_BYTES_MAX,
            )
        self._reading = asyncio.create_task(self._read())
        async with asyncio.timeout(START_TIMEOUT_S):
            return msgspec.convert(await self._result(0), EngineFacts)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def check_sampling(self, sampling: Sampling) -> None:
        """Do nothing: `generate` checks on the other side."""

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        number = self._send(
            "generate",
            request=request.request,
            attempt=request.attempt,
            leg=request.leg,
            tokens=list(request.tokens),
            sampling=msgspec.to_builtins(request.sampling, str_keys=True),
            cache_salt=request.cache_salt,
            agents=list(request.source.agents) if request.source else [],
            sink_ranks=request.sink_ranks,
            budget_s=request.budget_s,
            computing_token_s=request.computing_token_s,
        )
        ended = False
        try:
            while not ended:
                line = await self._answers[number].get()
                if "delta" in line:
                    yield msgspec.convert(line["delta"], EngineDelta)
                    continue
                ended = True
                if "error" in line:
                    raise _error(line["error"], line["detail"])
        finally:
            if not ended:
                self._send("stop", command=number)

    async def abort(self, request: str, attempt: int) -> None:
        await self._result(self._send("abort", request=request, attempt=attempt))

    async def lend(self, key: bytes, blocks: bytes, sink_ranks: int) -> int:
        sent = self._send("lend", key=key.hex(), blocks=blocks.hex(), sink_ranks=sink_ranks)
        return int(await self._result(sent))

    def load(self) -> EngineLoad:
        return self._load

    def transfers(self) -> TransferFigures:
        return self._transfers

    async def events(self) -> AsyncIterator[EngineEventBatch]:
        while True:
            yield await self._batches.get()

    async def check_health(self) -> None:
        await self._result(self._send("health"))

    async def set_faults(self, *, rank: int | None = None, **faults: object) -> None:
        only = {} if rank is None else {"rank": rank}
        await self._result(self._send("faults", faults=faults, **only))

    async def stats(self, rank: int = 0) -> dict[str, Any]:
        return await self._result(self._send("stats", rank=rank))

    async def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            with suppress(asyncio.CancelledError):
                await self._reading

    def _send(self, do: str, **fields: object) -> int:
        assert self._process is not None and self._process.stdin is not None
        number = next(self._numbers)
        with suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(json.dumps({"id": number, "do": do, **fields}).encode() + b"\n")
        return number

    async def _result(self, number: int) -> Any:
        line = await self._answers[number].get()
        if "error" in line:
            raise _error(line["error"], line["detail"])
        return line["result"]

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        try:
            async for line in self._process.stdout:
                # Engines print to standard output, too.
                if line.startswith(b'{"'):
                    self._take(json.loads(line))
        finally:
            for answer in self._answers.values():
                answer.put_nowait({"error": EngineFailed.code, "detail": "the engine's process has ended"})

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]].put_nowait(message)
        elif "event" in message:
            self._batches.put_nowait(read_batch(message["event"]))
        else:
            self._load = msgspec.convert(message["load"], EngineLoad)
            self._transfers = msgspec.convert(message["transfers"], TransferFigures, dec_hook=_made)


def _made(kind: type[Any], value: object) -> object:
    """Decode a Counter, a type that MessagePack and JSON lack."""
    return kind(value)


def read_batch(batch: dict[str, Any]) -> EngineEventBatch:
    events = zip(batch["kinds"], batch["events"], strict=True)
    return EngineEventBatch(
        sequence=batch["sequence"], events=tuple(_EVENTS[kind](**_plain(event)) for kind, event in events)
    )


def _plain(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event's fields, with the hexadecimal text of JSON converted to bytes."""
    fields = dict(event)
    if "hashes" in fields:
        fields["hashes"] = tuple(map(bytes.fromhex, fields["hashes"]))
    if fields.get("parent") is not None:
        fields["parent"] = bytes.fromhex(fields["parent"])
    if "tokens" in fields:
        fields["tokens"] = tuple(fields["tokens"])
    if fields.get("tier") is not None:
        fields["tier"] = Tier(fields["tier"])
    return fields
