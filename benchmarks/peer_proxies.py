"""Peers that are HTTP proxies, over workers without an engine."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import httpx
from baton_simulator.routers.protocol import Role

from benchmarks.peer_backends import HOST, MODEL, Backends, Exchange
from benchmarks.peer_events import Choices, Event, NewRouter, Scenario, conversation, names, popular_prefixes

START_S: Final = 30.0
STEP_S: Final = 10.0
EVICTION_S: Final = 20
"""Interval between a proxy's evictions where they are compared, several times longer than a part of the requests
takes."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A peer that is an HTTP proxy with a policy."""

    package: str
    policy: str
    rule: NewRouter
    """The simulator's router that follows it."""
    fleet: dict[Role, int]
    scenarios: Sequence[Scenario] = (conversation, popular_prefixes)
    flags: Sequence[str] = ()
    separated_flag: str = ""
    ready: tuple[str, str] = ("/health", "All servers healthy")
    """Path, and what it says once per worker, or once, when all are there."""
    has_token_ids: bool = False
    """Whether a prompt may be token ids."""


class Evictions:
    """Evictions of a proxy's trees, by its log."""

    def __init__(self) -> None:
        self.count = 0
        self._came = asyncio.Event()

    async def follow(self, log: asyncio.StreamReader) -> None:
        async for line in log:
            if b"eviction completed" in line:
                self.count += 1
                self._came.set()

    async def wait(self) -> None:
        """Return after the next one."""
        self._came.clear()
        async with asyncio.timeout(START_S + EVICTION_S):
            await self._came.wait()


async def run_proxy(python: str, proxy: Proxy, events: Sequence[Event]) -> Choices:
    """Return the proxy's choices."""
    backends = Backends([(name, role) for role, each in names(proxy.fleet).items() for name in each])
    port, metrics_port = free_ports(2)
    command = [python, "-m", f"{proxy.package.replace('-', '_')}.launch_router", "--host", HOST, "--port", str(port)]
    command += ["--policy", proxy.policy, "--prometheus-port", str(metrics_port), "--log-level", "debug"]
    command += ["--worker-startup-check-interval", "1", "--max-concurrent-requests", "100000", *proxy.flags]
    if proxy.separated_flag:
        command.append(proxy.separated_flag)
        for role in ("prefill", "decode"):
            command += [part for url in backends.urls(role) for part in (f"--{role}", url)]
    else:
        command += ["--worker-urls", *backends.urls("aggregated")]
    async with backends.serve():
        router = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, limit=2**24)
        assert router.stdout is not None
        evictions = Evictions()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(evictions.follow(router.stdout))
            try:
                limits = httpx.Limits(max_connections=None)
                url = f"http://{HOST}:{port}"
                async with httpx.AsyncClient(base_url=url, timeout=START_S, limits=limits) as client:
                    await ready(client, proxy)
                    async with asyncio.TaskGroup() as streams:
                        return await exchange(client, proxy, backends, events, evictions, streams)
            finally:
                router.terminate()
                await router.wait()


async def ready(client: httpx.AsyncClient, proxy: Proxy) -> None:
    path, word = proxy.ready
    count = sum(proxy.fleet.values()) if path == "/workers" else 1
    async with asyncio.timeout(START_S):
        while True:
            try:
                if (await client.get(path)).text.count(word) == count:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


async def exchange(
    client: httpx.AsyncClient,
    proxy: Proxy,
    backends: Backends,
    events: Sequence[Event],
    evictions: Evictions,
    streams: asyncio.TaskGroup,
) -> Choices:
    """Send the requests one by one, each event once the one before has taken effect."""
    choices: Choices = {}
    running: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}
    evicted = evictions.count
    for event in events:
        request = event.arrival.id
        if event.kind == "pause":
            assert evictions.count == evicted, f"an eviction came while requests of {request}'s part were sent"
            await evictions.wait()
            evicted = evictions.count
            continue
        if event.kind == "arrive":
            backends.exchanges[event.text] = Exchange()
            choices[request] = {}
            started = asyncio.Event()
            running[request] = streams.create_task(stream(client, event.text, proxy.has_token_ids, started)), started
        at = backends.exchanges[event.text]
        async with asyncio.timeout(STEP_S):
            if event.kind == "last":
                at.last.set()
                await running.pop(request)[0]
                continue
            if event.kind == "first":
                at.first.set()
                await running[request][1].wait()
            if event.kind == "arrive" or proxy.separated_flag:
                role, worker = await at.reached.get()
                choices[request][role] = worker
    return choices


async def stream(client: httpx.AsyncClient, text: str, has_token_ids: bool, started: asyncio.Event) -> None:
    prompt = [ord(each) for each in text] if has_token_ids else text
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1024, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body, timeout=None) as response:
        response.raise_for_status()
        async for _ in response.aiter_bytes():
            started.set()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind((HOST, 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
