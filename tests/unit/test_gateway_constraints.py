"""Structured output: each engine's own field becomes one form, and malformed or double constraints are named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from baton_gateway.constraints import BYTES_MAX, CHOICES_MAX, GRAMMAR_BRACKETS_MAX, constraint_of

from baton.errors import InvalidRequest
from baton.messages.attempts import Constraint, ConstraintKind

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"ä": {"type": "integer"}}}
SCHEMA_TEXT = '{"type":"object","properties":{"ä":{"type":"integer"}}}'
TAG: dict[str, Any] = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
JSON = Constraint(kind=ConstraintKind.JSON, text=SCHEMA_TEXT)
OBJECT = Constraint(kind=ConstraintKind.JSON, text='{"type":"object"}')
REGEX = Constraint(kind=ConstraintKind.REGEX, text="a+")
GRAMMAR = Constraint(kind=ConstraintKind.GRAMMAR, text='root ::= "a"')
STRUCTURAL_TAG = Constraint(
    kind=ConstraintKind.STRUCTURAL_TAG, text=json.dumps(TAG, ensure_ascii=False, separators=(",", ":"))
)
CHOICE = Constraint(kind=ConstraintKind.GRAMMAR, text='root ::= "yes" | "\\"n\\\\\\u000ao"')


def named(schema: object, **fields: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}


SAID: list[tuple[dict[str, Any], Constraint | None]] = [
    ({}, None),
    ({"response_format": None, "regex": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, OBJECT),
    ({"response_format": named(SCHEMA)}, JSON),
    ({"response_format": named(SCHEMA, strict=True, description="d")}, JSON),
    ({"response_format": named(SCHEMA, strict=False)}, JSON),
    ({"response_format": TAG}, STRUCTURAL_TAG),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, JSON),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON),
    ({"structured_outputs": {"json_object": True}}, OBJECT),
    ({"structured_outputs": {"regex": "a+"}}, REGEX),
    ({"structured_outputs": {"choice": ["yes", '"n\\\no']}}, CHOICE),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, GRAMMAR),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, STRUCTURAL_TAG),
    ({"json_schema": json.dumps(SCHEMA)}, JSON),
    ({"json_schema": SCHEMA, "response_format": {"type": "text"}}, JSON),
    ({"regex": "a+"}, REGEX),
    ({"ebnf": 'root ::= "a"'}, GRAMMAR),
    ({"structural_tag": json.dumps(TAG)}, STRUCTURAL_TAG),
]


@pytest.mark.parametrize(("fields", "constraint"), SAID, ids=lambda value: str(value)[:60])
def test_each_form_becomes_the_common_one(fields: dict[str, Any], constraint: Constraint | None) -> None:
    assert constraint_of(fields) == constraint


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ({"response_format": named(SCHEMA, strict="yes")}, "response_format.json_schema.strict"),
    ({"response_format": named(None)}, "response_format.json_schema.schema"),
    ({"response_format": named({"type": "x"})}, "response_format.json_schema.schema.type"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 3]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"choice": ["a"] * (CHOICES_MAX + 1)}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a" * (BYTES_MAX // 2)] * 3}}, "structured_outputs.choice"),
    ({"json_schema": "{"}, "json_schema"),
    ({"json_schema": '{"maximum": 1e999}'}, "json_schema"),
    ({"json_schema": "[" * 100_000}, "json_schema"),
    ({"json_schema": {"const": "x" * BYTES_MAX}}, "json_schema"),
    ({"regex": "((a{99}){99}){99}"}, "regex"),
    ({"regex": ""}, "regex"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"ebnf": " "}, "ebnf"),
    ({"ebnf": 'start: "a"'}, "ebnf"),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs.grammar"),
    ({"ebnf": "root ::= " + "(" * (GRAMMAR_BRACKETS_MAX + 1)}, "ebnf"),
    ({"ebnf": 'root ::= (("a"{0,20}){0,20}){0,20}'}, "ebnf"),
    (
        {"structural_tag": {"format": {"type": "grammar", "grammar": 'root ::= x{99}\nx ::= "a"{99}'}}},
        "structural_tag.format.grammar",
    ),
    ({"ebnf": 'root ::= "a\0"'}, "ebnf"),
    ({"structural_tag": {"type": "structural_tag"}}, "structural_tag"),
    (
        {"structural_tag": {"format": {"type": "sequence", "elements": [{"json_schema": {"type": "x"}}]}}},
        "structural_tag.format.elements[0].json_schema.type",
    ),
    (
        {"structural_tag": {"format": {"type": "regex", "pattern": "((a{99}){99}){99}"}}},
        "structural_tag.format.pattern",
    ),
]


@pytest.mark.parametrize(("fields", "path"), WRONG, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_named(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        constraint_of(fields)
    assert caught.value.param == path
    assert len(caught.value.detail) < 600


def test_a_schema_of_256_kib_passes_and_a_byte_more_does_not() -> None:
    room_bytes = BYTES_MAX - len('{"const":""}')
    assert constraint_of({"json_schema": {"const": "x" * room_bytes}}) is not None
    with pytest.raises(InvalidRequest, match="longer than 262144 bytes"):
        constraint_of({"json_schema": {"const": "x" * (room_bytes + 1)}})
