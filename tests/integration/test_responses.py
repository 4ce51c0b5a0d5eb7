"""/v1/responses with OpenAI's own SDK, which validates every answer and event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from baton_gateway.config import Settings
from baton_gateway.parsing.formats import FormatName
from baton_gateway.responses.store import Key, MemoryStore
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseReasoningItem

from baton.clock import SystemClock
from baton.messages.attempts import Cancel, DecodeTask
from tests.harness.gateway.actors import MODEL, tiny_model
from tests.harness.gateway.responses import rebuilt, strict_client, with_store
from tests.harness.gateway.samples import chat_template, marks_of
from tests.harness.gateway.stage import Stage, forward, open_stage
from tests.integration.test_openai_tools import prompt_of

HELLO = "Hello wörld, 你好 😀! And then it stops."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": False,
    }
]
Pair = tuple[Stage, openai.AsyncOpenAI]

# The first use of the SDK's types builds them, for seconds of processor time.


@asynccontextmanager
async def opened(settings: Settings | None = None, *, stores: bool = True) -> AsyncGenerator[Pair]:
    family = FormatName.HERMES
    model = tiny_model(chat_template(family), marks_of(family))
    store = with_store() if stores else None
    async with open_stage(settings, model=model, store=store) as stage, strict_client(stage.base_url) as client:
        stage.say(HELLO)
        yield stage, client


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with opened() as made:
        yield made


async def create(client: openai.AsyncOpenAI, **asked: Any) -> Response:
    made: Any = client.responses.create
    return await made(**{"model": MODEL, "input": "hi", **asked})


async def stream(client: openai.AsyncOpenAI, **asked: Any) -> list[dict[str, Any]]:
    """Return the events of a new response."""
    made: Any = client.responses.create
    answer = await made(**{"model": MODEL, "input": "hi", **asked}, stream=True)
    return [event.model_dump() async for event in answer]


async def resumed(client: openai.AsyncOpenAI, response: str, after: int | None = None) -> list[dict[str, Any]]:
    """Return the stored events of a response."""
    given: dict[str, Any] = {} if after is None else {"starting_after": after}
    answer = await client.responses.retrieve(response, stream=True, **given)
    return [event.model_dump() async for event in answer]


def bare(response: Any) -> dict[str, Any]:
    """Return a response without what differs from request to request."""
    fields = json.loads(json.dumps(response if isinstance(response, dict) else response.model_dump()))
    for name in ("id", "created_at", "completed_at", "background"):
        fields.pop(name, None)
    for item in fields["output"]:
        for name in ("id", "call_id"):
            item.pop(name, None)
    return fields


async def test_a_response(pair: Pair) -> None:
    stage, client = pair
    stage.workers["d1"].script.cached_tokens = 7
    response = await create(client, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
    assert response.output_text == HELLO
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert response.usage is not None
    assert response.usage.output_tokens == len(stage.answer)
    assert response.usage.input_tokens_details.cached_tokens == 7
    assert prompt_of(stage).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>")
    again = await client.responses.retrieve(response.id)
    assert again.model_dump() == response.model_dump()


async def test_streamed_equals_whole_and_is_stored(pair: Pair) -> None:
    stage, client = pair
    stage.say("<think>\nHm, a city.\n</think>\n\nI look.\n" + CALL % "Paris" + "\n" + CALL % "Rome")
    whole = await create(client, tools=TOOLS)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    events = await stream(client, tools=TOOLS)
    response = rebuilt(events)
    assert bare(response) == bare(whole)
    assert (await client.responses.retrieve(response["id"])).model_dump() == response
    reasoning, _, first, second = whole.output
    assert isinstance(reasoning, ResponseReasoningItem)
    assert [part.text for part in reasoning.content or []] == ["Hm, a city."]
    calls = [call for call in (first, second) if isinstance(call, ResponseFunctionToolCall)]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
    assert whole.usage is not None
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens


async def test_a_loop_of_calls_over_stored_responses(pair: Pair) -> None:
    stage, client = pair
    stage.say("<think>\nHm.\n</think>\n\nI look.\n" + CALL % "Paris")
    first = await create(client, tools=TOOLS, input=[{"role": "user", "content": "Weather in Paris?"}])
    (call,) = [item for item in first.output if isinstance(item, ResponseFunctionToolCall)]
    stage.say("It is sunny.")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = await create(client, tools=TOOLS, input=[output], previous_response_id=first.id)
    assert (second.output_text, second.previous_response_id) == ("It is sunny.", first.id)
    stage.say("You are welcome.")
    third = await create(client, input="Thanks.", previous_response_id=second.id, tools=TOOLS)
    assert third.output_text == "You are welcome."
    chained = prompt_of(stage)
    # The same conversation, sent whole.
    given = [
        {"role": "user", "content": "Weather in Paris?"},
        *(item.model_dump(exclude_none=True) for item in first.output),
        output,
        *(item.model_dump(exclude_none=True) for item in second.output),
        {"role": "user", "content": "Thanks."},
    ]
    again = await create(client, input=given, tools=TOOLS)
    assert prompt_of(stage) == chained
    listed = [item async for item in client.responses.input_items.list(again.id, order="asc", limit=2)]
    assert [item.type for item in listed] == [item.get("type", "message") for item in given]
    newest = [item async for item in client.responses.input_items.list(third.id)]
    assert [item.type for item in newest] == ["message"]


async def test_structured_text_and_log_probabilities(pair: Pair) -> None:
    stage, client = pair
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    stage.say('{"a": 1}')
    text = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    response = await create(
        client, text=text, top_logprobs=2, include=["message.output_text.logprobs", "reasoning.encrypted_content"]
    )
    assert response.output_text == '{"a": 1}'
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    task = stage.workers["d1"].got(DecodeTask)[-1]
    assert isinstance(task, DecodeTask)
    assert task.sampling.constraint is not None
    message = response.output[0].model_dump()
    assert b"".join(bytes(each["bytes"]) for each in message["content"][0]["logprobs"]).startswith(b'{"a": 1}')
    events = await stream(client, text=text, top_logprobs=2)
    assert bare(rebuilt(events)) == bare(response)


async def test_an_answer_that_is_cut_is_incomplete(pair: Pair) -> None:
    _, client = pair
    response = await create(client, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert HELLO.startswith(response.output_text)
    events = await stream(client, max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"
    assert bare(rebuilt(events)) == bare(response)


async def test_a_background_response_is_followed_from_every_event(pair: Pair) -> None:
    stage, client = pair
    stage.say("<think>\nHm.\n</think>\n\nI look.\n" + CALL % "Paris")
    stage.workers["d1"].script.interval_s = 0.01
    events = await stream(client, background=True, tools=TOOLS)
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    response = rebuilt(events)
    assert response["status"] == "completed"
    assert bare(response) == bare(await create(client, tools=TOOLS))
    assert await resumed(client, response["id"]) == events
    for event in events:
        number = event["sequence_number"]
        assert await resumed(client, response["id"], number) == events[number + 1 :]


async def test_a_background_response_is_polled(pair: Pair) -> None:
    stage, client = pair
    stage.workers["d1"].script.interval_s = 0.01
    response = await create(client, background=True)
    assert (response.status, response.output) == ("queued", [])
    while response.status in ("queued", "in_progress"):
        await asyncio.sleep(0.02)
        response = await client.responses.retrieve(response.id)
    assert (response.status, response.output_text) == ("completed", HELLO)
    with pytest.raises(openai.BadRequestError, match="`background` and `stream`"):
        await resumed(client, response.id)
    with pytest.raises(openai.BadRequestError, match="is completed"):
        await client.responses.cancel(response.id)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_cancelled_response_keeps_what_was_generated(pair: Pair, streams: bool) -> None:
    stage, client = pair
    stage.workers["d1"].script.stall_at = 5
    if streams:
        made: Any = client.responses.create
        answer = await made(model=MODEL, input="hi", background=True, stream=True)
        first = await anext(aiter(answer))
        name = first.response.id
        await answer.close()
    else:
        name = (await create(client, background=True)).id
    await stage.wait_for(lambda: any(len(each.tokens) == 5 for each in stage.workers["d1"].attempts.values()))
    if streams:
        await stage.wait_for(lambda: True)
        answer = await client.responses.retrieve(name, stream=True)
        async for event in answer:
            if event.type == "response.output_text.delta":
                break
        await answer.close()
    cancelled = await client.responses.cancel(name)
    assert cancelled.status == "cancelled"
    assert HELLO.startswith(cancelled.output_text)
    assert cancelled.output_text
    await stage.wait_for(lambda: stage.workers["d1"].got(Cancel))
    assert (await client.responses.cancel(name)).model_dump() == cancelled.model_dump()
    if streams:
        events = await resumed(client, name)
        assert rebuilt(events) == cancelled.model_dump()
        assert events[-1]["type"] == "response.incomplete"


async def test_a_client_that_leaves_cancels_its_response(pair: Pair) -> None:
    stage, client = pair
    stage.workers["d1"].script.stall_at = 5
    made: Any = client.responses.create
    answer = await made(model=MODEL, input="hi", stream=True)
    first = await anext(aiter(answer))
    await answer.close()
    await stage.wait_for(lambda: stage.workers["d1"].got(Cancel))
    response = await client.responses.retrieve(first.response.id)
    while response.status == "in_progress":
        await asyncio.sleep(0.02)
        response = await client.responses.retrieve(first.response.id)
    assert response.status == "cancelled"
    assert HELLO.startswith(response.output_text)


async def test_deleted_responses_are_gone(pair: Pair) -> None:
    stage, client = pair
    response = await create(client)
    await client.responses.delete(response.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            await ask(response.id)
    with pytest.raises(openai.BadRequestError) as refused:
        await create(client, previous_response_id=response.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    stage.workers["d1"].script.stall_at = 5
    running = await create(client, background=True)
    await stage.wait_for(lambda: stage.workers["d1"].attempts)
    with pytest.raises(openai.ConflictError, match="still being generated"):
        await create(client, previous_response_id=running.id)
    await client.responses.delete(running.id)
    await stage.wait_for(lambda: stage.workers["d1"].got(Cancel))
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(running.id)


class Repeating(MemoryStore):
    """A store whose client asks again, as it does where the connection breaks before the answer."""

    async def delete(self, key: Key) -> bool:
        await super().delete(key)
        return await super().delete(key)


async def test_a_deletion_that_is_carried_out_twice_succeeds() -> None:
    store = Repeating(SystemClock(), ttl_s=60.0, bytes_max=1 << 20)
    async with open_stage(Settings(port=0), store=store) as stage, strict_client(stage.base_url) as client:
        stage.say(HELLO)
        response = await create(client)
        await client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(response.id)


async def test_a_conversation_ends_where_one_of_its_responses_is_deleted(pair: Pair) -> None:
    _, client = pair
    first = await create(client)
    middle = await create(client, previous_response_id=first.id)
    last = await create(client, previous_response_id=middle.id)
    await client.responses.delete(middle.id)
    assert (await client.responses.retrieve(last.id)).output_text == HELLO
    with pytest.raises(openai.BadRequestError) as refused:
        await create(client, previous_response_id=last.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    assert f"`{middle.id}` is not stored (any more), and `{last.id}` continues it" in refused.value.message
    branch = await create(client, previous_response_id=first.id)
    assert branch.output_text == HELLO


async def test_what_is_not_stored(pair: Pair) -> None:
    _, client = pair
    response = await create(client, store=False)
    assert response.output_text == HELLO
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError, match="`background` needs `store`"):
        await create(client, store=False, background=True)


async def test_tenants_do_not_see_each_others_responses() -> None:
    settings = Settings(port=0, api_keys=("one", "two"))
    async with open_stage(settings, store=with_store()) as stage:
        stage.say(HELLO)
        async with strict_client(stage.base_url, "one") as one, strict_client(stage.base_url, "two") as two:
            response = await create(one)
            for ask in (two.responses.retrieve, two.responses.delete, two.responses.input_items.list):
                with pytest.raises(openai.NotFoundError):
                    await ask(response.id)
            with pytest.raises(openai.BadRequestError):
                await create(two, previous_response_id=response.id)
            assert (await one.responses.retrieve(response.id)).output_text == HELLO


async def test_without_a_store_only_what_needs_it_is_refused() -> None:
    async with opened(stores=False) as (_, client):
        response = await create(client)
        assert (response.output_text, (response.model_extra or {})["store"]) == (HELLO, False)
        rebuilt(await stream(client))
        for asked in ({"store": True}, {"background": True}, {"previous_response_id": "resp_1"}):
            with pytest.raises(openai.BadRequestError, match="no Redis"):
                await create(client, **asked)
        with pytest.raises(openai.BadRequestError, match="no Redis"):
            await client.responses.retrieve("resp_1")


async def test_a_failure_before_the_first_event_is_an_answer_of_its_own(pair: Pair) -> None:
    stage, client = pair
    for streams in (False, True):
        stage.workers["d1"].alive = False
        with pytest.raises(openai.NotFoundError):
            await create(client, model="unknown", stream=streams)
        stage.workers["d1"].alive = True


async def test_a_failure_in_the_middle_is_an_event(pair: Pair) -> None:
    stage, client = pair
    stage.workers["d1"].script.fail_at = 5
    events = await stream(client, extra_body={"seed": 1})
    assert events[-1]["type"] == "response.failed"
    response = rebuilt(events)
    assert response["status"] == "failed"
    assert response["error"]["code"] == "server_error"
    assert (await client.responses.retrieve(response["id"])).status == "failed"


@pytest.mark.parametrize("background", [False, True])
async def test_a_silent_stream_begins_and_is_kept_alive(background: bool) -> None:
    async with opened(Settings(port=0, stream_keep_alive_s=0.05)) as (stage, _):
        stage.workers["d1"].script.silent = True
        body = {"model": MODEL, "input": "hi", "stream": True, "background": background}
        async with (
            httpx.AsyncClient(base_url=stage.base_url, verify=False) as client,
            client.stream("POST", "/v1/responses", json=body) as answer,
        ):
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            assert await anext(lines) == "event: response.created"
            while await anext(lines) != ": keep-alive":
                pass


async def test_an_answer_whose_stream_began_in_silence_does_not_start_over() -> None:
    async with opened(Settings(port=0, stream_keep_alive_s=0.05)) as (stage, client):
        await stage.add("d2")
        await forward(stage, "d2")
        script = stage.workers["d1"].script
        script.tokens_per_frame, script.interval_s, script.fail_at = 0, 0.02, 5
        made: Any = client.responses.create
        answer = await made(model=MODEL, input="hi", stream=True, extra_body={"seed": 1})
        first = [(await anext(answer)).model_dump()]
        script.tokens_per_frame = 1
        events = first + [event.model_dump() async for event in answer]
    assert rebuilt(events)["status"] == "failed", "the client has seen a part of it"


async def test_a_response_continues_on_another_worker(pair: Pair) -> None:
    stage, client = pair
    await stage.add("d2")
    await forward(stage, "d2")
    undisturbed = rebuilt(await stream(client))
    stage.workers["d1"].script.fail_at = 5
    assert bare(rebuilt(await stream(client))) == bare(undisturbed)
    background = await stream(client, background=True)
    assert bare(rebuilt(background)) == bare(undisturbed)


async def test_truncation_leaves_out_the_oldest_turns(pair: Pair) -> None:
    stage, client = pair
    long = [{"role": "user", "content": f"turn {turn} " + "x" * 3000} for turn in range(12)]
    with pytest.raises(openai.BadRequestError) as refused:
        await create(client, input=long)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    response = await create(client, input=long, truncation="auto", instructions="Be brief.")
    assert response.truncation == "auto"
    prompt = prompt_of(stage)
    assert "Be brief." in prompt
    assert "turn 0 " not in prompt
    assert "turn 11 " in prompt


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": 5}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    (
        {"input": [{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "c", "name": "f",
                                                     "arguments": "{"}]},
        "input[1].arguments",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "no"}}}}, "text.format.schema.type"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"max_output_tokens": 1 << 30}, "max_output_tokens"),
    ({"include": ["web_search_call.results"]}, "include"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"extra_body": {"conversation": "conv_1"}}, "conversation"),
    ({"extra_body": {"prompt": {"id": "pmpt_1"}}}, "prompt"),
    ({"extra_body": {"n": 2}}, "n"),
    ({"extra_body": {"messages": []}}, "messages"),
    ({"extra_body": {"background": "yes"}}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "param"), REFUSED, ids=range(len(REFUSED)))
async def test_requests_that_are_refused(asked: dict[str, Any], param: str) -> None:
    async with opened() as (stage, client):
        with pytest.raises(openai.BadRequestError) as refused:
            await create(client, **asked)
        assert refused.value.param == param
        assert not stage.workers["d1"].got(DecodeTask)
