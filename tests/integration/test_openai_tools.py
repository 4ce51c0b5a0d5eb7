"""Tools and reasoning with OpenAI's own SDK: each family's format over HTTP, streamed and whole."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from baton_gateway.config import Settings
from baton_gateway.detokenise import Vocabulary
from baton_gateway.parsing.formats import FormatName
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam, ChatCompletionToolParam

from baton.messages.attempts import ConstraintKind, DecodeTask
from baton.messages.base import unpack_tokens
from tests.harness.gateway.actors import CHAT_TEMPLATE, MODEL, tiny_model
from tests.harness.gateway.samples import FAMILIES, chat_template, marks_of, samples_of
from tests.harness.gateway.stage import Stage, forward, open_stage
from tests.integration.test_openai_sdk import connect

USER: ChatCompletionMessageParam = {"role": "user", "content": "Weather in Paris?"}
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'


@asynccontextmanager
async def open_family(family: FormatName = FormatName.HERMES) -> AsyncGenerator[tuple[Stage, openai.AsyncOpenAI]]:
    model = tiny_model(chat_template(family), marks_of(family))
    async with open_stage(model=model) as stage, connect(stage.base_url) as client:
        yield stage, client


async def complete(client: openai.AsyncOpenAI, **asked: Any) -> ChatCompletion:
    create: Any = client.chat.completions.create
    return await create(model=MODEL, **asked)


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> ChatCompletion:
    """Return the answer that OpenAI's SDK makes of a stream."""
    async with client.chat.completions.stream(model=MODEL, **asked) as stream:
        return await stream.get_final_completion()


def message_of(answer: ChatCompletion) -> dict[str, Any]:
    """Return the message without the ids of its calls, which are unique."""
    message = answer.choices[0].message.model_dump(exclude_none=True)
    for call in message.get("tool_calls", []):
        call.pop("id")
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    message.pop("parsed", None)
    return {key: value for key, value in message.items() if value}


@pytest.mark.parametrize("published", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family is not FormatName.THINK])
async def test_every_family_streamed_and_whole(family: FormatName, published: bool) -> None:
    async with open_family(family) as (stage, client):
        for sample in samples_of(family):
            if sample.prefix or bool(sample.source) != published:
                continue
            stage.say(sample.text)
            tools: list[Any] = [{"type": "function", "function": tool} for tool in sample.tools] or [*TOOLS]
            whole = await complete(client, messages=[USER], tools=tools)
            message = whole.choices[0].message
            called = [call.function for call in message.tool_calls or [] if call.type == "function"]
            assert [(call.name, json.loads(call.arguments)) for call in called] == sample.calls, sample.name
            assert message.content == (sample.content or (None if sample.calls else "")), sample.name
            assert (message.model_extra or {}).get("reasoning_content", "") == sample.reasoning
            assert whole.choices[0].finish_reason == ("tool_calls" if sample.calls else "stop")
            assert whole.usage is not None
            assert whole.usage.completion_tokens == len(stage.answer)
            assert message_of(await streamed(client, messages=[USER], tools=tools)) == message_of(whole), sample.name


async def test_a_loop_of_calls_and_results() -> None:
    async with open_family() as (stage, client):
        stage.say("I look.\n" + CALL % "Paris" + "\n" + CALL % "Rome")
        messages: list[Any] = [USER]
        first = await streamed(client, messages=messages, tools=TOOLS)
        called = first.choices[0].message.tool_calls or []
        assert len({call.id for call in called}) == 2
        messages.append(first.choices[0].message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in called]
        stage.say("It is sunny.")
        last = await complete(client, messages=messages, tools=TOOLS)
        assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("It is sunny.", "stop")
        prompt = prompt_of(stage)
        assert '"description": "The weather in a city."' in prompt
        assert 'get_weather{"city": "Rome"}' in prompt
        assert prompt.count("<|im_start|>tool\nsunny<|im_end|>") == 2


async def test_a_call_continues_on_another_worker() -> None:
    async with open_family() as (stage, client):
        await stage.add("d2")
        await forward(stage, "d2")
        stage.say("I look.\n" + CALL % "Paris")
        undisturbed = await streamed(client, messages=[USER], tools=TOOLS)
        stage.workers["d1"].script.fail_at = len(stage.answer) - 12
        resumed = await streamed(client, messages=[USER], tools=TOOLS)
        assert message_of(resumed) == message_of(undisturbed)
        assert resumed.choices[0].finish_reason == "tool_calls"
        assert len(stage.workers["d2"].got(DecodeTask)) == 1


async def test_choices_have_calls_of_their_own_and_log_probabilities_of_all_tokens() -> None:
    async with open_family() as (stage, client):
        stage.say("Ok.\n" + CALL % "Paris")
        asked: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "n": 2, "logprobs": True}
        whole = await complete(client, **asked)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 2 * len(stage.answer)
        for answer in (whole, await streamed(client, **asked)):
            calls = [call for choice in answer.choices for call in choice.message.tool_calls or []]
            assert len({call.id for call in calls}) == 2
            for choice in answer.choices:
                assert choice.logprobs is not None
                assert len(choice.logprobs.content or []) == len(stage.answer)


async def test_one_call_where_parallel_calls_are_not_wanted() -> None:
    async with open_family() as (stage, client):
        stage.say(CALL % "Paris" + CALL % "Rome")
        answer = await streamed(client, messages=[USER], tools=TOOLS, parallel_tool_calls=False)
        (call,) = message_of(answer)["tool_calls"]
        assert call["function"]["arguments"] == '{"city": "Paris"}'


async def test_without_a_choice_of_tools_the_model_is_told_of_none() -> None:
    async with open_family() as (stage, client):
        stage.say(CALL % "Paris")
        answer = await complete(client, messages=[USER], tools=TOOLS, tool_choice="none")
        assert answer.choices[0].message.content == CALL % "Paris"
        assert answer.choices[0].finish_reason == "stop"
        assert "get_weather" not in prompt_of(stage)


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_forced_call_is_enforced_by_the_engine(choice: Any) -> None:
    async with open_family() as (stage, client):
        await stage.add("d2")
        await forward(stage, "d2")
        stage.say(CALL % "Paris")
        asked: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "tool_choice": choice}
        whole = await complete(client, **asked)
        assert whole.choices[0].finish_reason == "tool_calls"
        (call,) = message_of(whole)["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        task = stage.workers["d1"].got(DecodeTask)[-1]
        assert isinstance(task, DecodeTask)
        assert task.sampling.constraint is not None
        assert task.sampling.constraint.kind is ConstraintKind.STRUCTURAL_TAG
        enforced = json.loads(task.sampling.constraint.text)["format"]["elements"][-1]
        assert enforced["stop_after_first"] == (choice is NAMED)
        assert [tag["begin"] for tag in enforced["tags"]] == ['<tool_call>\n{"name": "get_weather", "arguments": ']
        stage.workers["d1"].script.fail_at = len(stage.answer) - 12
        assert message_of(await streamed(client, **asked)) == message_of(whole)
        (resumed,) = stage.workers["d2"].got(DecodeTask)
        assert isinstance(resumed, DecodeTask)
        assert resumed.sampling.constraint == task.sampling.constraint
        assert resumed.sampling.delivered_tokens > 0


async def test_a_forced_call_in_python_syntax() -> None:
    async with open_family(FormatName.LLAMA4_PYTHONIC) as (stage, client):
        stage.say('[get_weather(city="Paris")]')
        whole = await complete(client, messages=[USER], tools=TOOLS, tool_choice="required")
        (call,) = message_of(whole)["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        task = stage.workers["d1"].got(DecodeTask)[-1]
        assert isinstance(task, DecodeTask)
        assert task.sampling.constraint is not None
        before, calls, after = json.loads(task.sampling.constraint.text)["format"]["elements"]
        assert [before["value"], calls["tags"][0]["begin"], after["value"]] == ["[", "get_weather(", "]"]


JSON_ANSWER = '{"say": "<tool_call>\\n{}</tool_call>"}'


@pytest.mark.parametrize("text", [CALL % "Paris", JSON_ANSWER, "1"])
async def test_beside_tools_a_json_schema_holds_for_answers_without_calls(text: str) -> None:
    async with open_family() as (stage, client):
        stage.say(text)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        asked: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "response_format": form}
        whole = await complete(client, **asked)
        task = stage.workers["d1"].got(DecodeTask)[-1]
        assert isinstance(task, DecodeTask)
        assert task.sampling.constraint is not None
        calls, schema = json.loads(task.sampling.constraint.text)["format"]["elements"]
        assert calls["elements"][-1]["at_least_one"]
        assert schema == {"type": "json_schema", "json_schema": {"type": "object"}}
        if text.startswith("<tool_call>"):
            assert message_of(whole)["tool_calls"]
            assert whole.choices[0].finish_reason == "tool_calls"
        else:
            assert message_of(whole) == {"role": "assistant", "content": text}
            assert whole.choices[0].finish_reason == "stop"
        assert message_of(await streamed(client, **asked)) == message_of(whole)


@pytest.mark.parametrize(
    ("family", "param", "fields"),
    [
        (FormatName.LLAMA4_PYTHONIC, "tools", {"response_format": {"type": "json_object"}}),
        (
            FormatName.LLAMA4_PYTHONIC,
            "tools[1].function.name",
            {"tools": [*TOOLS, {"type": "function", "function": {"name": "a-b"}}], "tool_choice": "required"},
        ),
        (FormatName.LLAMA_JSON, "tools", {"response_format": {"type": "json_object"}}),
    ],
)
async def test_formats_in_which_calls_cannot_be_enforced(
    family: FormatName, param: str, fields: dict[str, Any]
) -> None:
    async with open_family(family) as (stage, client):
        with pytest.raises(openai.BadRequestError) as refused:
            await complete(client, messages=[USER], **{"tools": TOOLS} | fields)
        assert refused.value.param == param
        assert ("constraint" in refused.value.message) == ("response_format" in fields)
        assert not stage.workers["d1"].got(DecodeTask)


async def test_a_call_that_is_cut_off_is_content() -> None:
    async with open_family() as (stage, client):
        stage.say(CALL % "Paris")
        answer = await complete(client, messages=[USER], tools=TOOLS, max_tokens=len(stage.answer) // 2)
        assert (answer.choices[0].message.content or "").startswith("<tool_call>\n{")
        assert answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "length"


async def test_a_stop_string_ends_a_call_before_it_is_parsed() -> None:
    async with open_family() as (stage, client):
        stage.say("Ok. " + CALL % "Paris")
        answer = await streamed(client, messages=[USER], tools=TOOLS, stop=["<tool_call>"])
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Ok. ", "stop")


async def test_reasoning_needs_no_tools() -> None:
    async with open_family(FormatName.THINK) as (stage, client):
        stage.say("<think>\nHm.\n</think>\n\n4")
        for answer in (
            await complete(client, messages=[USER]),
            await streamed(client, messages=[USER]),
        ):
            assert message_of(answer) == {"role": "assistant", "content": "4", "reasoning_content": "Hm."}
        usage = (await complete(client, messages=[USER])).usage
        assert usage is not None
        assert usage.completion_tokens_details is not None
        assert 0 < (usage.completion_tokens_details.reasoning_tokens or 0) < usage.completion_tokens


FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels - 1):
        schema = {"a": schema}
    return schema


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**FUNCTION, **function}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [tool()] * 10_000}, "tools"),
    ({"tools": [tool(), tool()]}, "tools[1].function.name"),
    ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
    ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters=nested(65))]}, "tools[0].function.parameters" + ".a" * 64),
    ({"tools": [tool(parameters={"a": "x" * (256 << 10)})]}, "tools[0].function.parameters"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [tool(parameters={"not": {}})], "tool_choice": "required"}, "tools[0].function.parameters.not"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": allowed("any", "get_weather")}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": allowed("auto", "get_weather", "other")}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"messages": [USER, {"role": "user", "content": "x", "tool_calls": [CALLED]}]}, "messages[1].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALLED] * 129}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=range(len(REFUSED)))
async def test_tools_that_are_refused(fields: dict[str, Any], param: str) -> None:
    async with open_family() as (stage, client):
        asked = {"messages": [USER], **fields}
        with pytest.raises(openai.BadRequestError) as refused:
            await complete(client, **asked)
        assert refused.value.param == param
        assert not stage.workers["d1"].got(DecodeTask)


async def test_schemas_at_the_limits_reach_the_prompt() -> None:
    async with open_family() as (stage, client):
        long = "x" * ((256 << 10) - len('{"a":""}'))
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await complete(
                client,
                messages=[USER],
                tools=[tool(parameters={"a": long})],
            )
        await complete(
            client,
            messages=[USER],
            tools=[tool(parameters=nested(64))],
        )
        assert '{"a": ' * 63 in prompt_of(stage)


@pytest.mark.parametrize(
    ("template", "format_name", "said"),
    [
        (CHAT_TEMPLATE, FormatName.AUTO, "--answer-format"),
        (CHAT_TEMPLATE, FormatName.HERMES, "takes no tools"),
        (chat_template(FormatName.HERMES), FormatName.NONE, "--answer-format"),
    ],
)
async def test_a_model_without_tools_says_so(
    template: str, format_name: FormatName, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = tiny_model(template, answer_format=format_name)
    async with open_stage(Settings(port=0), model=model) as stage, connect(stage.base_url) as client:
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            await complete(client, messages=[USER], tools=TOOLS)
        assert refused.value.param == "tools"
        stage.say(CALL % "Paris")
        answer = await complete(client, messages=[USER])
        assert answer.choices[0].message.content == CALL % "Paris"
    is_known = format_name is FormatName.HERMES
    assert caplog.text.count("answer format hermes" if is_known else "no known format") == 1


async def test_calls_in_the_history_need_a_template_that_shows_them() -> None:
    async with open_stage() as stage, connect(stage.base_url) as client:
        messages: list[Any] = [USER, {"role": "assistant", "content": "", "tool_calls": [CALLED]}]
        with pytest.raises(openai.BadRequestError, match="shows no tool calls") as refused:
            await complete(client, messages=messages)
        assert refused.value.param == "messages[1].tool_calls"


def prompt_of(stage: Stage) -> str:
    """Return the text of the newest task's prompt."""
    task = stage.workers["d1"].got(DecodeTask)[-1]
    assert isinstance(task, DecodeTask)
    vocabulary = Vocabulary(stage.tokenizer.facts.spellings)
    return "".join(map(vocabulary.detokeniser(skip_special=False).feed, unpack_tokens(task.tokens)))
