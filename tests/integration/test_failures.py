"""A killed or frozen worker never hangs a request: each state of `docs/handoff.md`, on real processes.

Simulated engines, whose next token is a function of the KV bytes: an answer that is byte-identical to
the undisturbed one shows that no wrong, stale or missing block was used on the way.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

import openai
import pytest

from baton.messages.attempts import AttemptState
from baton.messages.workers import Role
from tests.harness.cluster import Cluster
from tests.harness.limits import FREED_S, HANG_S

STORY = " ".join(f"line {number}: the quick brown fox" for number in range(60))
OUTPUT_TOKENS = 60

SLOW = {
    "speed": 1.0,
    "step_fixed_s": 0.03,
    "step_tokens_max": 256,
    "prefill_token_s": 0.002,
    "blocks": 512,
    "eos_probability": 0.0,
    "seed": 1,
}
"""About two seconds to compute the prompt and two to generate, so that every state shows in a digest.
A step has room for one prompt's chunk only: a second prompt is queued behind the first."""
HELD_BACK = ("--faults", '{"delay_s": 3.5}')
"""Bytes are held back for longer than the prompt takes, so that prefill is seen holding and decode pulling."""


@dataclass(frozen=True)
class Case:
    role: Role
    state: AttemptState
    disaggregation: str = "always"

    def prompt(self, number: int) -> str:
        """Return a prompt that begins as no other, so that no worker has it cached and every state lasts."""
        return f"{self.role} {self.state} {number} {STORY}"


ENDINGS = (
    pytest.param(signal.SIGKILL, id="kill"),
    pytest.param(signal.SIGSTOP, id="stop", marks=pytest.mark.nightly),
)
CASES = [
    # Without a source, decode computes the prompt itself, and says QUEUED until its first token.
    Case(Role.DECODE, AttemptState.QUEUED, "never"),
    Case(Role.PREFILL, AttemptState.COMPUTING),
    Case(Role.PREFILL, AttemptState.HELD),
    Case(Role.DECODE, AttemptState.PULLING),
    Case(Role.DECODE, AttemptState.RUNNING),
]


async def start_worker(
    cluster: Cluster, role: Role, number: int, *flags: str, module: str = "", held_back: bool = True
) -> None:
    own = HELD_BACK if held_back and role is Role.PREFILL else ()
    name = f"{role}-{number}"
    await cluster.start_worker(role, name, "--digest-s", "0.1", *own, *flags, options=SLOW, module=module)


async def ask(
    cluster: Cluster, *, prompt: str = STORY, deadline_s: float = 60.0, disaggregation: str = "always"
) -> str:
    """Stream one greedy answer and return its text."""
    client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    async with client:
        stream = await client.completions.create(
            model="tiny",
            prompt=prompt,
            temperature=0,
            max_tokens=OUTPUT_TOKENS,
            stream=True,
            extra_headers={"x-baton-deadline-s": str(deadline_s), "x-baton-disaggregation": disaggregation},
        )
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


async def caught(cluster: Cluster, case: Case, deadline_s: float = 60.0) -> tuple[int, asyncio.Task[str], str]:
    """Ask until an answer is seen in the state of the case: the number of its prompt, the answer and the worker."""

    def again(number: int) -> Coroutine[object, object, str]:
        return ask(cluster, prompt=case.prompt(number), deadline_s=deadline_s, disaggregation=case.disaggregation)

    return await cluster.observer.caught_in(case.role, case.state, ask=again)


async def ask_all(cluster: Cluster, prompts: Sequence[str]) -> list[str]:
    return await asyncio.gather(*(ask(cluster, prompt=prompt) for prompt in prompts))


def strike(cluster: Cluster, worker: str, how: signal.Signals) -> None:
    cluster.services[worker].signal(how)


@pytest.mark.parametrize("how", ENDINGS)
async def test_answer_survives_a_lost_worker_in_every_state(cluster: Cluster, how: signal.Signals) -> None:
    """Two workers of each role. The fault hits the one with the attempt; it is replaced before the next case."""
    for role in Role:
        for number in range(2):
            await start_worker(cluster, role, number)
    await cluster.wait_ready()
    for case in CASES:
        number, answer, worker = await caught(cluster, case)
        strike(cluster, worker, how)
        struck = await answer
        await cluster.services.pop(worker).end()
        await start_worker(cluster, case.role, int(worker[-1]))
        await cluster.wait_ready()
        undisturbed = await ask(cluster, prompt=case.prompt(number))
        assert len(undisturbed) > OUTPUT_TOKENS / 2
        assert struck == undisturbed, f"{case} changed the answer"
    await assert_nothing_left(cluster)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
async def test_a_task_for_a_worker_that_has_just_been_lost_goes_elsewhere(
    cluster: Cluster, how: signal.Signals
) -> None:
    """A worker is lost before it is noticed: the attempt is PLACING, and RESERVED on no worker."""
    for role in Role:
        for number in range(2):
            await start_worker(cluster, role, number, held_back=False)
    await cluster.wait_ready()
    for role in Role:
        strike(cluster, f"{role}-0", how)
    # Several at once, so that some are placed on the lost workers whatever the scheduler prefers.
    prompts = [f"{number} and {STORY[:500]}" for number in range(4)]
    answers = await ask_all(cluster, prompts)
    assert answers == await ask_all(cluster, prompts)


@pytest.mark.parametrize("how", ENDINGS)
async def test_decode_lost_while_the_attempt_is_reserved(cluster: Cluster, how: signal.Signals) -> None:
    await start_worker(cluster, Role.PREFILL, 0)
    await start_worker(cluster, Role.DECODE, 0, "--enter-timeout-s", "20", module="tests.integration.reluctant_worker")
    await cluster.wait_ready()
    answer = asyncio.create_task(ask(cluster))
    worker = await cluster.observer.worker_in(Role.DECODE, AttemptState.RESERVED)
    await start_worker(cluster, Role.DECODE, 1)
    await cluster.wait_worker("decode-1")
    strike(cluster, worker, how)
    assert await answer == await ask(cluster)


@pytest.mark.parametrize("how", ENDINGS)
async def test_prefill_lost_with_an_attempt_in_its_engines_queue(cluster: Cluster, how: signal.Signals) -> None:
    for role in Role:
        for number in range(2):
            await start_worker(cluster, role, number, held_back=False)
    await cluster.wait_ready()
    prompts = [f"{number} then {STORY}" for number in range(3)]
    answers = asyncio.create_task(ask_all(cluster, prompts))
    # Of two prompts on one worker the second waits in the engine until the first is computed.
    strike(cluster, await cluster.observer.worker_in(Role.PREFILL, AttemptState.COMPUTING, attempts=2), how)
    assert await answers == await ask_all(cluster, prompts)


@pytest.mark.parametrize("how", ENDINGS)
async def test_a_worker_lost_behind_its_last_frame_changes_nothing(cluster: Cluster, how: signal.Signals) -> None:
    """Decode is RETAINED: its tokens are delivered, only the acknowledgement is missing."""
    await start_worker(cluster, Role.PREFILL, 0)
    await start_worker(cluster, Role.DECODE, 0)
    await cluster.wait_ready()
    undisturbed = await ask(cluster)
    answer = asyncio.create_task(ask(cluster))
    # Two requests: the observer may hear of the first one's end later than its client.
    await cluster.observer.until(lambda: len(cluster.observer.finished) == 2)
    strike(cluster, "decode-0", how)
    assert await answer == undisturbed


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("how", ENDINGS)
async def test_without_another_worker_the_client_gets_a_typed_error_in_time(
    cluster: Cluster, role: Role, how: signal.Signals
) -> None:
    await start_worker(cluster, Role.PREFILL, 0)
    await start_worker(cluster, Role.DECODE, 0)
    await cluster.wait_ready()
    case = Case(role, AttemptState.COMPUTING if role is Role.PREFILL else AttemptState.PULLING)
    _, answer, worker = await caught(cluster, case, deadline_s=20.0)
    strike(cluster, worker, how)
    with pytest.raises(openai.APIError) as failure:
        async with asyncio.timeout(HANG_S):
            await answer
    assert failure.value.code in {"no_workers", "worker_lost", "deadline_exceeded", "overloaded"}


async def test_a_client_that_leaves_frees_both_engines(cluster: Cluster) -> None:
    await start_worker(cluster, Role.PREFILL, 0)
    await start_worker(cluster, Role.DECODE, 0)
    await cluster.wait_ready()
    for case in CASES:
        _, answer, _ = await caught(cluster, case)
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        await assert_nothing_left(cluster)


async def assert_nothing_left(cluster: Cluster) -> None:
    """Wait until no live worker holds an attempt, reservation or KV block."""
    before = dict(cluster.observer.heartbeats)
    workers = [name for name, service in cluster.services.items() if "--worker" in service.command]

    def idle(name: str) -> bool:
        beat = cluster.observer.heartbeats[name]
        return beat is not before[name] and (beat.attempts, beat.running, beat.kv_blocks_used) == ((), 0, 0)

    await cluster.observer.until(lambda: all(idle(name) for name in workers), timeout_s=FREED_S)
