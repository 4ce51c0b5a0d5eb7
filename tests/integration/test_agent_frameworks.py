"""Agents of two frameworks from PyPI, unmodified: a loop of calls and results against a real server.

The frameworks have an environment of their own, `.venv-agents`, which `make test-nightly` creates if the packages are
available.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from baton_gateway.parsing.formats import FormatName

from tests.harness.gateway.actors import MODEL
from tests.integration.test_openai_tools import CALL, open_family, prompt_of

ENVIRONMENT = Path(__file__).parents[2] / ".venv-agents"
PROGRAM = Path(__file__).with_name("agent_program.py")
TIMEOUT_S = 120


def _is_installed() -> bool:
    stamps = ENVIRONMENT / "baton-stamps.json"
    return stamps.exists() and "agents" in json.loads(stamps.read_text())


pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(
        not _is_installed(), reason="no frameworks for agents here: `make environment-agents` installs them, given PyPI"
    ),
]


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize("framework", ["openai-agents", "pydantic-ai", "pydantic-ai-messages"])
async def test_an_agent_uses_its_tool_and_answers(framework: str, how: str) -> None:
    async with open_family(FormatName.HERMES) as (stage, _):
        stage.say(CALL % "Paris")
        agent = await asyncio.create_subprocess_exec(
            *(ENVIRONMENT / "bin" / "python", PROGRAM, framework, stage.base_url, MODEL, how),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert agent.stdin is not None
        assert agent.stdout is not None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                assert json.loads(await agent.stdout.readline()) == {"called": "Paris"}
                stage.say("It is sunny.")
                agent.stdin.write(b"\n")
                await agent.stdin.drain()
                assert json.loads(await agent.stdout.readline()) == {"answer": "It is sunny."}
                assert await agent.wait() == 0
        finally:
            if agent.returncode is None:
                agent.kill()
                await agent.wait()
        prompt = prompt_of(stage)
        assert "Use the tool." in prompt
        assert 'get_weather{"city": "Paris"}' in prompt
        assert "<|im_start|>tool\nsunny in Paris<|im_end|>" in prompt
