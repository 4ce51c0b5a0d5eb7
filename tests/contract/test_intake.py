"""Intake gives the same result in this process and in a process of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import pytest
from baton_gateway.detokenise import Vocabulary
from baton_gateway.intake import Intake, Operation, Parsed, Plan
from baton_gateway.intake_messages import LARGE_BYTES
from baton_gateway.intake_pool import IntakePool, LocalPool, ProcessPool
from baton_gateway.parsing.formats import FormatName
from baton_gateway.tokenise import ModelTokenizer
from baton_gateway.workers import Model

from baton.clock import SystemClock
from baton.errors import BatonError, ConfigurationError
from tests.harness.gateway.actors import tiny_model
from tests.harness.gateway.samples import chat_template
from tests.harness.processes import command_line


def shared_model() -> tuple[Path, ModelTokenizer]:
    """Return a model whose answers have a format, and the folder that it is in."""
    return tiny_model(chat_template(FormatName.GLM))


def model() -> Model:
    return Model(name="tiny", path=str(shared_model()[0]), digest="d", block_tokens=16, context_tokens_max=4096)


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth > 1 else {"a": [1, 2.5, None, "é", "x" * (250 << 10)]}


STREAM = {"include_usage": True}
WEATHER = {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}, "day": {"type": "integer"}}}}
CALLED = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TOOLS: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ],
    "tools": [{"type": "function", "function": WEATHER}],
    "parallel_tool_calls": False,
}
BODIES: list[tuple[Operation, dict[str, Any]]] = [
    ("chat", {"messages": [{"role": "user", "content": "😀"}], "stream": True, "stream_options": STREAM}),
    ("chat", {"messages": [{"role": "user", "content": "hi"}], "structured_outputs": {"json": nested(63)}}),
    ("chat", {"messages": [{"role": "user"}] * 100, "n": 3, "seed": 7, "logprobs": True, "cache_salt": "s"}),
    ("chat", TOOLS),
    ("chat", {**TOOLS, "tool_choice": "none"}),
    ("chat", {**TOOLS, "tool_choice": "required"}),
    ("text_completion", {"prompt": [[5] * 3000, [6, 7]], "stop": ["a"], "temperature": 0.5, "logit_bias": {"5": 1}}),
    ("text_completion", {"prompt": "the quick brown fox " * 100}),
    ("text_completion", {"prompt": "the quick brown fox " * 10_000}),
    ("text_completion", {"prompt": [5] * 200_000}),
    ("text_completion", {"prompt": [""] * 100_000}),
    ("text_completion", {"prompt": [600]}),
    ("chat", {"messages": []}),
]  # fmt: skip


@asynccontextmanager
async def pool_of(kind: str) -> AsyncGenerator[IntakePool]:
    def load(path: str) -> ModelTokenizer:
        return shared_model()[1] if path == model().path else ModelTokenizer(path)

    processes = ProcessPool(clock=SystemClock(), processes_max=1, waiting_bytes_max=1 << 20)
    pool: IntakePool = LocalPool(load) if kind == "local" else processes
    try:
        yield pool
    finally:
        await pool.close()


def taken_in(operation: Operation, payload: bytes) -> tuple[Parsed, Plan] | BatonError:
    """Return the plan of a body, or the error."""
    intake = Intake()
    try:
        return intake.parse(operation, payload), intake.plan(shared_model()[1], model(), model_defaults=True)
    except BatonError as error:
        return error


@pytest.mark.parametrize("kind", ["local", "process"])
async def test_every_body_is_taken_in_alike(kind: str) -> None:
    async with pool_of(kind) as pool:
        for operation, fields in BODIES:
            payload = json.dumps({"model": "tiny", **fields}).encode()
            expected = taken_in(operation, payload)
            async with pool.lend(payload, None) as worker:
                try:
                    came: object = (
                        await worker.parse(operation, payload),
                        await worker.plan(model(), model_defaults=True),
                    )
                except BatonError as error:
                    came = error
            if isinstance(expected, BatonError):
                assert isinstance(came, BatonError)
                assert (type(came), came.detail, came.param) == (type(expected), expected.detail, expected.param)
            else:
                assert msgspec.msgpack.encode(came) == msgspec.msgpack.encode(expected)


@pytest.mark.parametrize("kind", ["local", "process"])
async def test_a_model_is_known_from_what_a_worker_tells_of_it(kind: str) -> None:
    async with pool_of(kind) as pool:
        facts = await pool.load(model().path, "d")
        tokenizer = shared_model()[1]
        assert facts == tokenizer.facts
        text = "naïve café, 你好世界, 😀 done. "
        detokeniser = Vocabulary(facts.spellings).detokeniser()
        assert "".join(map(detokeniser.feed, tokenizer.encode(text, add_special=False))) == text
        with pytest.raises(ConfigurationError, match="no-such-model"):
            await pool.load("/no-such-model", "d")


WATCHED: Final = """
import gc, runpy, sys
path = sys.argv.pop(1)
gc.callbacks.append(lambda *_: print(gc.get_freeze_count(), file=open(path, "a")))
runpy.run_module("baton_gateway.intake_process", run_name="__main__")
"""
"""An intake process that notes the number of frozen objects in a file whenever it collects garbage."""


async def test_a_process_that_meets_its_model_in_a_body_freezes_it_too(tmp_path: Path) -> None:
    """Otherwise it visits all objects of the tokenizer after every body, which takes ten times as long as the body."""
    command = (sys.executable, "-c", WATCHED, str(tmp_path / "frozen"))
    pool = ProcessPool(clock=SystemClock(), processes_max=1, waiting_bytes_max=1 << 20, command=command)
    try:
        for _ in range(2):  # The process collects after its answer, and before it takes the next body.
            async with pool.lend(b"", None) as worker:
                await worker.parse("text_completion", b'{"model": "tiny", "prompt": "x"}')
                await worker.plan(model(), model_defaults=True)
        assert max(map(int, (tmp_path / "frozen").read_text().split())) > 10_000
    finally:
        await pool.close()


async def test_a_process_drops_a_long_body_that_is_not_planned() -> None:
    """The gateway refuses some bodies once they are parsed, by their model or parameters."""
    pool = ProcessPool(clock=SystemClock(), processes_max=1, waiting_bytes_max=8 << 20)
    held_bytes: list[int] = []
    try:
        for lists in (10, 500_000):
            body = b'{"model": "tiny", "prompt": "x", "x": [' + b"[]," * lists + b"0]}" + b" " * LARGE_BYTES
            async with pool.lend(body, None) as worker:
                await worker.parse("text_completion", body)
            async with pool.lend(bytes(LARGE_BYTES), None):  # The process is lent again once it has dropped the body.
                children = psutil.Process().children()
                (process,) = (child for child in children if "baton_gateway.intake_process" in command_line(child))
                held_bytes.append(process.memory_info().rss)
        assert held_bytes[1] - held_bytes[0] < len(body) * 8, "the lists take 25 times their length"
    finally:
        await pool.close()


async def test_a_process_gets_the_name_of_the_answer_format() -> None:
    command = (sys.executable, "-m", "baton_gateway.intake_process", FormatName.HERMES)
    pool = ProcessPool(clock=SystemClock(), processes_max=1, waiting_bytes_max=0, command=command)
    try:
        answers = (await pool.load(model().path, "d")).answers
        assert answers is not None
        assert answers.name == "hermes"
    finally:
        await pool.close()
