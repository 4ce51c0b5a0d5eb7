"""OpenAI's own SDK, unmodified, against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import openai
import pytest
from baton_gateway.config import Settings
from openai.types import Completion
from openai.types.chat import ChatCompletionMessageParam
from pydantic import ValidationError

from baton.messages.attempts import Cancel, DecodeTask, PrefillTask, TokenChunk
from baton.messages.base import unpack_tokens
from baton.messages.workers import Role
from tests.harness.gateway.actors import MODEL
from tests.harness.gateway.stage import Stage, forward, open_stage

HELLO = "Hello wörld, 你好 😀! And then it stops."
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with open_stage() as opened:
        opened.say(HELLO)
        yield opened


@pytest.fixture
async def client(stage: Stage) -> AsyncIterator[openai.AsyncOpenAI]:
    async with connect(stage.base_url) as opened:
        yield opened


def connect(url: str, key: str = "none", *, strict: bool = True) -> openai.AsyncOpenAI:
    """Return a client that validates every answer strictly, unless told otherwise.

    It skips reading certificates, which takes longer than most tests here.
    """
    plain = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key=key,
        max_retries=0,
        http_client=plain,
        _strict_response_validation=strict,
    )


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).object == "model"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other/model")


async def test_a_chat(stage: Stage, client: openai.AsyncOpenAI) -> None:
    stage.workers["d1"].script.cached_tokens = 7
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == HELLO
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    prompt = stage.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", add_special=False)
    (task,) = stage.workers["d1"].got(DecodeTask)
    assert isinstance(task, DecodeTask)
    assert unpack_tokens(task.tokens) == prompt
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(stage.answer)
    assert answer.usage.total_tokens == len(prompt) + len(stage.answer)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 7


async def test_a_stream_says_the_same_token_by_token(stage: Stage, client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    stage.workers["d1"].script.interval_s = 0.002
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    *body, last = chunks
    texts = [chunk.choices[0].delta.content for chunk in body if chunk.choices[0].delta.content]
    assert "".join(texts) == whole.choices[0].message.content == HELLO
    assert len(texts) > 10
    assert body[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in body if chunk.choices[0].finish_reason] == ["stop"]
    assert last.choices == []
    assert last.usage == whole.usage
    assert all(chunk.usage is None for chunk in body)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_tokens_arrive_one_by_one(stage: Stage, client: openai.AsyncOpenAI) -> None:
    """The first text is read while the worker has yet to produce the rest."""
    stage.workers["d1"].script.stall_at = 3
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if len(text) >= 3:
            break
    assert text == HELLO[:3]
    await stream.close()


async def test_prefill_and_decode_get_the_same_prompt(stage: Stage, client: openai.AsyncOpenAI) -> None:
    prefill = await stage.add("p1", Role.PREFILL)
    prefill.script.cached_tokens = 5
    stage.scheduler.predicted_cached_tokens = 4
    await forward(stage, "p1")
    answer = await client.completions.create(
        model=MODEL, prompt=[7] * 40, max_tokens=50, extra_headers={"x-baton-disaggregation": "always"}
    )
    assert answer.choices[0].text == HELLO
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 5, "what prefill held, since it computed the prompt"
    (prefilled,), (decoded,) = prefill.got(PrefillTask), stage.workers["d1"].got(DecodeTask)
    assert isinstance(prefilled, PrefillTask)
    assert isinstance(decoded, DecodeTask)
    assert prefilled.tokens == decoded.tokens
    assert prefilled.sink_ranks == 1
    assert (prefilled.cached_tokens, decoded.cached_tokens) == (4, 0), "for the queue of the prompt's worker"
    assert decoded.source is not None
    assert decoded.source == prefill.address
    await stage.wait_for(lambda: not prefill.attempts and not stage.workers["d1"].attempts)


async def test_completions_of_every_kind_of_prompt(stage: Stage, client: openai.AsyncOpenAI) -> None:
    stage.say("ok")
    tokens = stage.tokenizer.encode("the fox", add_special=False)
    prompts: list[tuple[str | list[str] | list[int] | list[list[int]], int]] = [
        ("the fox", 1), (["the fox", "the dog"], 2), (tokens, 1), ([tokens, tokens, tokens], 3)
    ]  # fmt: skip
    answer: Completion | None = None
    for prompt, choices in prompts:
        answer = await client.completions.create(model=MODEL, prompt=prompt)
        assert [choice.text for choice in answer.choices] == ["ok"] * choices
        assert [choice.index for choice in answer.choices] == list(range(choices))
    assert answer is not None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3 * len(tokens)


async def test_streamed_completions_deviate_from_the_sdks_types_in_one_field_as_openai_does(
    stage: Stage, client: openai.AsyncOpenAI
) -> None:
    """`finish_reason` is null before the last chunk, which OpenAI's server sends and the SDK's type forbids."""

    async def ask(client: openai.AsyncOpenAI) -> openai.AsyncStream[Completion]:
        return await client.completions.create(model=MODEL, prompt="hi", stream=True, logprobs=1, n=2, max_tokens=99)

    with pytest.raises(openai.APIResponseValidationError) as refused:
        async for _ in await ask(client):
            pass
    assert isinstance(refused.value.__cause__, ValidationError)
    assert {fault["loc"] for fault in refused.value.__cause__.errors()} == {("choices", 0, "finish_reason")}
    texts = {0: "", 1: ""}
    async with connect(stage.base_url, strict=False) as loose:
        async for chunk in await ask(loose):
            filled = chunk.model_dump(exclude_unset=True)
            for choice in filled["choices"]:
                texts[choice["index"]] += choice["text"]
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            assert Completion.model_validate(filled)
    assert texts == {0: HELLO, 1: HELLO}


async def test_embeddings_are_refused_by_name(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="embedding"):
        await client.embeddings.create(model=MODEL, input="hi")


async def test_n_is_expanded_and_seeds_differ(stage: Stage, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, seed=10)
    assert [choice.message.content for choice in answer.choices] == [HELLO] * 3
    tasks = stage.workers["d1"].got(DecodeTask)
    assert sorted(task.sampling.seed or 0 for task in tasks if isinstance(task, DecodeTask)) == [10, 11, 12]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * len(stage.answer)
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [HELLO] * 2


async def test_max_tokens_and_length(stage: Stage, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_frame", [1, 7])
async def test_a_stop_string_ends_the_answer_and_the_decode(
    stage: Stage, client: openai.AsyncOpenAI, stream: bool, tokens_per_frame: int
) -> None:
    worker = stage.workers["d1"]
    worker.script.tokens_per_frame = tokens_per_frame
    worker.script.interval_s = 0.001
    worker.script.cached_tokens = 3
    stage.say(HELLO * 50, ends=False)
    stop = ["好 😀", "never"]
    if stream:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, stop=stop, stream=True, stream_options={"include_usage": True}
            )
        ]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        usage, reason = chunks[-1].usage, chunks[-2].choices[0].finish_reason
    else:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stop=stop)
        text, usage = answer.choices[0].message.content or "", answer.usage
        reason = answer.choices[0].finish_reason
    assert text == "Hello wörld, 你"
    assert reason == "stop"
    shown = stage.tokenizer.encode("Hello wörld, 你好 😀", add_special=False)
    assert usage is not None
    assert usage.completion_tokens == len(shown)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3
    await stage.wait_for(lambda: worker.got(Cancel) and not worker.attempts)


async def test_logprobs(stage: Stage, client: openai.AsyncOpenAI) -> None:
    stage.say("ok 😀")
    chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert chat.choices[0].logprobs is not None
    entries = chat.choices[0].logprobs.content or []
    assert len(entries) == len(stage.answer)
    assert b"".join(bytes(entry.bytes or []) for entry in entries[:-1]) == "ok 😀".encode()
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    completion = await client.completions.create(model=MODEL, prompt="x", logprobs=1)
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.token_logprobs == [-0.5] * len(stage.answer)
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, stream=True)
    streamed = [chunk.choices[0].logprobs async for chunk in stream]
    assert sum(len(logprobs.content or []) for logprobs in streamed if logprobs) == len(stage.answer)


async def test_engine_extensions_pass_through(stage: Stage, client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, user="me", max_tokens=9, metadata={"a": "b"},
        extra_body={"ignore_eos": True, "min_tokens": 2, "top_k": 3, "stop_token_ids": [5], "guided_choice": ["a"]},
    )  # fmt: skip
    (task,) = stage.workers["d1"].got(DecodeTask)
    assert isinstance(task, DecodeTask)
    assert task.sampling.ignore_eos
    assert (task.sampling.min_tokens, task.sampling.top_k, task.sampling.stop_token_ids) == (2, 3, (5,))
    assert task.sampling.extensions == {"guided_choice": ["a"]}


async def test_a_schema_of_64_levels_and_256_kib_reaches_the_worker(stage: Stage, client: openai.AsyncOpenAI) -> None:
    schema: dict[str, object] = {"enum": ["x" * 1000] * (260_000 // 1003)}
    for _ in range(62):
        schema = {"items": schema}
    await client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        response_format={"type": "json_schema", "json_schema": {"name": "deep", "strict": True, "schema": schema}},
    )
    (task,) = stage.workers["d1"].got(DecodeTask)
    assert isinstance(task, DecodeTask)
    assert task.sampling.constraint is not None
    assert json.loads(task.sampling.constraint.text) == schema
    with pytest.raises(openai.BadRequestError, match=r"nested at most 64 deep") as caught:
        await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "deep", "schema": {"items": schema}}},
        )
    assert caught.value.param == "response_format.json_schema.schema"


async def test_a_constraint_that_no_worker_enforces_is_refused(stage: Stage, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"no worker .* can enforce `ebnf`"):
        await client.completions.create(model=MODEL, prompt="hi", extra_body={"ebnf": 'root ::= "a"'})
    assert not stage.scheduler.places


async def test_a_long_prompt_travels_in_chunks(stage: Stage, client: openai.AsyncOpenAI) -> None:
    stage.network.payload_bytes_max = 2048
    answer = await client.completions.create(model=MODEL, prompt=[7] * 3000)
    assert answer.choices[0].text == HELLO[: len(answer.choices[0].text)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3000


async def test_parameters_that_fill_a_message_are_refused_before_a_token_is_sent(
    stage: Stage, client: openai.AsyncOpenAI
) -> None:
    stage.network.payload_bytes_max = 8192
    with pytest.raises(openai.APIStatusError) as refused:
        await client.completions.create(
            model=MODEL, prompt=[7] * 3000, extra_body={"guided_choice": ["a" * stage.network.payload_bytes_max]}
        )
    assert refused.value.status_code == 413
    assert not stage.workers["d1"].got(TokenChunk)


async def test_many_at_once(stage: Stage, client: openai.AsyncOpenAI) -> None:
    stage.workers["d1"].script.interval_s = 0.001
    answers = await asyncio.gather(*(client.chat.completions.create(model=MODEL, messages=MESSAGES) for _ in range(40)))
    assert {answer.choices[0].message.content for answer in answers} == {HELLO}
    assert stage.workers["d1"].peak > 5
    await stage.wait_for(lambda: not stage.workers["d1"].attempts)
    assert not stage.gateway.routes


async def test_api_keys() -> None:
    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(open_stage(Settings(port=0, api_keys=("right", "also"))))
        for key, accepted in (("right", True), ("also", True), ("wrong", False), ("righ", False)):
            client = await stack.enter_async_context(connect(stage.base_url, key))
            if accepted:
                assert await client.models.list()
            else:
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
