"""Tool calls read from the text that a model wrote for them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final, cast

import msgspec

from baton_gateway.parsing.formats import ParsingOptions

MALFORMED: Final = (
    ValueError,
    LookupError,
    TypeError,
    SyntaxError,
    RecursionError,
    MemoryError,
    msgspec.ValidationError,
)
"""Errors of readers on a text that is no call."""


class Call(msgspec.Struct, frozen=True):
    """A call as the model wrote it."""

    name: str
    arguments: str
    """A JSON object."""
    id: str = ""
    """The model's own id; empty in formats without ids."""


def calls_of(value: object, options: ParsingOptions | None = None) -> list[Call]:
    """Return the calls in a region's value: an object of OpenAI's form, or a list of them. Raises one of `MALFORMED`.

    `options`: for formats that write all arguments as text. None: arguments have their types.
    """
    listed = cast("list[object]", value) if isinstance(value, list) else [value]
    if not listed:
        raise ValueError("no call")
    return [_call(each, options) for each in listed]


def _call(value: object, options: ParsingOptions | None) -> Call:
    described = msgspec.convert(value, dict[str, Any])
    function = msgspec.convert(described["function"], dict[str, Any])
    name = msgspec.convert(function["name"], str).strip()
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):  # Some models write the object as a string in JSON.
        arguments = json.loads(arguments)
    arguments = msgspec.convert({} if arguments is None else arguments, dict[str, Any])
    if options is not None:
        texts, trimmed = options.text_parameters.get(name, ()), options.trimmed_parameters.get(name, ())
        arguments = {
            key: text.strip() if key in trimmed else text if key in texts else _typed(text)
            for key, text in arguments.items()
        }
    own_id = described.get("id")
    return make_call(name, arguments, own_id if isinstance(own_id, str) else "")


def make_call(name: str, arguments: Mapping[str, object], own_id: str = "") -> Call:
    """Return the call. Raises ValueError if it has no name or cannot be written as JSON in UTF-8."""
    if not name:
        raise ValueError("a call without a name")
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + written + own_id).encode()  # Half a surrogate pair cannot be sent.
    return Call(name, written, own_id)


def _typed(text: object) -> object:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)


def _finite(text: str) -> float:
    # Python reads `Infinity` and `1e999`, which cannot be written as JSON: they are text.
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("no number of JSON")
    return number


def call_id(request: str, index: int, *, prefix: str, chars: int) -> str:
    """Return the id of an answer's call: always the same one, since an answer may be produced again."""
    return prefix + blake2b(f"{request}/{index}".encode(), digest_size=16).hexdigest()[:chars]
