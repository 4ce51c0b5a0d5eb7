"""Structured output: the fields by which requests constrain an answer, and their one form on the bus. Pure.

| field | of | kind on the bus |
|---|---|---|
| `response_format` | OpenAI: `json_object`, `json_schema`; vLLM: `structural_tag` | json, structural_tag |
| `structured_outputs` | vLLM: `json`, `json_object`, `regex`, `choice`, `grammar`, `structural_tag` | all |
| `json_schema`, `regex`, `ebnf`, `structural_tag` | SGLang | json, regex, grammar, structural_tag |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, cast

import msgspec

from baton.errors import InvalidRequest
from baton.messages.attempts import Constraint, ConstraintKind
from baton_gateway.ebnf import REPETITIONS_MAX, is_crowded, multiplies_repetitions
from baton_gateway.json_schema import DEPTH_MAX, check_pattern, check_schema, is_within_depth, spell_lengths
from baton_gateway.places import CROWDED

FIELDS: Final = ("response_format", "structured_outputs", "json_schema", "regex", "ebnf", "structural_tag")
BYTES_MAX: Final = 256 << 10
"""Length of a schema, grammar or tag, as JSON."""
CHOICES_MAX: Final = 4096
TAG_DEPTH_MAX: Final = DEPTH_MAX + 16
"""Depth of a structural tag, which holds schemas."""
GRAMMAR_BRACKETS_MAX: Final = 64
"""Depth of brackets within brackets in a grammar."""

_ANY_OBJECT: Final = {"type": "object"}
_NAME_CHARACTERS_MAX: Final = 64


def constraint_of(fields: Mapping[str, object]) -> Constraint | None:
    """Return the constraint that a request's fields state, or None.

    Raises InvalidRequest, with the path of the offending key, for one that is malformed or more than one.
    """
    stated = [(name, fields[name]) for name in FIELDS if fields.get(name) is not None]
    found = [(name, each) for name, value in stated if (each := _BY_FIELD[name](value, name)) is not None]
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise InvalidRequest(f"`{first}` and `{second}` both constrain the answer: give one of them", param=second)
    return found[0][1] if found else None


def field_of(fields: Mapping[str, object]) -> str:
    """Return the path of the field that states the one constraint that `constraint_of` has found."""
    # Beside it there may be a `response_format` of `text`, which is the first of FIELDS.
    name = [name for name in FIELDS if fields.get(name) is not None][-1]
    if name != "structured_outputs":
        return name
    parts = cast("dict[str, object]", fields[name])
    return next(f"{name}.{key}" for key, part in parts.items() if part not in (None, False))


def json_constraint(schema: object, where: str) -> Constraint:
    """Return the constraint to JSON of this schema, which is an object or its text."""
    schema = _decoded(schema, where)
    # The length bounds the work of the checks.
    text = _encoded(schema, where)
    check_schema(schema, where)
    if "Length" in text:
        # The request keeps its own.
        spelled = cast("dict[str, object]", msgspec.json.decode(text))
        spell_lengths(spelled)
        text = msgspec.json.encode(spelled).decode()
    return Constraint(kind=ConstraintKind.JSON, text=text)


def regex_constraint(pattern: object, where: str) -> Constraint:
    check_pattern(pattern, where)
    return Constraint(kind=ConstraintKind.REGEX, text=cast("str", pattern))


def choice_constraint(choices: object, where: str) -> Constraint:
    """Return the constraint to one of these texts, as a grammar, since engines differ in their own forms."""
    if not isinstance(choices, list) or not 0 < len(cast("list[object]", choices)) <= CHOICES_MAX:
        raise InvalidRequest(f"`{where}` is a list of 1 to {CHOICES_MAX} texts", param=where)
    for index, choice in enumerate(cast("list[object]", choices)):
        if not isinstance(choice, str) or not choice:
            raise InvalidRequest(f"`{where}[{index}]` is a text, and not empty", param=f"{where}[{index}]")
    quoted = (f'"{"".join(map(_escaped, choice))}"' for choice in cast("list[str]", choices))
    return Constraint(kind=ConstraintKind.GRAMMAR, text=_bounded(f"root ::= {' | '.join(quoted)}", where))


def grammar_constraint(grammar: object, where: str) -> Constraint:
    """Return the constraint to a grammar in EBNF."""
    # Without a rule in EBNF vLLM would read the text as Lark's.
    if not isinstance(grammar, str) or "::=" not in grammar:
        raise InvalidRequest(f'`{where}` is a grammar in EBNF, of rules as `root ::= "a"`', param=where)
    if "\0" in grammar:
        raise InvalidRequest(f"`{where}`: a grammar has no NUL character", param=where)
    text = _bounded(grammar, where)
    if text.count("(") > GRAMMAR_BRACKETS_MAX and _bracket_depth(text) > GRAMMAR_BRACKETS_MAX:
        raise InvalidRequest(f"`{where}`: brackets are nested at most {GRAMMAR_BRACKETS_MAX} deep", param=where)
    if multiplies_repetitions(text):
        said = f"`{where}`: counts of repetitions within repetitions multiply to at most {REPETITIONS_MAX}"
        raise InvalidRequest(said, param=where)
    if is_crowded(text):
        raise InvalidRequest(f"`{where}`: {CROWDED}", param=where)
    return Constraint(kind=ConstraintKind.GRAMMAR, text=text)


def tag_constraint(tag: object, where: str) -> Constraint:
    """Return the constraint to xgrammar's structural tag, which is an object or its text."""
    tag = _decoded(tag, where)
    text = _encoded(tag, where)
    if not is_within_depth(tag, TAG_DEPTH_MAX):
        raise InvalidRequest(f"`{where}` is nested more than {TAG_DEPTH_MAX} deep", param=where)
    parts = cast("dict[str, object]", tag)
    if not isinstance(parts.get("format"), dict) and not isinstance(parts.get("structures"), list):
        raise InvalidRequest(f"`{where}` is a structural tag, an object with a `format`", param=where)
    _check_tag(parts, where)
    return Constraint(kind=ConstraintKind.STRUCTURAL_TAG, text=text)


def format_constraint(form: Mapping[str, object], where: str) -> Constraint:
    """Return the constraint to a structural tag's format that this server made of checked schemas."""
    text = _encoded({"type": "structural_tag", "format": form}, where)
    return Constraint(kind=ConstraintKind.STRUCTURAL_TAG, text=text)


def _check_tag(part: object, where: str) -> None:
    """Check the schemas and patterns within a structural tag."""
    if isinstance(part, list):
        for index, each in enumerate(cast("list[object]", part)):
            _check_tag(each, f"{where}[{index}]")
    elif isinstance(part, dict):
        for key, value in cast("dict[str, object]", part).items():
            if key in ("json_schema", "schema") and isinstance(value, dict):
                check_schema(cast("object", value), f"{where}.{key}")
            elif key == "pattern":
                check_pattern(value, f"{where}.{key}")
            elif key == "grammar" and isinstance(value, str):
                grammar_constraint(value, f"{where}.{key}")
            else:
                _check_tag(value, f"{where}.{key[:80]}")


def _response_format(value: object, where: str) -> Constraint | None:
    form = _object(value, where)
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return json_constraint(_ANY_OBJECT, where)
        case "json_schema":
            inner = _object(form.get("json_schema"), f"{where}.json_schema")
            name, strict = inner.get("name"), inner.get("strict")
            if not isinstance(name, str) or not 0 < len(name) <= _NAME_CHARACTERS_MAX:
                said = f"`{where}.json_schema.name` is a name of 1 to {_NAME_CHARACTERS_MAX} characters"
                raise InvalidRequest(said, param=f"{where}.json_schema.name")
            # The schema is enforced either way: a request that is not strict allows less, and nothing needs less.
            if not isinstance(strict, bool | None):
                raise InvalidRequest(
                    f"`{where}.json_schema.strict` is true or false", param=f"{where}.json_schema.strict"
                )
            return json_constraint(inner.get("schema"), f"{where}.json_schema.schema")
        case "structural_tag":
            return tag_constraint(cast("object", form), where)
        case other:
            kinds = "text, json_object, json_schema or structural_tag"
            raise InvalidRequest(f"`{where}.type` is {kinds}, not {str(other)[:40]!r}", param=f"{where}.type")


def _structured_outputs(value: object, where: str) -> Constraint | None:
    kinds: dict[str, Callable[[object, str], Constraint]] = {
        "json": json_constraint,
        "json_object": _any_object,
        "regex": regex_constraint,
        "choice": choice_constraint,
        "grammar": grammar_constraint,
        "structural_tag": tag_constraint,
    }
    stated = {key: each for key, each in _object(value, where).items() if each not in (None, False)}
    for key in stated:
        if key not in kinds:
            path = f"{where}.{key[:80]}"
            raise InvalidRequest(f"`{path}` is not supported: set it in the engine's options", param=path)
    if len(stated) != 1:
        raise InvalidRequest(f"`{where}` has exactly one of {', '.join(kinds)}", param=where)
    (key,) = stated
    return kinds[key](stated[key], f"{where}.{key}")


def _any_object(wanted: object, where: str) -> Constraint:
    if wanted is not True:
        raise InvalidRequest(f"`{where}` is true, or left out", param=where)
    return json_constraint(_ANY_OBJECT, where)


_BY_FIELD: Final[Mapping[str, Callable[[object, str], Constraint | None]]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "json_schema": json_constraint,
    "regex": regex_constraint,
    "ebnf": grammar_constraint,
    "structural_tag": tag_constraint,
}


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"`{where}` is an object", param=where)
    return cast("dict[str, object]", value)


def _decoded(value: object, where: str) -> object:
    """Return an object that may be given as its JSON."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(_bounded(value, where))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"`{where}` is not valid JSON: {error}", param=where) from error


def _encoded(value: object, where: str) -> str:
    _object(value, where)
    try:
        return _bounded(msgspec.json.encode(value).decode(), where)
    except (OverflowError, ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"`{where}` cannot be passed on: {error}", param=where) from error


def _bounded(text: str, where: str) -> str:
    if len(text.encode()) > BYTES_MAX:
        raise InvalidRequest(f"`{where}` is longer than {BYTES_MAX} bytes", param=where)
    return text


def _escaped(character: str) -> str:
    """Return a character as an EBNF literal has it."""
    if character in '"\\':
        return f"\\{character}"
    return f"\\u{ord(character):04x}" if character < " " or character == "\x7f" else character


def _bracket_depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest
