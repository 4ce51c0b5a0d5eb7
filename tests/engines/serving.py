"""Operations of the tests of a complete deployment over real engines."""

from __future__ import annotations

import asyncio

import openai

from baton.messages.attempts import AttemptState
from baton.messages.workers import Role
from benchmarks.remote_engine.settings import EngineName, engine_options, engine_python
from tests.harness.cluster import Cluster
from tests.harness.limits import FREED_S

# Four engines share two cores here: a worker may well be silent for longer than on a machine of its own.
PATIENCE = ("--accept-s", "2.0", "--lost-after-s", "4.0")
PROMPT_STATES = (AttemptState.COMPUTING, AttemptState.HELD)
"""A prompt of a tiny model is computed between two digests, now and then."""


async def start_worker(cluster: Cluster, role: Role, name: str, engine: EngineName, **options: object) -> None:
    """Start a worker of a real engine, with further options for it, and wait for its heartbeats."""
    python = engine_python(engine)
    assert python is not None
    await cluster.start_worker(
        *(role, name, "--digest-s", "0.1"), engine=engine, options=engine_options(engine) | options, python=python
    )
    await cluster.wait_worker(name)


async def wait_idle(cluster: Cluster) -> None:
    """Wait until no attempt, run slot or KV block is held."""
    await asyncio.sleep(0.6)
    beats = cluster.observer.heartbeats

    def idle() -> bool:
        return all(not beat.attempts and not beat.running and not beat.kv_blocks_used for beat in beats.values())

    await cluster.observer.until(idle, timeout_s=FREED_S)


async def tell(
    client: openai.AsyncOpenAI,
    number: int,
    *,
    output_tokens: int = 100,
    length: int = 300,
    mode: str = "always",
    stop: str | None = None,
    **constraint: object,
) -> str:
    """Stream one greedy answer to a prompt, by default of several chunks, and return its text."""
    stream = await client.completions.create(
        model="tiny",
        prompt=f"story {number}: " + "it is interrupted " * length,
        max_tokens=output_tokens,
        temperature=0,
        stop=stop,
        stream=True,
        extra_body=constraint or {"ignore_eos": True},
        extra_headers={"x-baton-disaggregation": mode, "x-baton-deadline-s": "60"},
    )
    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


async def change_roles_under_answers(cluster: Cluster, client: openai.AsyncOpenAI, *, at_once: int) -> None:
    """Change two workers' roles there and back while answers are asked for, and compare all that is said.

    `at_once`: requests at a time, as many as keep each prefill worker busy now and then: with fewer, the one that is
    predicted slowest gets none.
    """
    numbers = range(100, 100 + at_once)
    expected = {number: await tell(client, number, mode="never") for number in numbers}
    before = {name: beat.address.generation for name, beat in cluster.observer.heartbeats.items()}
    changed = asyncio.Event()
    answers: list[tuple[int, str]] = []

    async def ask_on(number: int) -> None:
        # Prompts that no worker has cached: else they would go to those that have, and not to the one that changed.
        while not changed.is_set():
            salt = str(len(answers))
            answers.append((number, await tell(client, number, ignore_eos=True, cache_salt=salt)))

    async with asyncio.TaskGroup() as group:
        for number in numbers:
            group.create_task(ask_on(number))
        # One worker at least has each role all the time.
        for worker, role in (
            ("decode-1", Role.PREFILL),
            ("prefill-0", Role.DECODE),
            ("prefill-0", Role.PREFILL),
            ("decode-1", Role.DECODE),
        ):
            await cluster.change_role(worker, role)
        changed.set()
    assert len(answers) > len(numbers)
    assert all(text == expected[number] for number, text in answers)
    assert before == {name: beat.address.generation for name, beat in cluster.observer.heartbeats.items()}
    await wait_idle(cluster)
