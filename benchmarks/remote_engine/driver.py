"""One real engine behind JSON lines: commands on standard input, answers on standard output.

A command is `{"id": n, "do": name, …}`. Every command is answered by one line with its id and `result` or
`error`; `generate` first sends a line with `delta` per step. Before each line, the driver sends the engine's `load` and
`transfers` if they have changed, and a line for each batch of KV `event`s. End of input closes the engine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import aclosing, suppress
from typing import Any

import msgspec

from baton.connectors.pool_lending import Loan
from baton.engines.engine import EngineLoad, EngineRequest, Leg
from baton.engines.sglang.engine import SglangEngine
from baton.engines.vllm.engine import VllmEngine
from baton.errors import BatonError, EngineFailed
from baton.messages.attempts import Sampling
from baton.messages.base import WorkerAddress
from baton.messages.workers import Role
from baton.transfer import AgentOptions, TransferFaults

ENGINES = {"vllm": VllmEngine, "sglang": SglangEngine}
LOAD_INTERVAL_S = 0.005


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message, default=bytes.hex))
    sys.stdout.write("\n")
    sys.stdout.flush()


def engine_request(command: dict[str, Any]) -> EngineRequest:
    agents = tuple(command.get("agents", ()))
    source = WorkerAddress(worker="source", generation=1, agents=agents) if agents else None
    return EngineRequest(
        request=command["request"],
        attempt=command.get("attempt", 0),
        leg=Leg(command["leg"]),
        tokens=command["tokens"],
        sampling=msgspec.convert(command["sampling"], Sampling),
        cache_salt=command.get("cache_salt", ""),
        source=source,
        sink_ranks=command.get("sink_ranks", 0),
        budget_s=command.get("budget_s", 60.0),
        computing_token_s=command.get("computing_token_s", 0.0),
        loan=read_loan(command["loan"]) if command.get("loan") else None,
    )


def read_loan(loan: dict[str, Any]) -> Loan:
    """Return a loan whose deadline is told as the time that is left."""
    return Loan(
        key=bytes.fromhex(loan["key"]),
        endpoints=tuple(loan["endpoints"]),
        tokens=loan["tokens"],
        deadline_s=time.monotonic() + loan["budget_s"],
    )


class Driver:
    def __init__(self, engine: VllmEngine | SglangEngine) -> None:
        self._engine = engine
        self._events: list[dict[str, Any]] = []
        self._running: dict[int, asyncio.Task[None]] = {}
        self._load: EngineLoad | None = None

    async def gather_events(self) -> None:
        with suppress(EngineFailed):
            await self._gather_events()

    async def _gather_events(self) -> None:
        async for batch in self._engine.events():
            kinds = [type(event).__name__ for event in batch.events]
            self._events.append(msgspec.to_builtins(batch, builtin_types=(bytes,)) | {"kinds": kinds})
            say({"event": self._events[-1]})

    async def follow_load(self) -> None:
        while True:
            self.say_load()
            await asyncio.sleep(LOAD_INTERVAL_S)

    def say_load(self) -> None:
        with suppress(EngineFailed):
            load = self._engine.load()
            if load != self._load:
                self._load = load
                transfers = self._engine.transfers()
                say({"load": msgspec.to_builtins(load), "transfers": msgspec.to_builtins(transfers)})

    def say(self, message: dict[str, Any]) -> None:
        self.say_load()
        say(message)

    async def do(self, command: dict[str, Any]) -> None:
        number = command["id"]
        task = asyncio.current_task()
        assert task is not None
        self._running[number] = task
        try:
            self.say({"id": number, "result": await self._result(command)})
        except BatonError as error:
            self.say({"id": number, "error": error.code, "detail": error.detail})
        except asyncio.CancelledError:
            self.say({"id": number, "error": "stopped", "detail": "the driver was told to close the iterator"})
            raise
        finally:
            del self._running[number]

    async def _result(self, command: dict[str, Any]) -> Any:
        engine = self._engine
        match command["do"]:
            case "generate":
                async with aclosing(engine.generate(engine_request(command))) as deltas:
                    async for delta in deltas:
                        self.say({"id": command["id"], "delta": msgspec.to_builtins(delta)})
                return None
            case "abort":
                return await engine.abort(command["request"], command.get("attempt", 0))
            case "stop":
                # Closes the iterator, as a client that disconnects does. The request may have ended already.
                if running := self._running.get(command["command"]):
                    running.cancel()
                return None
            case "health":
                return await engine.check_health()
            case "lend":
                key, blocks = bytes.fromhex(command["key"]), bytes.fromhex(command["blocks"])
                return await engine.lend(key, blocks, command["sink_ranks"])
            case "load":
                return msgspec.to_builtins(engine.load())
            case "transfers":
                return msgspec.to_builtins(engine.transfers())
            case "stats":
                rank: int = command.get("rank", 0)
                return (await engine.transfer_stats())[rank]
            case "faults":
                # SGLang's may be those of one rank.
                ranks = {"rank": command["rank"]} if "rank" in command else {}
                return await engine.set_faults(TransferFaults(**command["faults"]), **ranks)
            case "events":
                return self._events
            case "preempt":
                # vLLM's own call: preempt all running requests and drop every cached block.
                return await engine._llm.reset_prefix_cache(reset_running_requests=True)  # pyright: ignore
            case unknown:
                raise ValueError(f"no command {unknown}")


async def main(settings: dict[str, Any]) -> None:
    agent = msgspec.convert(settings.get("agent", {}), AgentOptions)
    engine_class = ENGINES[settings.get("engine", "vllm")]
    engine = engine_class(settings["model"], role=Role(settings["role"]), options=settings["options"], agent=agent)
    try:
        facts = await engine.start()
    except BatonError as error:
        say({"id": 0, "error": error.code, "detail": error.detail})
        return
    try:
        say({"id": 0, "result": msgspec.to_builtins(facts)})
        driver = Driver(engine)
        stdin = asyncio.StreamReader(limit=16 << 20)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
        async with asyncio.TaskGroup() as tasks:
            followers = [tasks.create_task(follow()) for follow in (driver.gather_events, driver.follow_load)]
            commands: set[asyncio.Task[None]] = set()
            while line := await stdin.readline():
                task = tasks.create_task(driver.do(json.loads(line)))
                commands.add(task)
                task.add_done_callback(commands.discard)
            for task in (*followers, *commands):
                task.cancel()
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
