"""The time for which a hostile body stalls the gateway's event loop: `make bench-intake`.

A gateway with real HTTP and real intake processes serves eight streams of a simulated engine all the time; scheduler
and worker run on its event loop. Meanwhile it gets one body after another of the kinds that cost most to read, and
loads a second model. A task of the same loop wakes up every millisecond: its longest delay is the time that every
stream waited. The comparison reads the bodies in the gateway's own process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpx
import uvloop
from baton_decode.config import DecodeSettings
from baton_gateway.api import make_app
from baton_gateway.config import Settings
from baton_gateway.idempotency_store import MemoryAnswers
from baton_gateway.intake_pool import IntakePool, LocalPool, ProcessPool
from baton_gateway.models import Models
from baton_gateway.server import listen, make_server
from baton_gateway.service import Gateway
from baton_gateway.tokenise import ModelTokenizer, load_to_stay
from baton_scheduler.config import SchedulerSettings
from baton_scheduler.service import SchedulerService

from baton.bus import MemoryBus, MemoryNetwork
from baton.cli.tiny_model import make_tiny_model
from baton.clock import SystemClock
from baton.messages.placement import Disaggregation
from baton.messages.workers import Role
from baton.node.ports import system_ports
from baton.node.service import Node, rare_collections
from baton.telemetry import Metrics, Tracing
from baton.worker.process import LoadingWorker
from benchmarks.report import Row, report

MODEL = "tiny"
ENGINE_OPTIONS: dict[str, object] = {
    "speed": 2.0,
    "blocks": 4096,
    "context_tokens_max": 4096,
    "parameters": {"guided_choice": None},
}
"""Steps of about 10 ms, which accept all bodies that are to be answered with 200."""
STREAMS = 8
TICK_S = 0.001
MIB = 1 << 20
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def bodies() -> Mapping[str, tuple[str, bytes, int]]:
    """Return bodies of up to 16 MiB, by name, each with its path and the status of its answer."""
    head = f'{{"model":"{MODEL}","max_tokens":1,'.encode()

    def listed(element: bytes, count: int) -> bytes:
        return b"[" + b",".join([element] * count) + b"]"

    numbered = b",".join(b'"x%d":0' % number for number in range(1_200_000))
    schema = b'{"a":' * 63 + listed(b'"' + b"x" * 97 + b'"', 2_600) + b"}" * 63
    chat = head + b'"messages":[{"role":"user","content":"x"}],'

    def tools(count: int, parameters: bytes = b"{}") -> bytes:
        each = b'{"type":"function","function":{"name":"f%d","parameters":%b}}'
        return b"[" + b",".join(each % (number, parameters) for number in range(count)) + b"]"

    def nested(levels: int) -> bytes:
        return b'{"type":"array","items":' * (levels // 2) + b"{}" + b"}" * (levels // 2)

    def regex(pattern: bytes) -> bytes:
        return head + b'"prompt":"x","regex":"' + pattern + b'"}'

    return {
        "a million empty prompts": (COMPLETIONS, head + b'"prompt":' + listed(b'""', 1_000_000) + b"}", 400),
        "65,536 empty messages": (CHAT, head + b'"messages":' + listed(b'{"role":"user"}', 65_536) + b"}", 400),
        "two million token ids": (COMPLETIONS, head + b'"prompt":' + listed(b"5", 2_000_000) + b"}", 400),
        "16 MiB of text": (COMPLETIONS, head + b'"prompt":"' + b"the fox " * (2 * MIB - 64) + b'"}', 400),
        "five million empty lists": (COMPLETIONS, head + b'"prompt":"x","x":' + listed(b"[]", 5_000_000) + b"}", 400),
        "1.2 million fields": (COMPLETIONS, head + b'"prompt":"x",' + numbered + b"}", 400),
        "7 million levels": (COMPLETIONS, head + b'"prompt":"x","x":' + b"[" * 7 * MIB + b"]" * 7 * MIB + b"}", 400),
        "a schema of 256 KiB": (COMPLETIONS, head + b'"prompt":"x","guided_choice":' + schema + b"}", 200),
        "10,000 tools": (CHAT, chat + b'"tools":' + tools(10_000) + b"}", 400),
        "15 MiB of tools": (CHAT, chat + b'"tools":' + tools(1_000, b'{"a":"' + b"x" * 15_000 + b'"}') + b"}", 400),
        "a schema of 66 levels": (COMPLETIONS, head + b'"prompt":"x","json_schema":' + nested(66) + b"}", 400),
        "a schema beyond 256 KiB": (
            COMPLETIONS,
            head + b'"prompt":"x","guided_choice":' + b"[" + schema * 2 + b"]}",
            400,
        ),
        "a regex that explodes": (COMPLETIONS, regex(b"((a{0,100}){0,100}){0,100}"), 400),
        "a regex of nested groups": (COMPLETIONS, regex(b"(" * 2000 + b"a" + b")" * 2000), 400),
        "half a surrogate": (COMPLETIONS, head + b'"prompt":"\\ud800"}', 400),
        "half surrogates in a tool": (CHAT, chat + b'"tools":' + tools(1, b'{"\\udfff":"\\ud800"}') + b"}", 400),
        "64 stop texts": (
            COMPLETIONS,
            head + b'"prompt":"x","stop":' + listed(b'"' + b"a" * 64 + b'"', 64) + b"}",
            200,
        ),
        "a prompt that is cut": (
            COMPLETIONS,
            head + b'"truncate_prompt_tokens":-1,"prompt":"' + b"the fox " * MIB + b'"}',
            200,
        ),
        "8 MiB to tokenise": ("/tokenize", b'{"model":"tiny","prompt":"' + b"the fox " * MIB + b'"}', 200),
        "more than 16 MiB": (COMPLETIONS, head + b'"prompt":"' + b"x" * 16 * MIB + b'"}', 413),
        "a response with five million empty lists": (
            RESPONSES,
            b'{"model":"tiny","input":"x","x":' + listed(b"[]", 5_000_000) + b"}",
            400,
        ),
        "a response to 16 MiB of text": (
            RESPONSES,
            b'{"model":"tiny","truncation":"auto","input":"' + b"the fox " * (2 * MIB - 64) + b'"}',
            400,
        ),
        "a prompt of 4,000 tokens": (COMPLETIONS, head + b'"prompt":' + listed(b"5", 4_000) + b"}", 200),
    }


# ---------------------------------------------------------------- clients, in a process of their own


async def run_clients(url: str) -> None:
    """Keep streams running, post each file named on stdin, and print the outcome."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as client:

        async def stream() -> None:
            body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 4000, "ignore_eos": True}
            while True:
                async with client.stream("POST", COMPLETIONS, json=body) as response:
                    async for _ in response.aiter_bytes():
                        pass

        streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]
        while line := (await reader.readline()).decode().split():
            content = await asyncio.to_thread(Path(line[1]).read_bytes)
            answer = await client.post(line[0], content=content)
            print(answer.status_code, flush=True)
        for task in streams:
            task.cancel()


class Clients:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def post(self, path: str, file: Path, status: int) -> None:
        """Send a file and require this status of the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{path} {file}\n".encode())
        answered = int(await self._process.stdout.readline())
        assert answered == status, f"{answered}, not {status}"


@asynccontextmanager
async def clients(url: str) -> AsyncGenerator[Clients]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.intake", "--clients-of", url,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield Clients(process)
    finally:
        process.kill()
        await process.wait()


# ---------------------------------------------------------------- the system, in this process


@dataclass(frozen=True)
class System:
    gateway: Gateway
    models: Models
    url: str


@asynccontextmanager
async def running_system(model: Path, intake: IntakePool) -> AsyncGenerator[System]:
    """Run a gateway, a scheduler and a worker on this loop, over a bus in memory."""
    async with AsyncExitStack() as stack:
        # As in a gateway's process. What `load_to_stay` exempts from collection is unfrozen then, too.
        stack.enter_context(rare_collections())
        network = MemoryNetwork()
        stack.push_async_callback(network.close)

        def join(service: str) -> Node:
            bus = MemoryBus(network, name=service)
            stack.push_async_callback(bus.close)
            return Node(ports=system_ports(bus), tracing=Tracing(service), metrics=Metrics(service))

        worker_settings = DecodeSettings(
            model=str(model), model_name=MODEL, engine="simulated", engine_options=ENGINE_OPTIONS
        )
        await stack.enter_async_context(LoadingWorker(Role.DECODE, worker_settings, join("decode")).serving())
        scheduler = SchedulerService(SchedulerSettings(disaggregation=Disaggregation.NEVER), join("scheduler"))
        await stack.enter_async_context(scheduler.serving())
        # No limit that a stall could exceed, or the streams would end.
        settings = Settings(port=0, accept_s=5.0, drain_s=0.0)
        node = join("gateway")
        models = await stack.enter_async_context(aclosing(Models(ports=node.ports, intake=intake, load=load_to_stay)))
        gateway = Gateway(settings, gateway="gateway", node=node, models=models)
        listener = stack.enter_context(listen(settings))
        server = make_server(make_app(gateway, answers=MemoryAnswers(node.ports.clock, ttl_s=60.0)), gateway, listener)
        await stack.enter_async_context(server.serving())
        stack.push_async_callback(server.drain)
        [served] = gateway.workers.models()
        await models.get(served.path, served.digest)
        yield System(gateway, models, f"http://127.0.0.1:{listener.getsockname()[1]}")


# ---------------------------------------------------------------- measuring


async def stall_ms(work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
    """Return, in ms, the loop's longest delay during `work`, and its longest computation without a pause."""
    late_s, computed_s = [0.0], [0.0]

    async def tick() -> None:
        while True:
            before_s, used_s = time.perf_counter(), time.thread_time()
            await asyncio.sleep(TICK_S)
            late_s.append(time.perf_counter() - before_s - TICK_S)
            computed_s.append(time.thread_time() - used_s)

    ticking = asyncio.create_task(tick())
    await work()
    await asyncio.sleep(2 * TICK_S)
    ticking.cancel()
    return max(late_s) * 1e3, max(computed_s) * 1e3


async def measure(model: Path, other_model: Path, scratch: Path, *, processes: bool) -> dict[str, tuple[float, float]]:
    """Return the stalls, keyed by the work that caused them."""
    intake: IntakePool = LocalPool(cache(load_to_stay))
    if processes:
        intake = ProcessPool(clock=SystemClock(), processes_max=2, waiting_bytes_max=64 << 20)
    found: dict[str, tuple[float, float]] = {}
    async with running_system(model, intake) as system, clients(system.url) as sending:
        while len(system.gateway.routes) < STREAMS:  # noqa: ASYNC110 - the clients are another process.
            await asyncio.sleep(0.01)
        found["nothing else"] = await stall_ms(lambda: asyncio.sleep(3.0))
        found["the load of another model"] = await stall_ms(lambda: load(system, other_model, processes=processes))
        for name, (path, body, status) in bodies().items():
            (scratch / "body").write_bytes(body)
            found[name] = await stall_ms(lambda path=path, status=status: sending.post(path, scratch / "body", status))
    return found


async def load(system: System, model: Path, *, processes: bool) -> None:
    if processes:
        await system.models.get(str(model), "another")
    else:
        await asyncio.to_thread(ModelTokenizer, str(model))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="folder of the model that is loaded meanwhile (default: a tiny one)")
    parser.add_argument("--clients-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    uvloop.install()
    if arguments.clients_of:
        asyncio.run(run_clients(arguments.clients_of))
        return
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_tiny_model(model)
        ours, here = (
            asyncio.run(measure(model, arguments.model or model, Path(folder), processes=processes))
            for processes in (True, False)
        )
    rows = [
        row
        for name in ours
        for row in (
            Row.against(f"beside {name}: longest stall", "ms", ours[name][0], in_one_process=here[name][0]),
            Row.against(f"beside {name}: longest computation", "ms", ours[name][1], in_one_process=here[name][1]),
        )
    ]
    notes = (
        f"{STREAMS} streams at 100 tokens/s each run meanwhile; a stall is how late a task of the loop woke up, which "
        "on a busy machine is also the time that others had its processor; a computation is the processor time that "
        f"the loop's thread used in one go; scheduler and worker share the loop; the load was {load_before:.1f} before"
    )
    report("intake", rows, notes=notes)


if __name__ == "__main__":
    main()
