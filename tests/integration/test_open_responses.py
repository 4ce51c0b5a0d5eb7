"""The Open Responses specification: its acceptance cases, with every answer and event as its schema says.

Its own program runs on Bun with packages of its own; these are its cases, each whole and streamed. What deviates is
listed in `docs/responses-api.md`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Final, cast

import httpx
import openresponses_types.types as schema
import pytest
from baton_gateway.parsing.formats import FormatName
from pydantic import BaseModel

from tests.harness.gateway.actors import MODEL, tiny_model
from tests.harness.gateway.responses import rebuilt, with_store
from tests.harness.gateway.samples import chat_template, marks_of
from tests.harness.gateway.stage import Stage, open_stage
from tests.integration.test_openai_tools import prompt_of

DEVIATIONS: Final = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}
"""Our names of events, and the specification's."""
WEATHER: Final = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city and state"}},
        "required": ["location"],
    },
}
TEXT: Final = "Hello there!"
CALL: Final = (
    "<think>\nHm.\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"location": "San Francisco"}}\n</tool_call>'
)
USER: Final = {"type": "message", "role": "user", "content": "Say hello in exactly 3 words."}

_EVENTS: Final = {
    next(iter(cast("Any", kind.model_fields["type"].annotation))).value: kind
    for name, kind in cast("dict[str, type[BaseModel]]", vars(schema)).items()
    if name.endswith("StreamingEvent")
}


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    family = FormatName.HERMES
    model = tiny_model(chat_template(family), marks_of(family))
    async with open_stage(model=model, store=with_store()) as opened:
        opened.say(TEXT)
        yield opened


async def create(stage: Stage, **asked: Any) -> dict[str, Any]:
    """Return a response, after its schema was checked, of a request and of its stream."""
    body = {"model": MODEL, **asked}
    async with httpx.AsyncClient(base_url=stage.base_url, verify=False) as client:
        answer = await client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        streamed = await client.post("/v1/responses", json={**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *parts, end, rest = streamed.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    events: list[dict[str, Any]] = []
    for part in parts:
        name, _, data = part.removeprefix("event: ").partition("\ndata: ")
        event = json.loads(data)
        assert event["type"] == name
        events.append(event)
        checked = {**event, "type": DEVIATIONS.get(name, name)}
        _EVENTS[checked["type"]].model_validate(checked)
    response = answer.json()
    schema.ResponseResource.model_validate(response)
    again = rebuilt(events)
    assert [item["type"] for item in again["output"]] == [item["type"] for item in response["output"]]
    return response


async def test_basic_text_and_its_stream(stage: Stage) -> None:
    response = await create(stage, input=[USER])
    assert response["status"] == "completed"
    assert response["output"][0]["content"][0]["text"] == TEXT


async def test_system_prompt(stage: Stage) -> None:
    system = {"type": "message", "role": "system", "content": "You are a pirate."}
    response = await create(stage, input=[system, {**USER, "content": "Say hello."}])
    assert response["output"]


async def test_tool_calling(stage: Stage) -> None:
    stage.say(CALL)
    asked = "What's the weather like in San Francisco?"
    response = await create(stage, input=[{**USER, "content": asked}], tools=[WEATHER])
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert response["output"][2]["name"] == "get_weather"


async def test_multi_turn_conversation(stage: Stage) -> None:
    said = {"type": "message", "role": "assistant", "content": "Hello Alice!"}
    turns = [{**USER, "content": "My name is Alice."}, said, {**USER, "content": "What is my name?"}]
    response = await create(stage, input=turns)
    assert response["output"]


async def test_function_call_round_trip(stage: Stage) -> None:
    stage.say(CALL.rpartition("</think>\n\nI look.\n")[2])
    asked: dict[str, Any] = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}}
    first = await create(stage, input=[{**USER, "content": "How warm is it in San Francisco?"}], **asked)
    (call,) = first["output"]
    assert (call["type"], call["name"]) == ("function_call", "get_weather")
    stage.say(TEXT)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"celsius": 18}'}
    second = await create(stage, input=[result], previous_response_id=first["id"], tools=[WEATHER])
    assert second["status"] == "completed"
    assert [item["type"] for item in second["output"]] == ["message"]


async def test_previous_response_id(stage: Stage) -> None:
    first = await create(stage, input="My name is Alice.")
    second = await create(stage, input="What is my name?", previous_response_id=first["id"])
    assert (second["status"], second["previous_response_id"]) == ("completed", first["id"])
    assert second["output"]
    assert "My name is Alice." in prompt_of(stage)


def of_user(part: dict[str, str]) -> dict[str, Any]:
    return {"input": [{**USER, "content": [part]}]}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (of_user({"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}), "'input_image'"),
        (of_user({"type": "input_file", "filename": "a.pdf", "file_data": "data:;base64,JVBERg=="}), "'input_file'"),
        ({"input": "Find it.", "tools": [{"type": "file_search", "vector_store_ids": ["v"]}]}, "'file_search'"),
        ({"input": "Find it.", "tools": [{"type": "web_search", "external_web_access": False}]}, "'web_search'"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(stage: Stage, asked: dict[str, Any], named: str) -> None:
    async with httpx.AsyncClient(base_url=stage.base_url, verify=False) as client:
        answer = await client.post("/v1/responses", json={"model": MODEL, **asked})
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]
