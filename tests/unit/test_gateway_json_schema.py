"""Schemas and patterns: what no engine enforces is refused with its path, and what engines enforce passes."""

from __future__ import annotations

import copy
import json
import re
import tracemalloc
from contextlib import suppress
from math import inf
from typing import Annotated, Any, Literal

import msgspec
import pytest
from baton_gateway.json_schema import (
    BOUNDED_TEXTS_MAX,
    COUNTED_PROPERTIES_MAX,
    DEPTH_MAX,
    PATTERN_CHARACTERS_MAX,
    PATTERN_GROUPS_MAX,
    PATTERN_STEPS_MAX,
    check_pattern,
    check_schema,
    spell_lengths,
)
from baton_gateway.places import PLACES_MAX
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict, Field

from baton.errors import InvalidRequest
from tests.harness.limits import ProcessorTime
from tests.harness.schemas import schemas

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"type": "strin"}, "s.type"),
    ({"type": ["string", 3]}, "s.type"),
    ({"type": []}, "s.type"),
    ({"properties": {"a": {"properties": {"b c": {"type": "int"}}}}}, 's.properties.a.properties["b c"].type'),
    ({"properties": []}, "s.properties"),
    ({"properties": {"a": 3}}, "s.properties.a"),
    ({"items": {"anyOf": [{"type": "null"}, {"enum": []}]}}, "s.items.anyOf[1].enum"),
    ({"anyOf": []}, "s.anyOf"),
    ({"anyOf": {}}, "s.anyOf"),
    ({"required": "a"}, "s.required"),
    ({"required": [1]}, "s.required"),
    ({"minimum": "1"}, "s.minimum"),
    ({"exclusiveMinimum": True}, "s.exclusiveMinimum"),
    ({"maxLength": -1}, "s.maxLength"),
    ({"maxItems": 1.5}, "s.maxItems"),
    ({"minItems": None}, "s.minItems"),
    ({"minLength": 5, "maxLength": 4}, "s.minLength"),
    ({"not": {}}, "s.not"),
    ({"$defs": {"a": {"if": {}}}}, "s.$defs.a.if"),
    ({"pattern": 3}, "s.pattern"),
    ({"pattern": ""}, "s.pattern"),
    ({"pattern": "a", "maxLength": 4}, "s.maxLength"),
    ({"pattern": "^(?!a)b"}, "s.pattern"),
    ({"items": {"pattern": r"\\(?=a)"}}, "s.items.pattern"),
    ({"pattern": "(?<=a)b"}, "s.pattern"),
    ({"patternProperties": {"(?<!a)b": {}}}, "s.patternProperties"),
    ({"format": "date", "minLength": 4}, "s.minLength"),
    ({"anyOf": [{"minLength": 1}] * (BOUNDED_TEXTS_MAX + 1)}, "s.anyOf[0]"),
    ({"patternProperties": {"((a{99}){99}){99}": {}}}, "s.patternProperties"),
    ({"$ref": "#/$defs/a"}, "s.$ref"),
    ({"$ref": "#a"}, "s.$ref"),
    ({"$ref": "https://example.org/schema"}, "s.$ref"),
    ({"$ref": 3}, "s.$ref"),
    ({"$ref": "#"}, "s.$ref"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "s.$ref"),
    ({"$ref": "#/required", "required": ["a"]}, "s.$ref"),
    ({"$ref": "#/anyOf/2", "anyOf": [{}]}, "s.$ref"),
    ({"$ref": "#/$defs/a", "type": "object", "$defs": {"a": {}}}, "s.$ref"),
    ({"$ref": "#/const", "const": {"not": {}}}, "s.$ref"),
    ({"allOf": [{}, {}]}, "s.allOf"),
    ({"allOf": [{}], "properties": {"a": {}}}, "s.allOf"),
    ({"anyOf": [{}], "oneOf": [{}]}, "s.anyOf"),
    ({"oneOf": [{}], "additionalProperties": False}, "s.oneOf"),
    ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, "s.anyOf"),
    ({"required": ["a"]}, "s.required[0]"),
    ({"properties": {"a": {}}, "required": ["a", "b"]}, "s.required[1]"),
    ({"minimum": 5, "maximum": 3}, "s.minimum"),
    ({"minimum": 3, "exclusiveMaximum": 3}, "s.minimum"),
    ({"exclusiveMinimum": 3, "maximum": 3.0}, "s.exclusiveMinimum"),
    ({"$ref": f"#/$defs/{'a' * 2000}", "$defs": {"a" * 2000: {}}}, "s.$ref"),
]


@pytest.mark.parametrize(("schema", "path"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_enforced_is_refused_with_its_path(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_schema(schema, "s")
    assert caught.value.param == path
    assert path in caught.value.detail


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": ["string", "null"], "minLength": 1, "maxLength": 1},
        {"enum": ["not", {"type": "strin", "$ref": "#/nowhere"}], "const": {"if": 1}, "default": {"properties": 3}},
        {"properties": {"not": {}, "$ref": {"type": "string"}, "type": {"type": "integer"}}},
        {"items": [{"type": "string"}], "additionalItems": False},
        {"type": "number", "minimum": 3, "maximum": 3, "exclusiveMinimum": 2},
        {"pattern": r"(?:a|\(?=b)[(?!]"},
        {
            "$defs": {"a/b~c %": {"properties": {"n": {"$ref": "#/$defs/a~1b~0c%20%25"}}}},
            "$ref": "#/$defs/a~1b~0c%20%25",
        },
        {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"$ref": "#/anyOf/0"}]},
    ],
)
def test_a_sound_schema_passes(schema: dict[str, Any]) -> None:
    check_schema(schema, "s")


def test_the_corpus_passes() -> None:
    for schema in schemas(300, seed=0):
        check_schema(schema, "s")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def test_depth_is_bounded() -> None:
    check_schema(nested(DEPTH_MAX), "s")
    with pytest.raises(InvalidRequest, match="at most 64 deep"):
        check_schema(nested(DEPTH_MAX + 1), "s")


KEYWORDS = st.sampled_from(["type", "items", "anyOf", "$ref", "properties", "enum", "pattern", "minimum", "maxLength"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda below: st.lists(below) | st.dictionaries(KEYWORDS, below),
)


@given(VALUES)
def test_anything_else_is_refused_by_name(schema: Any) -> None:
    try:
        check_schema(schema, "s")
    except InvalidRequest as error:
        assert error.param is not None
        assert error.param.startswith("s")
        assert len(error.detail) < 1000
    else:
        json.dumps(schema)


PATTERNS = [
    "(?:[a-z]?)" * PLACES_MAX,
    "^[a-z]?" * (PLACES_MAX // 2) + "b" + "c*" * (PLACES_MAX // 2),
    "|".join(f"a?{number}" for number in range(400)),
    r"^P(\d+Y)?(\d+M)?(\d+W)?(\d+D)?(T(\d+H)?(\d+M)?(\d+(\.\d+)?S)?)?$",
    "^M{0,4}(CM|CD|D?C{0,3})(XC|XL|L?X{0,3})(IX|IV|V?I{0,3})$",
    "[ab]{3}",
    r"\d{4}-\d{2}-\d{2}",
    "(a|b)*c+",
    r"[^\]]*[)(]",
    r"\(\[",
    "a{,3}b{2,}",
    "x" * PATTERN_CHARACTERS_MAX,
    "((a*)*)*",
    r"^([\w.-]+)@([\w-]+\.)+[A-Za-z]{2,}$",
    r"^(\d{1,3}\.){3}\d{1,3}$",
    r"^([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$",
    r"^(\w{1,20},){0,100}\w{1,20}$",
    r"^[A-Za-z]{1,30}( [A-Za-z]{1,30}){0,20}$",
    r"(\n[^\n]{1,20}){0,100}",
    f"([a-z]{{1,9}}){{0,{PLACES_MAX // 2}}}",
    "[",
    "a)b",
    "{",
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=range(len(PATTERNS)))
def test_a_pattern_of_moderate_size_passes(pattern: str) -> None:
    check_pattern(pattern, "p")


EXPLOSIVE = [
    "((a{0,100}){0,100}){0,100}",
    "((((a*)*)*)*)*" * 100,
    "(a|aa|aaa|.)*" * 300,
    f"a{{{PATTERN_STEPS_MAX + 1}}}",
    "(" * (PATTERN_GROUPS_MAX + 1),
    "x" * (PATTERN_CHARACTERS_MAX + 1),
    "a\0",
    "a{" + "9" * 3000 + "}",
    "[a-z]?" * (PLACES_MAX + 1),
    "(?:a?)" * PLACES_MAX + "$b{0,2}",
    "((a?b*){3}|x)?" * (PLACES_MAX // 2) + "c",
    "^(" + "|".join("a?" * PLACES_MAX for _ in range(20)) + ")$",
    f"([a-z]{{1,9}}){{0,{PLACES_MAX // 2 + 1}}}",
    r"^(\w+\s?){1,20}$",
    "(a|aa){0,100}",
    r"([\u4e00-\u9fff]{1,9}){0,100}",
    "([äöü]+){99}",
    "([a-z][0-9]?){0,1000}",
]


@pytest.mark.parametrize("pattern", EXPLOSIVE, ids=range(len(EXPLOSIVE)))
def test_a_pattern_that_could_hold_an_engine_up_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_pattern(pattern, "p")
    assert caught.value.param == "p"


@pytest.mark.parametrize(
    "pattern",
    [
        "a++", "a*+b", "a?+b", "a{2}+b", "a**", "a{2}{3}", "a+?+", "a???", "(a|b)+*",
        r"\Aabc", r"abc\Z", r"abc\z", r"\h+", r"\Q*\E", r"\R", r"\g<1>", r"\U0001F600", r"\x{41}", r"\07",
        r"\ud83d\ude00", r"[\p{L}]", r"[\P{L}]", r"[\x{41}]", r"[a\h]", r"[\1]", r"[^\07]", r"\\\A",
    ],
)  # fmt: skip
def test_what_engines_take_for_something_else_is_refused(pattern: str) -> None:
    schemas: tuple[tuple[dict[str, Any], str], ...] = (
        ({"pattern": pattern}, "s.pattern"),
        ({"patternProperties": {pattern: {}}}, "s.patternProperties"),
    )
    for schema, path in schemas:
        with pytest.raises(InvalidRequest, match="no engine") as caught:
            check_schema(schema, "s")
        assert caught.value.param == path
    with pytest.raises(InvalidRequest):
        check_pattern(pattern, "p")


@pytest.mark.parametrize(
    "pattern",
    [
        "a+?", "a*?b", "a??", "a{2,3}?", "(a+)+", r"a\++", r"[+*]+", r"(?i)abc", "(?P<x>a)b", "(?<x>a)b", r"\\Aa",
        r"[\\A]", r"\d\D\w\W\s\S\n\r\t\f\v", r"\p{L}", r"\1", r"\b", "\\",
        r"\x41\u0041\u{1F600}\cA\0", r"[\x41-\x43\d\w.-]", r"\.\-\/\@\_\é",
    ],
)  # fmt: skip
def test_what_engines_read_rightly_or_refuse_themselves_passes(pattern: str) -> None:
    check_pattern(pattern, "p")


@pytest.mark.parametrize(
    "pattern",
    [
        'a"b', r"\"", r"^C:\\[a-z]+$", r"a\nb", "a\tb", r"\e", r"\cA", r"\0", r"\x1F", r"\x22", r"\u005c", r"\u{22}",
        r"\u{00a}", '["]', r"[\\]", r"a[\n]", r'["\\\x0a]', '"?', '(x|")', '(?P<x>")',
    ],
)  # fmt: skip
def test_characters_that_json_escapes_are_refused_in_patterns_of_texts(pattern: str) -> None:
    schemas: tuple[tuple[dict[str, Any], str], ...] = (
        ({"items": {"pattern": pattern}}, "s.items.pattern"),
        ({"patternProperties": {pattern: {}}}, "s.patternProperties"),
    )
    for schema, path in schemas:
        with pytest.raises(InvalidRequest, match="JSON writes it as an escape") as caught:
            check_schema(schema, "s")
        assert caught.value.param == path
    check_pattern(pattern, "p")


@pytest.mark.parametrize(
    "pattern",
    [
        r'[^"\\\n]+',
        r'[\w"]',
        r"\s\W\D\S.",
        r"\x20\x23\x5b\u0021\u00e9\u{222}",
        r"[ -~]",
        r"[^\n]",
        r"\^\$\.",
        "é",
        "n0",
        "[]a",
        "[",
    ],
)
def test_other_characters_pass_in_patterns_of_texts(pattern: str) -> None:
    check_schema({"pattern": pattern}, "s")


@pytest.mark.parametrize("unit", ["[", "{9", "(", "\\", "{1,", "[^"])
def test_the_checks_of_a_hostile_pattern_take_time_in_proportion(unit: str) -> None:
    def least_s(characters: int) -> float:
        pattern, least_s = (unit * characters)[:characters], inf
        for _ in range(10):
            with ProcessorTime() as work, suppress(InvalidRequest):
                check_pattern(pattern, "p")
            least_s = min(least_s, work.taken_s)
        return least_s

    # In proportion to their square it would be 16 times as much. What is refused at once takes no time to speak of.
    assert least_s(PATTERN_CHARACTERS_MAX) < 8 * least_s(PATTERN_CHARACTERS_MAX // 4) + 0.001


def test_a_large_schema_is_checked_quickly() -> None:
    schema = {
        "properties": {f"property {number}": {"$ref": "#/$defs/a"} for number in range(6000)},
        "$defs": {"a": {"type": "string"}},
    }
    assert len(msgspec.json.encode(schema)) > 200_000
    with ProcessorTime() as work:
        check_schema(schema, "s")
    assert work.taken_s < 1.0


def test_a_long_key_with_many_children_takes_little_memory() -> None:
    schema: dict[str, Any] = {"properties": {"k" * 100_000: {"anyOf": [{}] * 4000}}}
    tracemalloc.start()
    check_schema(schema, "s")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # With the key in the path of each child they would be 400 MB.
    assert peak_bytes < 16 << 20


def test_the_path_of_a_refusal_is_short() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_schema({"properties": {"k" * 1000: {"type": "x"}}}, "s")
    assert caught.value.param == f"s.properties.{'k' * 80}.type"


@pytest.mark.parametrize("end", [{}, True])
def test_a_long_chain_of_references_is_checked_quickly(end: Any) -> None:
    links = {f"a{number}": {"$ref": f"#/$defs/a{number - 1}"} for number in range(1, 6001)}
    with ProcessorTime() as work:
        check_schema({"$defs": {**links, "a0": end}}, "s")
    # Were each link followed to the end, 18 million would be.
    assert work.taken_s < 2.0


def with_properties(count: int, **counts: int) -> dict[str, Any]:
    return {"properties": {f"p{number}": {} for number in range(count)}, **counts}


def test_counts_of_many_properties_are_refused() -> None:
    most = COUNTED_PROPERTIES_MAX
    check_schema(with_properties(10 * most), "s")
    check_schema(with_properties(most, maxProperties=1), "s")
    check_schema({"anyOf": [with_properties(most // 2, minProperties=1)] * 4}, "s")
    for schema, path in [
        (with_properties(most + 1, maxProperties=1), "s.maxProperties"),
        (with_properties(most + 1, minProperties=1), "s.minProperties"),
        # The last is checked first.
        ({"anyOf": [with_properties(most // 2, minProperties=1)] * 5}, "s.anyOf[0].minProperties"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            check_schema(schema, "s")
        assert caught.value.param == path


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog", "hound"]
    age: Annotated[int, Field(ge=0, lt=30)] = 3


class Owner(BaseModel):
    """What pydantic writes for references, alternatives and defaults."""

    model_config = ConfigDict(extra="forbid")
    first: Cat = Field(description="a reference beside annotations", title="First", examples=[{"kind": "cat"}])
    second: Cat | None = Field(None, deprecated=True)
    third: Cat | Dog = Field(discriminator="kind", default=Dog(kind="dog"))
    names: list[Annotated[str, Field(max_length=9)]] = Field(default=[], min_length=1)


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_what_pydantic_writes_passes(mode: Literal["validation", "serialization"]) -> None:
    schema = Owner.model_json_schema(mode=mode)
    check_schema(schema, "s")
    # Its first version puts a reference beside annotations into an `allOf`.
    schema["properties"]["first"]["allOf"] = [{"$ref": schema["properties"]["first"].pop("$ref")}]
    check_schema(schema, "s")


LENGTHS: list[dict[str, Any]] = [
    {"type": "string", "minLength": 1, "maxLength": 3},
    {"type": "string", "minLength": 2},
    {"type": "string", "maxLength": 2},
    {"type": ["string", "null"], "maxLength": 2},
]


@pytest.mark.parametrize("schema", LENGTHS, ids=json.dumps)
@given(text=st.text(max_size=4))
def test_a_pattern_for_lengths_allows_the_same_texts_if_they_need_no_escape(schema: dict[str, Any], text: str) -> None:
    spelled = dict(schema)
    spell_lengths(spelled)
    assert spelled.keys() == {"type", "pattern"}
    plain = json.dumps(text, ensure_ascii=False) == f'"{text}"'
    valid = Draft202012Validator(schema).is_valid(text)  # pyright: ignore[reportUnknownMemberType]
    assert bool(re.search(spelled["pattern"].replace("$", r"\Z"), text)) is (plain and valid)


def test_a_length_beyond_what_patterns_count_is_cut() -> None:
    schema: dict[str, Any] = {"type": "string", "maxLength": 2**53}
    spell_lengths(schema)
    assert schema["pattern"].endswith("{0,1000000000}$")


def test_only_lengths_that_are_enforced_become_patterns() -> None:
    schema: dict[str, Any] = {
        "properties": {"minLength": {"type": "integer", "maxLength": 2}, "a": {"enum": ["a"], "maxLength": 1}},
        "const": {"minLength": 1},
    }
    before = copy.deepcopy(schema)
    spell_lengths(schema)
    assert schema == before
