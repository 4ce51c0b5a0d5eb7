"""An agent of a framework from PyPI, with one tool, run by `test_agent_frameworks.py` in an environment of its own.

    python agent_program.py openai-agents|pydantic-ai|pydantic-ai-messages MODEL streamed|whole

Each address that comes in as a line gets a run of an agent. Its tool prints its argument and goes on when a line comes
in; then the answer is printed. The program ends with its input.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import sys

QUESTION = "What is the weather?"


def get_weather(city: str, days: int = 1, unit: str = "celsius") -> str:
    """Return the weather in a city."""
    print(json.dumps({"called": city}), flush=True)
    sys.stdin.readline()
    return f"sunny in {city}"


async def openai_agents(url: str, model: str, *, streamed: bool) -> str:
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    agent = Agent(
        name="weather",
        instructions="Use the tool.",
        model=OpenAIChatCompletionsModel(model=model, openai_client=client),
        tools=[function_tool(get_weather)],
    )
    if not streamed:
        return (await Runner.run(agent, QUESTION)).final_output
    result = Runner.run_streamed(agent, QUESTION)
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


async def pydantic_ai(url: str, model: str, *, streamed: bool, messages: bool) -> str:
    from pydantic_ai import Agent

    if messages:
        from anthropic import AsyncAnthropic
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        client = AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        backend = AnthropicModel(model, provider=AnthropicProvider(anthropic_client=client))
    else:
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        backend = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    agent = Agent(backend, instructions="Use the tool.", tools=[get_weather])
    if not streamed:
        return (await agent.run(QUESTION)).output
    async with agent.run_stream(QUESTION) as result:
        return await result.get_output()


async def run(framework: str, url: str, model: str, how: str) -> None:
    streamed = how == "streamed"
    if framework == "openai-agents":
        answer = await openai_agents(url, model, streamed=streamed)
    else:
        answer = await pydantic_ai(url, model, streamed=streamed, messages=framework.endswith("-messages"))
    print(json.dumps({"answer": answer}), flush=True)


def main(framework: str, model: str, how: str) -> None:
    while url := sys.stdin.readline().strip():
        asyncio.run(run(framework, url, model, how))


if __name__ == "__main__":
    main(*sys.argv[1:])
