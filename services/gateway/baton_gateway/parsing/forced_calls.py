"""Constraints to tool calls, as xgrammar's structural tags: an answer that must have calls has them in the model's own
format. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Final, cast

from baton_gateway.parsing.formats import CallSyntax
from baton_gateway.parsing.python_calls import arguments_format

SPACES_MAX: Final = 8
"""Most white space between two parts of the arguments: models with any weights come to the end of it."""
_PLACES: Final = re.compile(r"\{(index|arguments)\}")
_MARK: Final = re.compile(r"<[^<>]+>")
_LENGTHS: Final = frozenset({"minLength", "maxLength"})
_INDEX: Final = {"type": "regex", "pattern": "[0-9]{1,3}"}
_JSON_BEGINS: Final = re.compile(r'["{0-9tfn-]|\[[\s"{\[\]0-9tfn-]')
"""Beginning of a JSON value, of one or two characters."""


class Reasoning(Enum):
    """Place of reasoning in an answer before its calls."""

    NONE = auto()
    OPTIONAL = auto()
    BEGUN = auto()
    """The prompt ends within it."""


def reasoning_of(syntax: CallSyntax, prefix: str, *, reasons: bool) -> Reasoning:
    """Return the place of reasoning. `prefix`: the beginning of the answer in the prompt; `reasons`: whether the model
    does at all."""
    begin, end = syntax.reasoning
    if prefix.rfind(begin) > prefix.rfind(end):
        return Reasoning.BEGUN
    return Reasoning.OPTIONAL if reasons and not prefix.strip() else Reasoning.NONE


def calls_format(
    syntax: CallSyntax, tools: Mapping[str, object], *, parallel: bool, reasoning: Reasoning = Reasoning.NONE
) -> dict[str, Any]:
    """Return the format of answers that have at least one call. `tools`: the schema of each one's arguments."""
    calls = {
        "type": "tags_with_separator",
        "tags": [_tag(syntax, name, schema) for name, schema in tools.items()],
        "separator": syntax.between,
        "at_least_one": True,
        "stop_after_first": not (parallel and syntax.parallel),
    }
    return _sequence([*_reasoning(syntax, reasoning), _text(syntax.before), calls, _text(syntax.after)])


def calls_or_json(calls: dict[str, Any], schema: object) -> dict[str, Any]:
    """Return the format of answers that are either calls or JSON of this schema."""
    return {"type": "or", "elements": [calls, {"type": "json_schema", "json_schema": schema}]}


def opening_of(syntax: CallSyntax) -> str:
    """Return the two characters with which calls begin if they tell calls from JSON; empty if they do not."""
    opening = (syntax.before + syntax.call)[:2]
    return "" if _JSON_BEGINS.match(opening) else opening


def _tag(syntax: CallSyntax, name: str, schema: object) -> dict[str, Any]:
    """Return one call, from the text before its first place with a choice to the text after its last."""
    options: dict[str, Any] = {"max_whitespace_cnt": SPACES_MAX}
    if syntax.style == "python":
        arguments = arguments_format(cast("dict[str, Any]", schema), options)
    else:
        arguments = {"type": "json_schema", "json_schema": schema, **options}
    if syntax.style in ("qwen_xml", "glm_xml"):
        # White space beside a tag is read as part of the value; xgrammar takes no less than one character.
        arguments |= {"style": syntax.style, "max_whitespace_cnt": 1}
    places = {"index": _INDEX, "arguments": arguments}
    begin, *between, end = _PLACES.split(syntax.call.replace("{name}", name))
    if (mark := _MARK.search(end)) and not _bounds_length(schema):
        # Within a text the mark would end the call. xgrammar 0.2.7 ignores this, and 0.2.8 does not bound the length
        # of texts beside it.
        arguments["excludes"] = [mark[0]]
    # Every second part is a place.
    content = _sequence([_text(part) if number % 2 else places[part] for number, part in enumerate(between)])
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _bounds_length(schema: object) -> bool:
    if isinstance(schema, dict):
        keywords = cast("dict[str, object]", schema)
        return not _LENGTHS.isdisjoint(keywords) or any(map(_bounds_length, keywords.values()))
    return isinstance(schema, list) and any(map(_bounds_length, cast("list[object]", schema)))


def _reasoning(syntax: CallSyntax, reasoning: Reasoning) -> list[dict[str, Any]]:
    if reasoning is Reasoning.NONE:
        return []
    begin, end = syntax.reasoning
    begun = reasoning is Reasoning.BEGUN
    thought = {"type": "tag", "begin": "" if begun else begin, "content": {"type": "any_text"}, "end": end}
    spaced = _sequence([thought, {"type": "regex", "pattern": "\n{0,2}"}])
    return [spaced if begun else {"type": "optional", "content": spaced}]


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _sequence(parts: list[dict[str, Any]]) -> dict[str, Any]:
    # xgrammar takes no sequence without parts.
    return {"type": "sequence", "elements": [part for part in parts if part.get("value") != ""] or parts[:1]}
