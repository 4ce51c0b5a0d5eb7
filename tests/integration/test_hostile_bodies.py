"""Bodies that cost most to read: typed errors, flat memory, and other clients' streams go on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import httpx
import psutil
import pytest
from baton_gateway.intake_pool import ProcessPool
from msgspec import structs

from baton.clock import SystemClock
from benchmarks.intake import CHAT, COMPLETIONS, MODEL, System, bodies, running_system, stall_ms

COMPUTATION_MS_MAX: Final = 25.0
"""Longest computation of the gateway's loop beside any of these bodies; on the loop, some would take up to 0.9 s."""
GROWTH_MIB_MAX: Final = 96.0
HELD_MIB_MAX: Final = 512.0
"""Memory that a gateway and its intake processes may keep after these bodies; one alone takes 850 MiB meanwhile."""
ROUNDS: Final = 3
PLAIN: Final = "{{ messages[0].content }}"

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]


@pytest.fixture
async def system(model: Path) -> AsyncIterator[System]:
    pool = ProcessPool(clock=SystemClock(), processes_max=2, waiting_bytes_max=64 << 20)
    async with running_system(model, pool) as system:
        yield system


def held_mib() -> float:
    """Return the memory of this process, with the gateway, and of all it has started."""
    own = psutil.Process()
    return sum(process.memory_info().rss for process in (own, *own.children(recursive=True))) / (1 << 20)


async def posted(
    client: httpx.Client, path: str, content: bytes, headers: dict[str, str] | None = None
) -> tuple[httpx.Response, float]:
    """Return the answer to a body, and the longest computation of the loop meanwhile, in ms.

    The client is one and has no certificates: those of a client per request, 10 ms to free, would become garbage that
    is collected on the loop.
    """
    answers: list[httpx.Response] = []

    async def post() -> None:
        # In another thread, whose work is not the loop's.
        answers.append(await asyncio.to_thread(client.post, path, content=content, headers=headers, timeout=300.0))

    _, computed_ms = await stall_ms(post)
    return answers[0], computed_ms


async def test_hostile_bodies(system: System) -> None:
    gaps_ms: list[float] = []
    computations_ms: dict[str, float] = {}
    held: list[float] = []
    hostile = bodies()
    # Tests that ran before have left objects and processes.
    before_mib = held_mib()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=system.url, timeout=300.0))
        hostile_client = stack.enter_context(httpx.Client(base_url=system.url, timeout=300.0, verify=False))

        async def stream() -> None:
            body = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 4000, "ignore_eos": True}
            while True:
                async with client.stream("POST", COMPLETIONS, json=body) as response:
                    last_s = time.perf_counter()
                    async for _ in response.aiter_lines():
                        now_s = time.perf_counter()
                        gaps_ms.append((now_s - last_s) * 1e3)
                        last_s = now_s

        streaming = asyncio.create_task(stream())
        while len(gaps_ms) < 300:  # noqa: ASYNC110 - the stream's own pace.
            await asyncio.sleep(0.05)
        alone, used = gaps_ms[100:], len(gaps_ms)
        for _ in range(ROUNDS):
            for name, (path, content, status) in hostile.items():
                answer, computed_ms = await posted(hostile_client, path, content)
                computations_ms[name] = max(computations_ms.get(name, 0.0), computed_ms)
                assert answer.status_code == status, (name, answer.text[:500])
                if status >= 400:
                    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, name
                    assert len(answer.content) < 2000, name
                assert not streaming.done(), name
            headers = {"idempotency-key": f"round {len(held)}"}
            answer, computed_ms = await posted(hostile_client, COMPLETIONS, hostile["16 MiB of text"][1], headers)
            assert answer.status_code == 400
            computations_ms["with a key"] = max(computations_ms.get("with a key", 0.0), computed_ms)
            held.append(held_mib() - before_mib)
        streaming.cancel()
    beside = gaps_ms[used:]
    figures = {"alone": p99(alone), "beside": p99(beside), "held_mib": [round(each) for each in held]}
    print(json.dumps(figures), max(computations_ms.items(), key=lambda item: item[1]))
    assert max(computations_ms.values()) < COMPUTATION_MS_MAX, computations_ms
    # The first round starts both intake processes, and brings them to their size.
    assert held[-1] - held[1] < GROWTH_MIB_MAX, held
    assert held[-1] < HELD_MIB_MAX, held


async def test_a_template_that_never_ends_is_killed_at_the_deadline(system: System) -> None:
    system.gateway.settings = structs.replace(system.gateway.settings, trust_request_chat_template=True)
    loop = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    answers: list[httpx.Response] = []

    async with httpx.AsyncClient(base_url=system.url, timeout=300.0) as client:

        async def ask(template: str, *, deadline_s: float = 300.0) -> httpx.Response:
            headers = {"x-baton-deadline-s": str(deadline_s)}
            return await client.post(CHAT, json={**body, "chat_template": template}, headers=headers)

        async def hang() -> None:
            # More of them than there are intake processes.
            answers.extend(await asyncio.gather(*(ask(loop, deadline_s=5.0) for _ in range(3))))

        assert (await ask(PLAIN)).status_code == 200
        _, computed_ms = await stall_ms(hang)
        assert [answer.json()["error"]["code"] for answer in answers] == ["deadline_exceeded"] * 3
        assert computed_ms < COMPUTATION_MS_MAX
        assert (await ask(PLAIN)).status_code == 200


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]
