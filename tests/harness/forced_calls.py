"""Tools whose calls are enforced, and what an answer that was forced to call them must be."""

from __future__ import annotations

import json
from typing import Any, Final

from baton_gateway.constraints import format_constraint
from baton_gateway.parsing.calls import Call
from baton_gateway.parsing.forced_calls import calls_format
from baton_gateway.parsing.formats import FormatName, ParsingOptions, read_family
from baton_gateway.tool_bodies import Tool, schemas_of, text_parameters, trimmed_parameters
from jsonschema import Draft202012Validator

from baton.messages.attempts import Constraint
from tests.harness.gateway.samples import form_of

TOOLS: Final = [
    Tool.model_validate({"type": "function", "function": function})
    for function in (
        {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Paris", "Rome", "São Paulo"], "type": "string"},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                    "units": {"type": "array", "items": {"enum": ["C", "F"]}, "minItems": 1, "maxItems": 2},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
        {"name": "list-cities"},
    )
]


def tools_of(family: FormatName) -> list[Tool]:
    """Return the tools that a family can call: Python's names have no dash."""
    return TOOLS[:1] if family is FormatName.LLAMA4_PYTHONIC else TOOLS


def forced(family: FormatName, *, parallel: bool) -> Constraint:
    """Return the constraint to calls of `TOOLS` in a family's format."""
    syntax = read_family(family).calls
    assert syntax is not None
    return format_constraint(calls_format(syntax, schemas_of(tools_of(family)), parallel=parallel), "tools")


def calls_in(family: FormatName, text: str) -> list[Call]:
    """Return the calls of an answer, of which each is valid and nothing else is said."""
    options = ParsingOptions(
        tools=True, text_parameters=text_parameters(TOOLS), trimmed_parameters=trimmed_parameters(TOOLS)
    )
    parsed = form_of(family).parser(options).finish(text)
    assert not parsed.content.strip(), text
    schemas: dict[str, Any] = schemas_of(TOOLS)
    for call in parsed.calls:
        Draft202012Validator(schemas[call.name]).validate(json.loads(call.arguments))  # pyright: ignore[reportUnknownMemberType]
    return parsed.calls
