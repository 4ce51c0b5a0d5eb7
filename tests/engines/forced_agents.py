"""Agents of a framework from PyPI that must call their one tool first, run by `test_forced_agents.py`.

    python forced_agents.py openai-agents|pydantic-ai URL streamed|whole COUNT

They run side by side. Each prints one line: the calls that its tool got, and its answer.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

TOKENS_MAX = 200
"""Bound on each turn: random weights need not end the second, which is free text."""


def weather_tool(called: list[dict[str, Any]]) -> Callable[..., str]:
    def get_weather(city: Literal["Paris", "Rome"], days: Annotated[int, Field(ge=1, le=9)]) -> str:
        """Return the weather in a city."""
        called.append({"city": city, "days": days})
        return f"sunny in {city}"

    return get_weather


async def openai_agents(url: str, question: str, tool: Callable[..., str], *, streamed: bool) -> str:
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    # The framework itself lets the model answer freely after the forced call.
    agent = Agent(
        name="weather",
        model=OpenAIChatCompletionsModel(model="tiny", openai_client=client),
        model_settings=ModelSettings(
            tool_choice="required", parallel_tool_calls=False, max_tokens=TOKENS_MAX, temperature=0
        ),
        tools=[function_tool(tool)],
    )
    if not streamed:
        return (await Runner.run(agent, question, max_turns=2)).final_output
    result = Runner.run_streamed(agent, question, max_turns=2)
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


async def pydantic_ai(url: str, question: str, tool: Callable[..., str], *, streamed: bool) -> str:
    from pydantic_ai import Agent, ModelSettings, RunContext
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class ForcedFirst(AbstractCapability[None]):
        def get_model_settings(self) -> Callable[[RunContext[None]], ModelSettings]:
            return lambda context: ModelSettings(tool_choice="required" if context.run_step == 1 else "none")

    agent = Agent(
        OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none")),
        model_settings=ModelSettings(max_tokens=TOKENS_MAX, temperature=0, parallel_tool_calls=False),
        capabilities=[ForcedFirst()],
        tools=[tool],
        retries=0,
    )
    if not streamed:
        return (await agent.run(question)).output
    async with agent.run_stream(question) as result:
        return await result.get_output()


async def run(framework: str, url: str, number: int, *, streamed: bool) -> None:
    called: list[dict[str, Any]] = []
    ask = openai_agents if framework == "openai-agents" else pydantic_ai
    answer = await ask(url, f"story {number}: weather in Rome?", weather_tool(called), streamed=streamed)
    print(json.dumps({"called": called, "answer": answer}), flush=True)


async def main(framework: str, url: str, how: str, count: str) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(int(count)):
            group.create_task(run(framework, url, number, streamed=how == "streamed"))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
