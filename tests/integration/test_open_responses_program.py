"""The Open Responses specification's own program of acceptance cases, against a gateway.

It is on GitHub only (`openresponses/openresponses`) and runs on Bun. `OPEN_RESPONSES` names a folder with a checkout in
which its packages are installed (`npm install bun zod@3` is enough); without it, this is skipped, and
`test_open_responses.py` has the cases over HTTP.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any, Final

import pytest
from baton_gateway.parsing.formats import FormatName

from tests.harness.gateway.actors import MODEL, tiny_model
from tests.harness.gateway.responses import with_store
from tests.harness.gateway.samples import chat_template, marks_of
from tests.harness.gateway.stage import open_stage
from tests.integration.test_open_responses import CALL, TEXT

SERVED: Final = {
    "assistant-phase",
    "basic-response",
    "multi-turn",
    "response-output-phase-schema",
    "streaming-response",
    "system-prompt",
    "tool-calling",
}
NOT_SERVED: Final = ("websocket", "compact", "image")
"""What cases of other names begin with: Baton serves neither WebSockets nor `/responses/compact` nor images."""
FOLDER: Final = os.environ.get("OPEN_RESPONSES", "")

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not FOLDER, reason="OPEN_RESPONSES names no checkout of the Open Responses specification"),
]


async def run(base_url: str) -> dict[str, tuple[str, list[str]]]:
    """Return each case's outcome, with what was wrong."""
    bun = Path(FOLDER) / "node_modules" / ".bin" / "bun"
    command = [bun, "run", "bin/compliance-test.ts", "--base-url", f"{base_url}/v1", "--api-key", "any"]
    process = await asyncio.create_subprocess_exec(
        *command, "--model", MODEL, "--json", cwd=FOLDER, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    results: list[dict[str, Any]] = json.loads(output)["results"]
    return {result["id"]: (result["status"], result.get("errors", [])) for result in results}


async def test_the_program() -> None:
    family = FormatName.HERMES
    async with open_stage(model=tiny_model(chat_template(family), marks_of(family)), store=with_store()) as stage:
        stage.say(TEXT)
        found = await run(stage.base_url)
        stage.say(CALL)
        found["tool-calling"] = (await run(stage.base_url))["tool-calling"]
    assert {name: found[name] for name in SERVED} == dict.fromkeys(SERVED, ("passed", list[str]()))
    others = found.keys() - SERVED
    assert all(name.startswith(NOT_SERVED) for name in others), others
    assert {found[name][0] for name in others} == {"failed"}, "a case that passes belongs to those served"
