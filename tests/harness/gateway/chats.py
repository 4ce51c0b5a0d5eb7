"""Chats with a gateway whose workers are scripted."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from baton_gateway.config import Settings

from tests.harness.gateway.actors import MODEL
from tests.harness.gateway.stage import Stage, open_stage
from tests.harness.limits import HANG_S

CHAT = "/v1/chat/completions"
TEXT = "the quick brown fox jumps over the lazy dog, 你好世界 😀, and then it stops. " * 3
SETTINGS = Settings(port=0, lost_after_s=0.8, progress_s=3.0, resend_s=0.1, admission_wait_s=5.0, accept_s=HANG_S)
"""No worker counts as unavailable because a busy machine is slow."""


@asynccontextmanager
async def open_talking_stage() -> AsyncGenerator[Stage]:
    """A stage whose decode worker answers every chat with TEXT, one token per millisecond."""
    async with open_stage(SETTINGS) as stage:
        stage.say(TEXT)
        stage.workers["d1"].script.interval_s = 0.001
        yield stage


def body(**fields: object) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "temperature": 0, **fields}


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content", "") for event in events for choice in event.get("choices", ()))


async def stream(client: httpx.AsyncClient, **fields: object) -> list[dict[str, Any]]:
    options = {"stream": True, "stream_options": {"include_usage": True}, **fields}
    response = await client.post(CHAT, json=body(**options))
    assert response.status_code == 200, response.text
    return events_of(response.text)


async def check_clean(stage: Stage) -> None:
    """Assert that nothing is left of any request."""
    await stage.wait_for(lambda: not stage.gateway.routes)
    await stage.wait_for(lambda: all(not worker.attempts for worker in stage.workers.values() if worker.alive))
