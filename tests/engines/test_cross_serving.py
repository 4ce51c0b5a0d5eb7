"""The whole of Baton over both engines: every pair of them answers, and one takes over from the other."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from serving import PATIENCE, PROMPT_STATES, start_worker, tell, wait_idle

from baton.messages.attempts import AttemptState
from baton.messages.workers import Role
from benchmarks.remote_engine.settings import ROOT, EngineName, engine_environ, engine_python
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.limits import START_S

WORKERS: tuple[tuple[Role, str, EngineName], ...] = (
    (Role.PREFILL, "prefill-vllm", "vllm"),
    (Role.DECODE, "decode-sglang", "sglang"),
    (Role.PREFILL, "prefill-sglang", "sglang"),
    (Role.DECODE, "decode-vllm", "vllm"),
)
STOP = "er"
RESPONSES = itertools.count(4000)
"""Numbers of conversations: greedy answers to new prompts, which no worker has cached."""
TOGETHER = range(4, 400, 4)
"""Prompts at once. Placement is free to choose, and leaves a slow engine idle until the others have enough to do."""
AGENTS = ROOT / ".venv-agents"
PAIRS = {(p, d) for p in ("prefill-vllm", "prefill-sglang") for d in ("decode-vllm", "decode-sglang")}

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(700)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> AsyncIterator[Cluster]:
    pythons = {engine: engine_python(engine) for _, _, engine in WORKERS}
    if None in pythons.values():
        pytest.skip("both engines are needed: make environment-vllm environment-sglang")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environ("sglang").items():
            patch.setenv(name, value)
        async with running_cluster(tmp_path_factory.mktemp("serving"), model=tiny_model) as cluster:
            await cluster.start_control_plane(gateway_flags=PATIENCE)
            for role, name, engine in WORKERS:
                await start_worker(cluster, role, name, engine)
            await cluster.wait_ready()
            yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_every_pair_of_engines_gives_the_same_answers_and_stops_at_the_same_strings(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    numbers = itertools.count()
    seen: set[tuple[str, ...]] = set()
    stopped = 0
    async with asyncio.timeout(START_S):
        for together in TOGETHER:
            cluster.observer.workers.clear()
            asked = list(itertools.islice(numbers, together))
            cut = await asyncio.gather(*(tell(client, number, length=80, stop=STOP) for number in asked))
            seen |= {tuple(sorted(workers, reverse=True)) for workers in cluster.observer.workers.values()}
            whole = await asyncio.gather(*(tell(client, number, length=80, mode="never") for number in asked))
            assert cut == [text.partition(STOP)[0] for text in whole]
            stopped += sum(STOP in text for text in whole)
            if seen >= PAIRS and stopped:
                break
    await wait_idle(cluster)


TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}


async def test_a_forced_call_is_valid_with_either_engine_over_both_apis(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    numbers = itertools.count(3000)
    cluster.observer.workers.clear()
    async with asyncio.timeout(START_S), httpx.AsyncClient(base_url=cluster.url, timeout=60) as plain:
        for together in TOGETHER:
            await asyncio.gather(*(check_forced_call(client, plain, next(numbers)) for _ in range(together)))
            if {"decode-vllm", "decode-sglang"} <= set().union(*cluster.observer.workers.values()):
                break
    await wait_idle(cluster)


async def check_forced_call(client: openai.AsyncOpenAI, plain: httpx.AsyncClient, number: int) -> None:
    messages = [{"role": "user", "content": f"story {number}: " + "weather in Rome? " * 100}]
    tool = {"name": "get_weather", "parameters": TOOL}
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": messages, "temperature": 0}
    create: Any = client.chat.completions.create
    chat = await create(
        **asked,
        tools=[{"type": "function", "function": tool}],
        tool_choice="required",
        parallel_tool_calls=False,
        extra_headers={"x-baton-disaggregation": "always"},
    )
    (call,) = chat.choices[0].message.tool_calls
    message = await plain.post(
        "/v1/messages",
        json={
            **asked,
            "tools": [{"name": "get_weather", "input_schema": TOOL}],
            "tool_choice": {"type": "tool", "name": "get_weather"},
        },
    )
    (block,) = message.json()["content"]
    assert (chat.choices[0].finish_reason, message.json()["stop_reason"]) == ("tool_calls", "tool_use")
    assert (call.function.name, block["name"]) == ("get_weather", "get_weather")
    arguments = json.loads(call.function.arguments)
    assert arguments == block["input"], "greedy answers to one prompt"
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 9


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize("framework", ["openai-agents", "pydantic-ai"])
async def test_agents_must_call_their_tool_with_either_engine(cluster: Cluster, framework: str, how: str) -> None:
    if not list(AGENTS.glob("lib/python3.*/site-packages/pydantic_ai")):
        pytest.skip("no frameworks for agents here: `make environment-agents` installs them, given PyPI")
    async with asyncio.timeout(START_S):
        for together in TOGETHER:
            cluster.observer.workers.clear()
            await check_agents(cluster, framework, how, together)
            if {"decode-vllm", "decode-sglang"} <= set().union(*cluster.observer.workers.values()):
                break
    await wait_idle(cluster)


async def check_agents(cluster: Cluster, framework: str, how: str, together: int) -> None:
    """Check that each agent gets one call with arguments that its framework accepts, and then an answer."""
    program = Path(__file__).with_name("forced_agents.py")
    agents = await asyncio.create_subprocess_exec(
        *(AGENTS / "bin" / "python", program, framework, cluster.url, how, str(together)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        said, _ = await agents.communicate()
    finally:
        if agents.returncode is None:
            agents.kill()
            await agents.wait()
    assert agents.returncode == 0
    ended = [json.loads(line) for line in said.splitlines()]
    assert len(ended) == together
    for agent in ended:
        (call,) = agent["called"]
        assert call["city"] in ("Paris", "Rome")
        assert 1 <= call["days"] <= 9
        assert agent["answer"]


async def test_responses_with_either_engine(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    await responses_until(cluster, client, lambda seen: {"decode-vllm", "decode-sglang"} <= set().union(*seen))


@pytest.mark.nightly
async def test_responses_with_every_pair_of_engines(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    await responses_until(cluster, client, lambda seen: seen >= PAIRS)


async def responses_until(
    cluster: Cluster, client: openai.AsyncOpenAI, is_enough: Callable[[set[tuple[str, ...]]], bool]
) -> None:
    """Check conversations until enough workers, or pairs of them, have answered."""
    seen: set[tuple[str, ...]] = set()
    async with asyncio.timeout(START_S):
        for together in TOGETHER:
            cluster.observer.workers.clear()
            await asyncio.gather(*(check_response(client, next(RESPONSES)) for _ in range(together)))
            seen |= {tuple(sorted(workers, reverse=True)) for workers in cluster.observer.workers.values()}
            if is_enough(seen):
                break
    await wait_idle(cluster)


async def check_response(client: openai.AsyncOpenAI, number: int) -> None:
    """Check a streamed call, its continuation by the response's id, and the same in the background and sent whole."""
    headers = {"x-baton-disaggregation": "always"}
    # The client's types differ for each combination of arguments.
    create: Any = partial(client.responses.create, model="tiny", temperature=0, extra_headers=headers)
    tool = {"type": "function", "name": "get_weather", "parameters": TOOL, "strict": True}
    question = {"role": "user", "content": f"story {number}: " + "weather in Rome? " * 100}
    called: dict[str, Any] = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    streamed = [event async for event in await create(**called, input=[question], max_output_tokens=200, stream=True)]
    assert [event.sequence_number for event in streamed] == list(range(len(streamed)))
    first = streamed[-1].response
    assert (streamed[-1].type, first.status) == ("response.completed", "completed")
    call = first.output[-1]
    assert (call.type, call.name) == ("function_call", "get_weather")
    arguments = json.loads(call.arguments)
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 9
    assert (await client.responses.retrieve(first.id)).output == first.output

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    asked: dict[str, Any] = {"tools": [tool], "tool_choice": "none", "max_output_tokens": 20}
    continued = await create(**asked, input=[result], previous_response_id=first.id)
    items = [item.model_dump(exclude_none=True) for item in first.output]
    whole = await create(**asked, input=[question, *items, result], store=False)
    background = await create(**asked, input=[result], previous_response_id=first.id, background=True, stream=True)
    events = [event async for event in background]
    later = [
        event
        async for event in await client.responses.retrieve(
            events[0].response.id, stream=True, starting_after=events[-3].sequence_number
        )
    ]
    assert later == events[-2:]
    assert continued.output_text == whole.output_text == events[-1].response.output_text
    assert continued.usage.output_tokens == whole.usage.output_tokens


async def test_neither_leg_tells_a_tenant_of_anothers_prompts(cluster: Cluster) -> None:
    """Check each leg; `test_cross_engine.py` checks each engine, since placement need not use a slow one here."""
    await cluster.start_gateway("gateway-tenants", *PATIENCE, "--api-keys", "one,two", "--routing-headers")
    await cluster.wait_ready(gateway="gateway-tenants")

    async def cached(key: str, number: int, mode: str) -> tuple[int, str]:
        """Return what the worker that computed the prompt had of it, and which worker that was."""
        raw = await clients[key].completions.with_raw_response.create(
            model="tiny",
            prompt=f"tenants {number}: " + "they share the engines " * 60,
            max_tokens=4,
            extra_headers={"x-baton-disaggregation": mode},
        )
        answer = raw.parse()
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        worker = raw.headers["x-baton-prefill" if mode == "always" else "x-baton-decode"]
        return answer.usage.prompt_tokens_details.cached_tokens or 0, worker

    url, numbers = f"{cluster.gateway_url('gateway-tenants')}/v1", itertools.count()
    async with AsyncExitStack() as stack:
        clients = {
            key: await stack.enter_async_context(openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0))
            for key in ("one", "two")
        }
        async with asyncio.timeout(START_S):
            for mode in ("always", "never"):
                proven = False
                # Placement is free to choose: the other tenant's prompt need not come to the worker that holds it.
                while not proven:
                    asked = [next(numbers) for _ in range(12)]
                    first, again, other = [
                        await asyncio.gather(*(cached(key, number, mode) for number in asked))
                        for key in ("one", "one", "two")
                    ]
                    assert [tokens for tokens, _ in (*first, *other)] == [0] * 24
                    proven = any(
                        tokens and worker == holder for (tokens, holder), (_, worker) in zip(again, other, strict=True)
                    )
    await cluster.services.pop("gateway-tenants").end()
    await wait_idle(cluster)


async def test_one_engine_takes_over_from_the_other(cluster: Cluster, client: openai.AsyncOpenAI) -> None:
    # Placement is free to choose: the prefill worker of the other engine takes over.
    number, answer, struck = await cluster.observer.caught_in(
        Role.PREFILL, *PROMPT_STATES, ask=lambda number: tell(client, 1000 + number)
    )
    cluster.services[struck].signal(signal.SIGKILL)
    said = await answer
    await cluster.services.pop(struck).end()
    del cluster.observer.heartbeats[struck]
    assert said == await tell(client, 1000 + number, mode="never")
    await wait_idle(cluster)


PATTERN = "([a-f]{8} ){30}end"


async def test_a_constrained_answer_moves_to_the_other_engine_and_stays_the_same(
    cluster: Cluster, client: openai.AsyncOpenAI
) -> None:
    number = 2000
    _, answer, struck = await cluster.observer.caught_in(
        Role.DECODE, AttemptState.RUNNING, ask=lambda _: tell(client, number, output_tokens=400, regex=PATTERN)
    )
    cluster.services[struck].signal(signal.SIGKILL)
    said = await answer
    await cluster.services.pop(struck).end()
    del cluster.observer.heartbeats[struck]
    assert re.fullmatch(PATTERN, said)
    assert said == await tell(client, number, output_tokens=400, regex=PATTERN, mode="never")
    await wait_idle(cluster)
