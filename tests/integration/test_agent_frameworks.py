"""Agents of two frameworks from PyPI, unmodified: a loop of calls and results against a real server.

The frameworks have an environment of their own, `.venv-agents`, which `make test-nightly` creates if the packages are
available.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from baton_gateway.bodies import ChatBody

from tests.harness.gateway.actors import MODEL, tiny_model
from tests.harness.gateway.samples import Template, marks_of, published_templates, samples_of
from tests.harness.gateway.stage import open_stage
from tests.integration.test_openai_tools import prompt_of

ENVIRONMENT = Path(__file__).parents[2] / ".venv-agents"
PROGRAM = Path(__file__).with_name("agent_program.py")
TIMEOUT_S = 300
TEMPLATES = list({template.family: template for template in published_templates() if template.tools}.values())
"""A published chat template of each family."""


def _is_installed() -> bool:
    stamps = ENVIRONMENT / "baton-stamps.json"
    return stamps.exists() and "agents" in json.loads(stamps.read_text())


pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(5 * TIMEOUT_S),
    pytest.mark.skipif(
        not _is_installed(), reason="no frameworks for agents here: `make environment-agents` installs them, given PyPI"
    ),
]


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize("framework", ["openai-agents", "pydantic-ai", "pydantic-ai-messages"])
async def test_an_agent_uses_its_tool_and_answers_in_every_family(framework: str, how: str) -> None:
    agent = await asyncio.create_subprocess_exec(
        *(ENVIRONMENT / "bin" / "python", PROGRAM, framework, MODEL, how),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert agent.stdin is not None
    try:
        for template in TEMPLATES:
            async with asyncio.timeout(TIMEOUT_S):
                await loop(agent, template)
        agent.stdin.close()
        async with asyncio.timeout(TIMEOUT_S):
            assert await agent.wait() == 0
    finally:
        if agent.returncode is None:
            agent.kill()
            await agent.wait()


async def loop(agent: asyncio.subprocess.Process, template: Template) -> None:
    assert agent.stdin is not None
    assert agent.stdout is not None
    call = next(sample for sample in samples_of(template.family) if sample.name == "one call")
    assert [(name, arguments["city"]) for name, arguments in call.calls] == [("get_weather", "Paris")]
    async with open_stage(model=tiny_model(template.text, marks_of(template.family))) as stage:
        asked = ChatBody.model_validate({"model": MODEL, "messages": [{"role": "user", "content": "x"}]})
        opens = stage.tokenizer.render(asked).rstrip().endswith("<think>")
        thought = "Hm.\n</think>\n\n" if opens else ""
        stage.say(thought + call.text)
        agent.stdin.write(f"{stage.base_url}\n".encode())
        assert json.loads(await agent.stdout.readline()) == {"called": "Paris"}, template.file
        assert "Use the tool." in prompt_of(stage)
        stage.say(thought + "It is sunny.")
        agent.stdin.write(b"\n")
        assert json.loads(await agent.stdout.readline()) == {"answer": "It is sunny."}, template.file
        prompt = prompt_of(stage)
        result = prompt.rfind("sunny in Paris")
        assert -1 < prompt.find("What is the weather?") < prompt.rfind("Paris", 0, result), prompt
