"""Checks of bodies beside those of their types: how much they hold, and the words for what their types refuse. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec
from pydantic import ValidationError

from baton.errors import InvalidRequest
from baton_gateway.fields import hint
from baton_gateway.tool_bodies import TOOLS_MAX

FIELDS_MAX: Final = 128
MESSAGES_MAX: Final = 65_536
PARTS_MAX: Final = 65_536
"""Content parts of all messages together."""
PROMPTS_MAX: Final = 128
LOGIT_BIAS_MAX: Final = 1024
NESTED: Final = ("include_usage", "include_obfuscation", "continuous_usage_stats", "text", "type")
"""Fields of objects in bodies that take no others."""
KEYED: Final = ("logit_bias", "metadata")
"""Fields whose keys clients choose."""
KEY_CHARACTERS_MAX: Final = 40
"""Longest key in the path of an error; a longer one is cut."""
_END_BYTES: Final = 64
_HALF_PAIR: Final = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?:[^\\].{0,4}|\\[^u].{0,3})\Z", re.DOTALL
)
"""First half of a UTF-16 pair, followed to the end by fewer bytes than the second half has, which are not it."""


def explain_json(payload: bytes | bytearray, error: msgspec.DecodeError | UnicodeDecodeError) -> InvalidRequest:
    """Return the error of a body that is no JSON."""
    if not payload.strip():
        return InvalidRequest("the body is empty; this endpoint takes a JSON object")
    if isinstance(error, UnicodeDecodeError):
        return InvalidRequest("the body is not valid UTF-8")
    said = str(error)
    if "truncated" in said:
        # msgspec says the same of half a pair near the end of a body that is complete.
        half = _HALF_PAIR.search(payload[-_END_BYTES:])
        said = f"invalid UTF-16 escape: `{half[1].decode()}` is half of a surrogate pair" if half else "it is cut short"
    return InvalidRequest(f"the body is not valid JSON: {said}")


def check_counts(given: Mapping[str, object]) -> None:
    """Raise InvalidRequest if the body has too many fields, prompts, messages or biases to validate."""
    if len(given) > FIELDS_MAX:
        raise InvalidRequest(f"the body has {len(given)} fields; this server takes at most {FIELDS_MAX}")
    prompt, messages, bias = given.get("prompt"), given.get("messages"), given.get("logit_bias")
    if isinstance(tools := given.get("tools"), list):
        _check_count(cast("Sequence[object]", tools), "tools", TOOLS_MAX)
    if isinstance(prompt, list):
        several = cast("Sequence[object]", prompt)
        # One prompt of token ids may be as long as the body; only the number of prompts is bounded.
        if several and isinstance(several[0], (str, list)):
            _check_count(several, "prompt", PROMPTS_MAX)
    if isinstance(messages, list):
        _check_count(cast("Sequence[object]", messages), "messages", MESSAGES_MAX)
    if isinstance(bias, dict):
        _check_count(cast("dict[str, object]", bias), "logit_bias", LOGIT_BIAS_MAX)


def _check_count(values: Sequence[object] | Mapping[str, object], param: str, most: int) -> None:
    if len(values) > most:
        raise InvalidRequest(f"`{param}` has {len(values)} items; this server takes at most {most}", param=param)


def check_messages(messages: object) -> None:
    """Raise InvalidRequest for messages that need more than text, and for too many content parts."""
    parts = 0
    for index, message in enumerate(cast("list[object]", messages) if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            parts += _refuse_unsupported_message(cast("dict[str, Any]", message), f"messages[{index}]")
        if parts > PARTS_MAX:
            raise InvalidRequest(f"the messages have more than {PARTS_MAX} content parts", param="messages")


def _refuse_unsupported_message(message: Mapping[str, Any], where: str) -> int:
    """Return the number of content parts. Raises InvalidRequest for functions and for parts other than text."""
    if message.get("audio") is not None:
        raise InvalidRequest(f"`{where}.audio` is not supported by this server: it takes text only", param=where)
    if message.get("role") == "function" or message.get("function_call"):
        raise InvalidRequest(
            f"`{where}` uses functions, which are not supported by this server: use tools", param=where
        )
    content = message.get("content")
    parts = cast("list[object]", content) if isinstance(content, list) else []
    taken = ("text", "refusal") if message.get("role") == "assistant" else ("text",)
    for part in parts:
        kind = cast("dict[str, object]", part).get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in taken:
            raise InvalidRequest(
                f"`{where}.content` has a part of type {kind[:40]!r}; this server takes text only, "
                "no images, audio or files",
                param=where,
            )
    return len(parts)


def key_path(key: str) -> str:
    """Return a key that a client chose, as the paths of errors have it."""
    key = key[:KEY_CHARACTERS_MAX]
    return f".{key}" if key.isidentifier() else f'["{key}"]'


def explain(error: ValidationError) -> InvalidRequest:
    """Return the most specific of pydantic's errors; for a union, pydantic reports one per member."""
    complaints = error.errors(include_url=False, include_context=False, include_input=False)
    deepest = max(len(complaint["loc"]) for complaint in complaints)
    # The error of the union member with the right type is the useful one.
    first = min(complaints, key=lambda e: (deepest - len(e["loc"]), e["type"].endswith("_type")))
    param = ""
    for place, part in enumerate(first["loc"]):
        if isinstance(part, int):
            param += f"[{part}]"
        elif place == 1 and param in KEYED:
            param += key_path(part)
        elif part.isidentifier():
            # Pydantic names union members in the path, such as `constrained-str`: no field of the body.
            param += f".{part}" if param else part
    param = param.removesuffix(".str").removesuffix(".int") or "body"
    if first["type"] == "extra_forbidden":
        said = f"`{param}`: this server does not know this field{hint(str(first['loc'][-1]), NESTED)}"
        return InvalidRequest(said, param=param)
    # Pydantic names its model's class, too.
    said = first["msg"].partition(" or instance of ")[0]
    return InvalidRequest(f"`{param}`: {said[0].lower()}{said[1:]}", param=param)
