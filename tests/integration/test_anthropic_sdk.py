"""Anthropic's own SDK, unmodified and with strict validation, against a real server."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, ToolUseBlock
from baton_gateway.config import Settings
from baton_gateway.parsing.formats import FormatName
from msgspec import structs

from baton.errors import EngineFailed, Overloaded
from baton.messages.attempts import ConstraintKind, DecodeTask
from tests.harness.gateway.actors import CONTEXT_TOKENS, MODEL, tiny_model
from tests.harness.gateway.samples import chat_template, marks_of
from tests.harness.gateway.stage import Stage, forward, open_stage
from tests.integration.test_openai_tools import CALL, prompt_of

USER: Any = {"role": "user", "content": "Weather in Paris?"}
TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "The weather in a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
SETTINGS = Settings(port=0, body_bytes_max=100_000, admission_wait_s=0.3)


def connect(url: str, key: str = "none") -> anthropic.AsyncAnthropic:
    """Return a client that skips reading certificates, and refuses answers that are not of the SDK's types."""
    plain = anthropic.DefaultAsyncHttpxClient(verify=False)
    return anthropic.AsyncAnthropic(
        base_url=url, api_key=key, max_retries=0, http_client=plain, _strict_response_validation=True
    )


@asynccontextmanager
async def open_family(
    family: FormatName = FormatName.HERMES, settings: Settings = SETTINGS
) -> AsyncGenerator[tuple[Stage, anthropic.AsyncAnthropic]]:
    model = tiny_model(chat_template(family), marks_of(family))
    async with open_stage(settings, model=model) as stage, connect(stage.base_url) as client:
        yield stage, client


async def create(client: anthropic.AsyncAnthropic, **asked: Any) -> Message:
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": [USER], **asked}
    send: Any = client.messages.create
    return await send(**fields)


async def streamed(client: anthropic.AsyncAnthropic, **asked: Any) -> Message:
    """Return the message that the SDK makes of a stream."""
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": [USER], **asked}
    async with client.messages.stream(**fields) as stream:
        return await stream.get_final_message()


def plain(message: Message) -> dict[str, Any]:
    """Return the message without ids, which are unique."""
    described = message.model_dump(exclude_none=True)
    described.pop("id")
    for block in described["content"]:
        for name in ("id", "parsed_output"):
            block.pop(name, None)
    return described


async def test_a_message_streamed_and_whole() -> None:
    async with open_family() as (stage, client):
        stage.say("Hello wörld, 你好 😀!")
        stage.workers["d1"].script.cached_tokens = 5
        whole = await create(client)
        assert plain(whole) == {
            "type": "message",
            "role": "assistant",
            "model": MODEL,
            "content": [{"type": "text", "text": "Hello wörld, 你好 😀!"}],
            "stop_reason": "end_turn",
            "usage": {
                "input_tokens": len(stage_prompt(stage)) - 5,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 5,
                "output_tokens": len(stage.answer),
            },
        }
        assert whole.id.startswith("msg_")
        assert whole._request_id  # pyright: ignore[reportPrivateUsage]
        assert plain(await streamed(client)) == plain(whole)


def stage_prompt(stage: Stage) -> bytes:
    """Return one byte for each token of the newest prompt."""
    task = stage.workers["d1"].got(DecodeTask)[-1]
    assert isinstance(task, DecodeTask)
    return task.tokens[::4]


async def test_the_events_of_a_stream() -> None:
    async with open_family() as (stage, client):
        stage.say("<think>\nHm.\n</think>\n\nOk.\n" + CALL % "Paris")
        stream = await client.messages.create(model=MODEL, max_tokens=200, messages=[USER], tools=TOOLS, stream=True)
        kinds: list[str] = []
        async for event in stream:
            kind = event.type
            if event.type == "content_block_start":
                kind += " " + event.content_block.type
            if event.type == "content_block_delta":
                kind = event.delta.type
            if kinds[-1:] != [kind]:
                kinds.append(kind)
        assert kinds == [
            "message_start",
            *("content_block_start thinking", "thinking_delta", "signature_delta", "content_block_stop"),
            *("content_block_start text", "text_delta", "content_block_stop"),
            *("content_block_start tool_use", "input_json_delta", "content_block_stop"),
            *("message_delta", "message_stop"),
        ]
        async with httpx.AsyncClient(verify=False) as raw:
            body = {"model": MODEL, "max_tokens": 9, "messages": [USER], "stream": True}
            response = await raw.post(f"{stage.base_url}/v1/messages", json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.text.count('event: ping\ndata: {"type":"ping"}\n\n') == 1
        assert "[DONE]" not in response.text


async def test_a_loop_of_tools_with_thinking() -> None:
    async with open_family() as (stage, client):
        for ask in (create, streamed):
            stage.say("<think>\nHm.\n</think>\n\nI look.\n" + CALL % "Paris" + "\n" + CALL % "Rome")
            first = await ask(client, tools=TOOLS, system="Be brief.")
            assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
            assert first.stop_reason == "tool_use"
            used = [block for block in first.content if isinstance(block, ToolUseBlock)]
            assert [block.input for block in used] == [{"city": "Paris"}, {"city": "Rome"}]
            results: list[Any] = [
                {"type": "tool_result", "tool_use_id": block.id, "content": "sunny", "is_error": False}
                for block in used
            ]
            turns: list[Any] = [
                USER,
                {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
                {"role": "user", "content": results},
            ]
            stage.say("It is sunny.")
            last = await ask(client, messages=turns, tools=TOOLS, system="Be brief.")
            assert plain(last)["content"] == [{"type": "text", "text": "It is sunny."}]
            assert last.stop_reason == "end_turn"
            prompt = prompt_of(stage)
            assert "<|im_start|>system\nBe brief." in prompt
            assert 'get_weather{"city": "Rome"}' in prompt
            assert prompt.count("<|im_start|>tool\nsunny<|im_end|>") == 2


CHOICES: list[tuple[dict[str, Any], bool]] = [
    ({"type": "any"}, False),
    ({"type": "any", "disable_parallel_tool_use": True}, True),
    ({"type": "tool", "name": "get_weather"}, True),
]


@pytest.mark.parametrize(("choice", "one"), CHOICES, ids=range(len(CHOICES)))
async def test_a_forced_use_of_a_tool_moves_to_another_worker(choice: Any, one: bool) -> None:
    async with open_family() as (stage, client):
        await stage.add("d2")
        await forward(stage, "d2")
        stage.say(CALL % "Paris")
        whole = await create(client, tools=TOOLS, tool_choice=choice)
        (block,) = whole.content
        assert isinstance(block, ToolUseBlock)
        assert (block.name, block.input, whole.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
        task = stage.workers["d1"].got(DecodeTask)[-1]
        assert isinstance(task, DecodeTask)
        assert task.sampling.constraint is not None
        assert task.sampling.constraint.kind is ConstraintKind.STRUCTURAL_TAG
        assert json.loads(task.sampling.constraint.text)["format"]["elements"][-1]["stop_after_first"] == one
        stage.workers["d1"].script.fail_at = len(stage.answer) - 12
        assert plain(await streamed(client, tools=TOOLS, tool_choice=choice)) == plain(whole)
        assert len(stage.workers["d2"].got(DecodeTask)) == 1


async def test_no_tool_is_told_of_where_none_is_to_be_used() -> None:
    async with open_family() as (stage, client):
        stage.say("No.")
        await create(client, tools=TOOLS, tool_choice={"type": "none"})
        assert "get_weather" not in prompt_of(stage)


async def test_ends_of_messages() -> None:
    async with open_family() as (stage, client):
        stage.say("one two three")
        for ask in (create, streamed):
            stopped = await ask(client, stop_sequences=["zero", " three"])
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")
            assert plain(stopped)["content"] == [{"type": "text", "text": "one two"}]
            cut = await ask(client, max_tokens=2)
            assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
        stage.say("")
        for ask in (create, streamed):
            empty = await ask(client)
            assert (empty.content, empty.stop_reason) == ([], "end_turn")


async def test_a_bound_above_the_context_is_cut() -> None:
    async with open_family() as (stage, client):
        stage.say("ok")
        answer = await create(client, max_tokens=20_000)
        task = stage.workers["d1"].got(DecodeTask)[-1]
        assert isinstance(task, DecodeTask)
        assert task.sampling.max_tokens == CONTEXT_TOKENS - answer.usage.input_tokens


async def test_counting_tokens() -> None:
    async with open_family() as (stage, client):
        stage.say("ok")
        counted = await client.messages.count_tokens(model=MODEL, messages=[USER], tools=TOOLS, system="Be brief.")
        assert not stage.workers["d1"].got(DecodeTask)
        asked = await create(client, tools=TOOLS, system="Be brief.")
        assert counted.input_tokens == asked.usage.input_tokens


async def test_an_answer_that_the_request_begins_is_continued() -> None:
    async with open_family() as (stage, client):
        stage.say(" 42.")
        answer = await create(client, messages=[USER, {"role": "assistant", "content": "It is"}])
        assert plain(answer)["content"] == [{"type": "text", "text": " 42."}]
        assert prompt_of(stage).endswith("<|im_start|>assistant\nIt is")


async def test_models_with_anthropics_key_header() -> None:
    settings = structs.replace(SETTINGS, api_keys=("secret",))
    async with open_family(settings=settings) as (stage, _):
        stage.say("ok")
        async with connect(stage.base_url, "secret") as client:
            assert plain(await create(client))["content"] == [{"type": "text", "text": "ok"}]
        async with connect(stage.base_url, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await create(client)
        assert error_of(refused.value) == "authentication_error"


def error_of(error: anthropic.APIStatusError) -> str:
    """Check an error's form and return its type."""
    body: Any = error.response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], set(body["error"])) == ("error", {"type", "message"})
    assert body["request_id"] == error.response.headers["request-id"] == error.request_id
    return body["error"]["type"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
FAULTS: list[tuple[dict[str, Any], int, str]] = [
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error"),
    ({"system": [], "messages": [{"role": "system", "content": []}]}, 400, "invalid_request_error"),
    ({"model": "nope"}, 404, "not_found_error"),
    ({"system": "x" * 100_000}, 413, "request_too_large"),
    ({"extra_headers": {"x-baton-deadline-s": "soon"}}, 400, "invalid_request_error"),
    ({"extra_body": {"mcp_servers": [{}]}}, 400, "invalid_request_error"),
]


@pytest.mark.parametrize(("fields", "status", "kind"), FAULTS, ids=range(len(FAULTS)))
async def test_errors_in_anthropics_form(fields: dict[str, Any], status: int, kind: str) -> None:
    async with open_family() as (stage, client):
        with pytest.raises(anthropic.APIStatusError) as refused:
            await create(client, **fields)
        assert (refused.value.status_code, error_of(refused.value)) == (status, kind)
        assert not stage.workers["d1"].got(DecodeTask)


async def test_unknown_paths_and_methods_in_anthropics_form() -> None:
    async with open_family() as (stage, _), httpx.AsyncClient(base_url=stage.base_url, verify=False) as raw:
        missing = await raw.post("/v1/messages/batches", json={})
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
        wrong = await raw.get("/v1/messages")
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
        assert "error" in (await raw.get("/v1/nope")).json()


async def test_overload_and_failures_before_and_within_a_stream() -> None:
    async with open_family() as (stage, client):
        stage.scheduler.refusal = Overloaded("full", retry_after_s=3.0)
        for ask in (create, streamed):
            with pytest.raises(anthropic.APIStatusError) as refused:
                await ask(client)
            assert (refused.value.status_code, error_of(refused.value)) == (529, "overloaded_error")
            assert refused.value.response.headers["retry-after"] == "3"
        stage.scheduler.refusal = None
        stage.say("one two three four")
        stage.workers["d1"].script.fail_at = 2
        stage.workers["d1"].script.failure = EngineFailed("broken")
        seen: list[str] = []
        with pytest.raises(anthropic.APIStatusError) as failed:
            async with client.messages.stream(
                model=MODEL, max_tokens=200, messages=[USER], extra_body={"temperature": 1, "seed": 1}
            ) as stream:
                seen += [event.type async for event in stream]
        body: Any = failed.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "api_error"), body


async def test_sampling_and_engine_parameters() -> None:
    async with open_family() as (stage, client):
        stage.say("ok")
        others = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "guided_choice": ["ok"]}
        await create(client, extra_body=others, system=[], messages=[{"role": "system", "content": []}, USER])
        task = stage.workers["d1"].got(DecodeTask)[-1]
        assert isinstance(task, DecodeTask)
        sampling = task.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.9, 7, 200)
        assert set(sampling.extensions) == {"guided_choice"}
        assert "<|im_start|>system" not in prompt_of(stage)
