"""Every service in turn is terminated and replaced by a new process while streams run: no client notices."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest

from baton.bus import Delivery
from baton.messages.attempts import AttemptState, Cancel
from baton.messages.workers import Role
from tests.harness.cluster import Cluster, Service, running_cluster

pytestmark = pytest.mark.timeout(300)  # On a busy machine; alone the longest takes 40 s.

PROMPTS = [f"{number}: " + " ".join(f"line {line}, the quick brown fox" for line in range(20)) for number in range(6)]
OUTPUT_TOKENS = 200
ENGINE = {"speed": 1.0, "step_fixed_s": 0.015, "prefill_token_s": 0.0002, "blocks": 1024, "eos_probability": 0.0}
"""An answer takes about four seconds."""
DRAIN_S = {Role.PREFILL: 30.0, Role.DECODE: 2.0}
"""Decode ends before its answers do, so some are moved. Prefill ends once nothing needs it any more."""
PATIENT = ("--accept-s", "20", "--place-resend-s", "5", "--lost-after-s", "20")
"""No worker counts as lost on a busy machine, so that only draining moves answers."""


class Clients:
    """Consecutive streams, each from the gateway that accepts new ones at the time."""

    def __init__(self, cluster: Cluster, gateway: str) -> None:
        self._cluster = cluster
        self.gateway = gateway
        self.answers: dict[str, list[str]] = {prompt: [] for prompt in PROMPTS}
        self.gap_s_max = 0.0
        self._asking = False

    async def ask(self, prompt: str, **changes: object) -> str:
        url = self._cluster.gateway_url(self.gateway)
        text: list[str] = []
        # The library gives a connection five seconds, and this process may stand still for longer on a busy machine.
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120.0) as client:
            stream = await client.completions.create(
                model="tiny", prompt=prompt, temperature=0, max_tokens=OUTPUT_TOKENS, stream=True, extra_body=changes
            )
            last_s = time.monotonic()
            finish: list[str] = []
            async for chunk in stream:
                now_s = time.monotonic()
                if text:
                    self.gap_s_max = max(self.gap_s_max, now_s - last_s)
                last_s = now_s
                text += [choice.text for choice in chunk.choices]
                finish += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        assert finish == ["length"]
        return "".join(text)

    async def ask_again_and_again(self, prompt: str) -> None:
        while self._asking:
            self.answers[prompt].append(await self.ask(prompt))

    @asynccontextmanager
    async def asking(self) -> AsyncGenerator[None]:
        """Send requests continuously; await the last answers at the end. Raises any client error."""
        self._asking = True
        async with asyncio.TaskGroup() as group:
            for prompt in PROMPTS:
                group.create_task(self.ask_again_and_again(prompt))
            yield
            self._asking = False


class Bystander:
    """Counts the attempts that gateways cancelled, by reason."""

    def __init__(self) -> None:
        self.cancels: Counter[str] = Counter()

    @classmethod
    async def of(cls, cluster: Cluster) -> Bystander:
        seen = cls()
        assert cluster.bus is not None
        await cluster.bus.subscribe("baton.worker.*.task", seen.see)
        return seen

    async def see(self, delivery: Delivery) -> None:
        if isinstance(delivery.message, Cancel):
            self.cancels[delivery.message.reason] += 1


@pytest.fixture
async def cluster(tmp_path: Path, model: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, model=model) as cluster:
        yield cluster


async def start(cluster: Cluster, name: str) -> Service:
    """Start one process; its name is its role and a number, its flags are the role's."""
    role = name.split("-")[0]
    if role in list(Role):
        return await cluster.start_worker(Role(role), name, "--drain-s", str(DRAIN_S[Role(role)]), options=ENGINE)
    flags = {
        "gateway": ("--host", "127.0.0.1", "--port", "0", "--drain-delay-s", "0.2", *PATIENT),
        "scheduler": ("--disaggregation", "auto"),
        "kvindex": ("--redis-url", cluster.redis_url),
    }
    return await cluster.start(name, f"baton_{role}", *flags[role])


def leaving_line(cluster: Cluster, name: str) -> str:
    """Return the work that a process logged as unfinished at the start of its drain."""
    lines = (cluster.folder / f"{name}.log").read_text().splitlines()
    return next(line for line in reversed(lines) if "draining: " in line)


async def replace(cluster: Cluster, clients: Clients, name: str) -> float:
    """Start a process in place of another one, then end that one; return the time its drain took."""
    role, number = name.split("-")
    successor = f"{role}-{int(number) + 10}"
    await start(cluster, successor)
    await cluster.wait_ready(gateway=successor if role == "gateway" else clients.gateway)
    if role == "gateway":
        clients.gateway = successor
    began_s = time.monotonic()
    leaving = cluster.services.pop(name)
    assert await leaving.end(grace_s=45.0) == 0, leaving.tail()
    return time.monotonic() - began_s


async def test_a_rolling_restart_of_everything_drops_nothing(cluster: Cluster) -> None:
    services = ["scheduler-0", "scheduler-1", "kvindex-0", "kvindex-1", "gateway-0"]
    workers = ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    for name in services + workers:
        await start(cluster, name)
    await cluster.wait_ready(gateway="gateway-0")
    seen = await Bystander.of(cluster)
    clients = Clients(cluster, "gateway-0")
    expected = {prompt: await clients.ask(prompt) for prompt in PROMPTS}
    left_s: dict[str, float] = {}
    async with clients.asking():
        for name in workers + services:
            left_s[name] = await replace(cluster, clients, name)
        while not seen.cancels["moved"] and len(left_s) < 15:  # Each that left was between two answers.
            name = await cluster.observer.worker_in(Role.DECODE, AttemptState.RUNNING)
            left_s[name] = await replace(cluster, clients, name)
    print({name: f"{took_s:.1f} s" for name, took_s in left_s.items()}, dict(seen.cancels), f"{clients.gap_s_max:.2f}")
    for prompt, answers in clients.answers.items():
        assert answers
        assert set(answers) == {expected[prompt]}
    assert " 0 answers" not in leaving_line(cluster, "gateway-0"), "there were streams to finish"
    assert seen.cancels["moved"], "answers that would have outlasted their worker"
    # A digest that crosses a move still names the attempt that was moved: it is disowned a second time.
    assert set(seen.cancels) <= {"moved", "busy", "not wanted any more"}, "nothing else was needed"


async def small(cluster: Cluster, *workers: str, drain_s: float, prefill_flags: Sequence[str] = ()) -> Clients:
    """Start one of each service and these workers."""
    await cluster.start_control_plane(gateway_flags=PATIENT)
    for name in workers:
        role = Role(name.split("-")[0])
        flags = prefill_flags if role is Role.PREFILL else ()
        await cluster.start_worker(role, name, "--drain-s", str(drain_s), "--digest-s", "0.1", *flags, options=ENGINE)
    await cluster.wait_ready()
    return Clients(cluster, "gateway")


async def test_prefill_leaves_when_what_it_holds_was_pulled(cluster: Cluster) -> None:
    slow_pulls = ("--faults", '{"delay_s": 1.0}')
    clients = await small(cluster, "prefill-0", "prefill-1", "decode-0", drain_s=20.0, prefill_flags=slow_pulls)
    seen = await Bystander.of(cluster)
    answer = asyncio.create_task(clients.ask(PROMPTS[0]))
    holds = await cluster.observer.worker_in(Role.PREFILL, AttemptState.HELD)
    ends = asyncio.create_task(cluster.services.pop(holds).end(grace_s=15.0))
    assert await answer
    assert await ends == 0
    assert not seen.cancels, "nothing was tried again"


async def test_without_another_worker_an_answer_ends_where_it_is(cluster: Cluster) -> None:
    clients = await small(cluster, "prefill-0", "decode-0", drain_s=30.0)
    expected = await clients.ask(PROMPTS[0])
    answer = asyncio.create_task(clients.ask(PROMPTS[0]))
    await cluster.observer.worker_in(Role.DECODE, AttemptState.RUNNING)
    assert await cluster.services.pop("decode-0").end(grace_s=45.0) == 0
    assert await answer == expected


async def test_what_cannot_go_on_exactly_has_the_whole_budget_and_then_its_typed_error(cluster: Cluster) -> None:
    """Penalties make the rest depend on the earlier output, which another worker would take for the prompt."""
    clients = await small(cluster, "prefill-0", "decode-0", "decode-1", drain_s=1.0)
    answer = asyncio.create_task(clients.ask(PROMPTS[0], presence_penalty=0.5))
    runs = await cluster.observer.worker_in(Role.DECODE, AttemptState.RUNNING)
    began_s = time.monotonic()
    ends = asyncio.create_task(cluster.services.pop(runs).end(grace_s=15.0))
    with pytest.raises(openai.APIError) as failure:
        await answer
    assert failure.value.code == "not_resumable"
    assert time.monotonic() - began_s >= 1.0
    assert await ends == 0
