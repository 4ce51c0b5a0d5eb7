"""Fields beyond OpenAI's and the paths beside the two of generation, over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from baton_gateway.config import Settings
from msgspec import structs

from baton.messages.attempts import DecodeTask
from baton.messages.base import unpack_tokens
from tests.harness.gateway.actors import CONTEXT_TOKENS, MODEL
from tests.harness.gateway.stage import Stage, open_stage
from tests.harness.limits import HANG_S
from tests.integration.test_openai_errors import error_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "the quick brown fox", "temperature": 0}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ documents | length if documents else '' }}"


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with open_stage(Settings(port=0, admission_wait_s=0.3)) as opened:
        opened.say("jumps over")
        yield opened


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S, verify=False) as opened:
        yield opened


def task_of(stage: Stage) -> DecodeTask:
    """Return the task that the worker got last."""
    task = stage.workers["d1"].got(DecodeTask)[-1]
    assert isinstance(task, DecodeTask)
    return task


def prompt_of(stage: Stage) -> list[int]:
    return list(unpack_tokens(task_of(stage).tokens))


def chunks_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


async def ids_of(client: httpx.AsyncClient, text: str) -> list[int]:
    return (await client.post("/tokenize", json={"model": MODEL, "prompt": text})).json()["tokens"]


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("side", [None, "left", "right"])
async def test_a_prompt_is_cut(stage: Stage, client: httpx.AsyncClient, side: str | None) -> None:
    ids = await ids_of(client, TEXT["prompt"])
    fields = {"truncate_prompt_tokens": 2} | ({"truncation_side": side} if side else {})
    for prompt in (TEXT["prompt"], ids):
        answer = (await client.post(COMPLETIONS, json={**TEXT, "prompt": prompt, **fields})).json()
        assert answer["usage"]["prompt_tokens"] == 2
        assert prompt_of(stage) == (ids[:2] if side == "right" else ids[-2:])


async def test_a_prompt_longer_than_the_context_is_cut_to_fit(stage: Stage, client: httpx.AsyncClient) -> None:
    body = {**TEXT, "prompt": [5] * (2 * CONTEXT_TOKENS), "truncate_prompt_tokens": -1}
    answer = (await client.post(COMPLETIONS, json=body)).json()
    assert answer["usage"]["prompt_tokens"] == CONTEXT_TOKENS - 1
    assert answer["usage"]["completion_tokens"] == 1
    long = {**HI, "messages": [{"role": "user", "content": "fox " * CONTEXT_TOKENS * 20}]}
    error_of(await client.post(CHAT, json=long), 400, "context_length_exceeded")
    assert (await client.post(CHAT, json={**long, "truncate_prompt_tokens": 9})).json()["usage"]["prompt_tokens"] == 9
    beyond = {**TEXT, "truncate_prompt_tokens": CONTEXT_TOKENS + 1}
    assert error_of(await client.post(COMPLETIONS, json=beyond), 400, "context_length_exceeded")["param"] == (
        "truncate_prompt_tokens"
    )


async def test_a_template_in_a_request_needs_permission(stage: Stage, client: httpx.AsyncClient) -> None:
    own = {**HI, "chat_template": TEMPLATE, "documents": [{"title": "a", "text": "b"}]}
    error = error_of(await client.post(CHAT, json=own), 400, "invalid_request")
    assert (error["param"], "--trust-request-chat-template" in error["message"]) == ("chat_template", True)
    refused = {"model": MODEL, "messages": HI["messages"], "chat_template": TEMPLATE}
    assert error_of(await client.post("/tokenize", json=refused), 400, "invalid_request")["param"] == "chat_template"
    stage.gateway.settings = structs.replace(stage.gateway.settings, trust_request_chat_template=True)
    assert (await client.post(CHAT, json=own)).status_code == 200
    assert stage.tokenizer.decode(prompt_of(stage)) == "hi1"


@pytest.mark.parametrize("template", ["{{ 1 +", "{% for a in b %}", "{{ x.__class__.__mro__ }}", "{{ 1 / 0 }}"])
async def test_templates_that_fail(stage: Stage, client: httpx.AsyncClient, template: str) -> None:
    stage.gateway.settings = structs.replace(stage.gateway.settings, trust_request_chat_template=True)
    error_of(await client.post(CHAT, json={**HI, "chat_template": template}), 400, "invalid_request")


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo(client: httpx.AsyncClient, stream: bool, as_ids: bool) -> None:
    prompt = await ids_of(client, TEXT["prompt"]) if as_ids else TEXT["prompt"]
    response = await client.post(COMPLETIONS, json={**TEXT, "prompt": prompt, "echo": True, "n": 2, "stream": stream})
    choices = [
        choice for chunk in (chunks_of(response) if stream else [response.json()]) for choice in chunk["choices"]
    ]
    texts = ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in (0, 1)]
    assert texts == [TEXT["prompt"] + "jumps over"] * 2
    error = error_of(await client.post(COMPLETIONS, json={**TEXT, "echo": True, "logprobs": 0}), 400, "invalid_request")
    assert (error["param"], "not computed" in error["message"]) == ("echo", True)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_token_ids(stage: Stage, client: httpx.AsyncClient, path: str) -> None:
    body = {**(HI if path == CHAT else TEXT), "return_token_ids": True, "temperature": 0, "stop": ["over"]}
    whole = (await client.post(path, json=body)).json()
    chunks = chunks_of(await client.post(path, json={**body, "stream": True}))
    prompt, choice = prompt_of(stage), whole["choices"][0]
    assert (whole if path == CHAT else choice)["prompt_token_ids"] == prompt
    assert stage.tokenizer.decode(choice["token_ids"]).startswith("jumps over"[:-1])
    assert len(choice["token_ids"]) == whole["usage"]["completion_tokens"]
    streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
    assert streamed == choice["token_ids"]
    named = [chunk if path == CHAT else chunk["choices"][0] for chunk in chunks]
    assert [each["prompt_token_ids"] for each in named if "prompt_token_ids" in each] == [prompt]


async def test_tokens_as_ids(client: httpx.AsyncClient) -> None:
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True, "temperature": 0}
    chat = (await client.post(CHAT, json={**HI, **fields, "logprobs": True, "top_logprobs": 1})).json()["choices"][0]
    assert [each["token"] for each in chat["logprobs"]["content"]] == [f"token_id:{n}" for n in chat["token_ids"]]
    text = (await client.post(COMPLETIONS, json={**TEXT, **fields, "logprobs": 1})).json()["choices"][0]
    assert text["logprobs"]["tokens"] == [f"token_id:{n}" for n in text["token_ids"]]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_in_each_chunk(client: httpx.AsyncClient, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**(HI if path == CHAT else TEXT), "stream": True, "stream_options": options, "stop": ["over"]}
    *chunks, last = chunks_of(await client.post(path, json=body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] > 1
    assert len(set(counts)) > 2
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_many_stops(client: httpx.AsyncClient) -> None:
    body = {**TEXT, "stop": [*(f"never{n}" for n in range(63)), "ove"]}
    assert (await client.post(COMPLETIONS, json=body)).json()["choices"][0]["text"] == "jumps "


async def test_engine_parameters_under_vllms_name(stage: Stage, client: httpx.AsyncClient) -> None:
    stage.workers["d1"].parameters = ("extra_args",)
    beats = stage.gateway.workers.members.beats
    await stage.wait_for(lambda: any(beat.parameters == ("extra_args",) for beat in beats()))
    assert (await client.post(CHAT, json={**HI, "vllm_xargs": {"a": 1}})).status_code == 200
    assert task_of(stage).sampling.extensions == {"extra_args": {"a": 1}}


FORCED: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "required",
}
MESSAGE: dict[str, Any] = {**HI, "max_tokens": 5}
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "hi"}
RESPONSE_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
MESSAGE_TOOL = {"name": "f", "input_schema": {"type": "object"}}
OBJECT = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {**HI, "response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {**HI, **FORCED}, "tool_choice"),
        (CHAT, {**HI, "structured_outputs": {"regex": None, "choice": ["a"]}}, "structured_outputs.choice"),
        (COMPLETIONS, {**TEXT, "response_format": {"type": "text"}, "regex": "a"}, "regex"),
        ("/v1/responses", {**RESPONSE, "text": {"format": {**OBJECT, "name": "a"}}}, "text.format"),
        ("/v1/responses", {**RESPONSE, "tools": [RESPONSE_TOOL], "tool_choice": "required"}, "tool_choice"),
        ("/v1/messages", {**MESSAGE, "output_config": {"format": OBJECT}}, "output_config.format"),
        ("/v1/messages", {**MESSAGE, "tools": [MESSAGE_TOOL], "tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
async def test_a_constraint_that_no_worker_enforces_is_named_as_it_was_sent(
    stage: Stage, client: httpx.AsyncClient, path: str, body: dict[str, Any], field: str
) -> None:
    stage.workers["d1"].parameters = ()
    beats = stage.gateway.workers.members.beats
    await stage.wait_for(lambda: all(beat.parameters == () for beat in beats()))
    answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"].get("param", field)) == (400, field)
    assert answer.json()["error"]["message"] == f"no worker of the model `{MODEL}` can enforce `{field}`"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {**HI, **FORCED, "tool_choice": "auto", "response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {**HI, "tools": FORCED["tools"], "structured_outputs": {"json": {}}}, "structured_outputs.json"),
        ("/v1/responses", {**RESPONSE, "tools": [RESPONSE_TOOL], "text": {"format": {**OBJECT, "name": "a"}}},
         "text.format"),
        ("/v1/messages", {**MESSAGE, "tools": [MESSAGE_TOOL], "output_config": {"format": OBJECT}},
         "output_config.format"),
    ],
)  # fmt: skip
async def test_a_constraint_that_no_worker_enforces_beside_tools_is_named_with_them(
    stage: Stage, client: httpx.AsyncClient, path: str, body: dict[str, Any], field: str
) -> None:
    # This worker enforces all constraints but the one that is either JSON or calls.
    kept = tuple(name for name in stage.workers["d1"].parameters if "structural_tag" not in name)
    stage.workers["d1"].parameters = kept
    beats = stage.gateway.workers.members.beats
    await stage.wait_for(lambda: all(beat.parameters == kept for beat in beats()))
    answer = await client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"].get("param", field)) == (400, field)
    said = f"no worker of the model `{MODEL}` can enforce `{field}` beside `tools`"
    assert answer.json()["error"]["message"] == said


async def test_a_misspelt_field_gets_a_hint(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(CHAT, json={**HI, "temprature": 1}), 400, "invalid_request")
    assert error["param"] == "temprature"
    assert "did you mean `temperature`?" in error["message"]


# ---------------------------------------------------------------- other paths


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokens_and_back(client: httpx.AsyncClient, prefix: str) -> None:
    body = {"model": MODEL, "prompt": "naïve 😀 <|im_end|>", "return_token_strs": True}
    tokens = (await client.post(f"{prefix}/tokenize", json=body)).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == CONTEXT_TOKENS
    assert tokens["token_strs"][-1] == "<|im_end|>"
    asked = {"model": MODEL, "tokens": tokens["tokens"]}
    assert (await client.post(f"{prefix}/detokenize", json=asked)).json() == {"prompt": body["prompt"]}
    skipped = await client.post(f"{prefix}/detokenize", json={**asked, "skip_special_tokens": True})
    assert skipped.json() == {"prompt": "naïve 😀 "}


async def test_the_tokens_of_a_chat_are_those_of_its_prompt(stage: Stage, client: httpx.AsyncClient) -> None:
    tokens = (await client.post("/tokenize", json=HI)).json()
    await client.post(CHAT, json=HI)
    assert tokens["tokens"] == prompt_of(stage)
    shorter = (await client.post("/tokenize", json={**HI, "add_generation_prompt": False})).json()
    assert tokens["tokens"][: shorter["count"]] == shorter["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "model"),
        ("/tokenize", {"model": MODEL}, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": "a", "messages": HI["messages"]}, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": "a", "promt": 1}, "promt"),
        ("/tokenize", {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0]"),
        ("/detokenize", {"model": MODEL, "tokens": [512]}, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": ["a"]}, "tokens[0]"),
    ],
)  # fmt: skip
async def test_conversions_that_are_refused(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    assert error_of(await client.post(path, json=body), 400, "invalid_request")["param"] == param


async def test_conversions_of_models_that_are_not_served(client: httpx.AsyncClient) -> None:
    error_of(await client.post("/tokenize", json={"model": "nope", "prompt": "a"}), 404, "model_not_found")
    error_of(await client.post("/detokenize", content=b"{"), 400, "invalid_request")
    error_of(await client.get("/tokenize"), 405, "method_not_allowed")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/embeddings", "this server has no embeddings: it serves no embedding model"),
        ("/v1/images/generations", "images"), ("/v1/images/edits", "images"), ("/v1/audio/speech", "speech"),
        ("/v1/audio/transcriptions", "transcriptions"),
        ("/v1/videos", "videos"), ("/v1/moderations", "moderations"),
    ],
)  # fmt: skip
async def test_what_is_not_served_is_named(client: httpx.AsyncClient, path: str, said: str) -> None:
    error = error_of(await client.post(path, json={"model": MODEL, "input": "x"}), 400, "not_served")
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"
