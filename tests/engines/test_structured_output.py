"""Structured output of real engines over a corpus of schemas: each answer is valid, and continues exactly."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from baton_gateway.constraints import json_constraint
from baton_gateway.parsing.formats import read_family
from cross_engines import COMPACT, Engines, engines_fixture, named_pair
from forced_answers import check_forced_calls
from jsonschema import Draft202012Validator
from msgspec.structs import replace

from baton.messages.attempts import FinishReason, Sampling
from tests.harness.engine_pair import Pair
from tests.harness.gateway.samples import FAMILIES
from tests.harness.schemas import schemas

SCHEMAS = 200
AT_ONCE = 8
TOKENS_MAX = 2000
PAIRS = ("vllm-32-to-vllm-64", "sglang-32-to-sglang-64", "vllm-32-to-sglang-64", "sglang-32-to-vllm-64")

pytestmark = [pytest.mark.nightly, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(3000)]


engines = engines_fixture(**COMPACT)
pair = named_pair


@pytest.mark.parametrize("pair", PAIRS, ids=str, indirect=True, scope="module")
async def test_each_answer_is_valid_and_continues_exactly(pair: Pair, engines: Engines) -> None:
    room = asyncio.Semaphore(AT_ONCE)
    source = random.Random(17)

    async def check(schema: dict[str, Any], cut: float) -> None:
        constraint = json_constraint(schema, "schema")
        sampling = Sampling(max_tokens=TOKENS_MAX, temperature=0.0, constraint=constraint)
        prompt = pair.prompt(70)
        async with room:
            whole = await pair.hand_off(prompt, sampling)
            assert whole.last.finish is FinishReason.STOP, schema
            answer = json.loads(engines.text(whole.tokens))
            Draft202012Validator(schema).validate(answer)  # pyright: ignore[reportUnknownMemberType]
            delivered = int(len(whole.tokens) * cut)
            left = replace(sampling, max_tokens=TOKENS_MAX - delivered, delivered_tokens=delivered)
            rest = await pair.hand_off([*prompt, *whole.tokens[:delivered]], left)
            assert rest.tokens == whole.tokens[delivered:], schema

    async with asyncio.TaskGroup() as group:
        for schema in schemas(SCHEMAS):
            group.create_task(check(schema, source.random()))
    await pair.settled()


FORCED = [name for name in FAMILIES if read_family(name).calls]


@pytest.mark.parametrize("pair", PAIRS, ids=str, indirect=True, scope="module")
async def test_forced_calls_of_every_family_are_valid_and_continue_exactly(pair: Pair, engines: Engines) -> None:
    for family in FORCED:
        await check_forced_calls(pair, engines, family)
    await pair.settled()
