"""Every service in turn is terminated and replaced by a new process while streams run: no client notices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import openai
import pytest

from baton.messages.attempts import AttemptState
from baton.messages.workers import Role
from tests.harness.clients import Bystander, Clients
from tests.harness.cluster import Cluster, Service, running_cluster
from tests.harness.limits import HANG_S

pytestmark = pytest.mark.timeout(300)  # On a busy machine; alone the longest takes 40 s.

PROMPTS = [f"{number}: " + " ".join(f"line {line}, the quick brown fox" for line in range(20)) for number in range(6)]
ENGINE = {"speed": 1.0, "step_fixed_s": 0.015, "prefill_token_s": 0.0002, "blocks": 1024, "eos_probability": 0.0}
"""An answer takes about four seconds."""
DRAIN_S = {Role.PREFILL: 30.0, Role.DECODE: 2.0}
"""Decode ends before its answers do, so some are moved. Prefill ends once nothing needs it any more."""
PATIENT = ("--accept-s", "20", "--place-resend-s", "5", "--lost-after-s", "20")
"""No worker counts as lost on a busy machine, so that only draining moves answers."""


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
    assert await leaving.end(grace_s=HANG_S) == 0, leaving.tail()
    return time.monotonic() - began_s


async def test_a_rolling_restart_of_everything_drops_nothing(cluster: Cluster) -> None:
    services = ["scheduler-0", "scheduler-1", "kvindex-0", "kvindex-1", "gateway-0"]
    workers = ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    for name in services + workers:
        await start(cluster, name)
    await cluster.wait_ready(gateway="gateway-0")
    seen = await Bystander.of(cluster)
    clients = Clients(cluster, PROMPTS, gateway="gateway-0")
    expected = {prompt: await clients.ask(prompt) for prompt in PROMPTS}
    left_s: dict[str, float] = {}
    async with clients.asking():
        for name in workers + services:
            left_s[name] = await replace(cluster, clients, name)
        while not seen.cancels["moved"] and len(left_s) < 15:  # Each that left was between two answers.
            name = await cluster.observer.worker_in(Role.DECODE, AttemptState.RUNNING)
            left_s[name] = await replace(cluster, clients, name)
        gateway = "gateway-0"
        while " 0 answers" in leaving_line(cluster, gateway) and len(left_s) < 18:  # As well.
            gateway = clients.gateway
            left_s[gateway] = await replace(cluster, clients, gateway)
    print({name: f"{took_s:.1f} s" for name, took_s in left_s.items()}, dict(seen.cancels), f"{clients.gap_s_max:.2f}")
    for prompt, answers in clients.answers.items():
        assert answers
        assert set(answers) == {expected[prompt]}
    assert " 0 answers" not in leaving_line(cluster, gateway), "there were streams to finish"
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
    return Clients(cluster, PROMPTS)


async def test_prefill_leaves_when_what_it_holds_was_pulled(cluster: Cluster) -> None:
    slow_pulls = ("--faults", '{"delay_s": 1.0}')
    clients = await small(cluster, "prefill-0", "prefill-1", "decode-0", drain_s=20.0, prefill_flags=slow_pulls)
    seen = await Bystander.of(cluster)
    _, answer, holds = await cluster.observer.caught_in(
        Role.PREFILL, AttemptState.HELD, ask=lambda number: clients.ask(f"{number} {PROMPTS[0]}")
    )
    ends = asyncio.create_task(cluster.services.pop(holds).end(grace_s=HANG_S))
    assert await answer
    assert await ends == 0
    assert not seen.cancels, "nothing was tried again"


async def test_without_another_worker_an_answer_ends_where_it_is(cluster: Cluster) -> None:
    clients = await small(cluster, "prefill-0", "decode-0", drain_s=30.0)
    expected = await clients.ask(PROMPTS[0])
    _, answer, _ = await cluster.observer.caught_in(
        Role.DECODE, AttemptState.RUNNING, ask=lambda _: clients.ask(PROMPTS[0])
    )
    assert await cluster.services.pop("decode-0").end(grace_s=HANG_S) == 0
    assert await answer == expected


async def test_what_cannot_go_on_exactly_has_the_whole_budget_and_then_its_typed_error(cluster: Cluster) -> None:
    """Penalties make the rest depend on the earlier output, which another worker would take for the prompt."""
    clients = await small(cluster, "prefill-0", "decode-0", "decode-1", drain_s=1.0)
    _, answer, runs = await cluster.observer.caught_in(
        Role.DECODE, AttemptState.RUNNING, ask=lambda _: clients.ask(PROMPTS[0], presence_penalty=0.5)
    )
    began_s = time.monotonic()
    ends = asyncio.create_task(cluster.services.pop(runs).end(grace_s=HANG_S))
    with pytest.raises(openai.APIError) as failure:
        await answer
    assert failure.value.code == "not_resumable"
    assert time.monotonic() - began_s >= 1.0
    assert await ends == 0
