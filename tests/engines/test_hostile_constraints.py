"""Constraints at the gateway's limits on real engines: each compiles, and other answers go on beside it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any, Final

import pytest
from baton_gateway.constraints import BYTES_MAX, constraint_of
from baton_gateway.json_schema import DEPTH_MAX
from baton_gateway.places import PLACES_MAX, WRITTEN_OUT_MAX
from cross_engines import COMPACT, engines_fixture, named_pair

from baton.errors import InvalidRequest
from baton.messages.attempts import FinishReason, Sampling
from tests.harness.engine_pair import Pair, collect, first_delta

TOKENS: Final = 8
BESIDE: Final = Sampling(max_tokens=3000, temperature=0.0, ignore_eos=True)

pytestmark = [pytest.mark.nightly, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]

engines = engines_fixture(**COMPACT)
pair = named_pair


def nested(depth: int) -> dict[str, Any]:
    """Return a schema of so many levels, which asks for arrays within arrays."""
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth - 1):
        schema = {"type": "array", "items": schema}
    return schema


def long(length: int) -> dict[str, Any]:
    """Return a schema that is so many bytes of JSON."""
    schema = {"enum": [f"value {number}" for number in range(2000)], "description": ""}
    return {**schema, "description": "x" * (length - len(json.dumps(schema, separators=(",", ":"))))}


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"structured_outputs": {"json": schema}}


def regex(pattern: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": pattern}}


def grammar(text: str) -> dict[str, Any]:
    return {"structured_outputs": {"grammar": text}}


AT_THE_LIMIT: Final[Mapping[str, Callable[[int], dict[str, Any]]]] = {
    "levels": lambda more: of_schema(nested(DEPTH_MAX + more)),
    "bytes": lambda more: of_schema(long(BYTES_MAX + more)),
    "regex, counts": lambda more: regex(f"([a-z]{{0,99}},){{0,{100 + more}}}"),
    "regex, row of counts": lambda more: regex(f"([a-z]{{0,100}}){{0,{PLACES_MAX // 2 + more}}}"),
    "regex, optional": lambda more: regex("[a-z]?" * (PLACES_MAX + more)),
    "grammar, counts": lambda more: grammar(f'root ::= ([a-z]{{0,10}} ","){{0,{100 + more}}}'),
    "grammar, row of counts": lambda more: grammar(f"root ::= ([a-z]{{0,100}}){{0,{PLACES_MAX // 2 + more}}}"),
    "grammar, high count": lambda more: grammar(f"root ::= ([a-z] [0-9]?){{0,{WRITTEN_OUT_MAX + more}}}"),
    "grammar, optional": lambda more: grammar("root ::= " + "[a-z]? " * (PLACES_MAX + more)),
    "grammar, rules": lambda more: grammar(f"root ::= a a a a {'[a-z]?' * more}\na ::= b b\nb ::= c c\nc ::= [a-z]?"),
}
"""Fields of a request that states a constraint at a limit, or one beyond."""


@pytest.mark.parametrize("name", AT_THE_LIMIT)
@pytest.mark.parametrize(
    "pair", ["vllm-32-to-vllm-64", "sglang-32-to-sglang-64"], ids=str, indirect=True, scope="module"
)
async def test_a_constraint_at_the_limit_lets_other_answers_go_on(pair: Pair, name: str) -> None:
    with pytest.raises(InvalidRequest):
        constraint_of(AT_THE_LIMIT[name](1))
    hostile = Sampling(max_tokens=TOKENS, temperature=0.0, constraint=constraint_of(AT_THE_LIMIT[name](0)))
    stream, _ = await first_delta(pair.decode, pair.request(pair.prompt(40), BESIDE))
    async with aclosing(stream):  # pyright: ignore[reportArgumentType]
        constrained = asyncio.create_task(collect(pair.decode, pair.request(pair.prompt(40), hostile)))
        tokens_beside = 0
        async for delta in stream:
            tokens_beside += len(delta.tokens)
            if constrained.done():
                break
            assert delta.finish is None, "the answer beside it ended first"
    answer = constrained.result()
    assert answer.last.finish in (FinishReason.STOP, FinishReason.LENGTH)
    # While the constraint compiles, the other answer goes on; then both share steps.
    assert 0 < len(answer.tokens) <= tokens_beside + 1
    await pair.settled()
