"""Checks of JSON schemas and regular expressions that constrain an answer, before a worker is chosen. Pure.

Engines ignore what they do not know, and then generate answers that the schema forbids: a misspelt type, a `$ref` that
points nowhere, a keyword that no grammar enforces. Each is refused here, with its path. Patterns are bounded by the
work that they can cause in an engine's step; the rest of their syntax is the engine's to judge.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Final, NamedTuple, cast
from urllib.parse import unquote

from baton.errors import InvalidRequest
from baton_gateway.places import CROWDED, Parser, Part, crowds_places, one_of

DEPTH_MAX: Final = 64
PATTERN_CHARACTERS_MAX: Final = 4096
PATTERN_GROUPS_MAX: Final = 64
"""Depth of groups within groups."""
PATTERN_STEPS_MAX: Final = 10_000
"""Bound on the characters of a pattern, each counted as often as its repetitions allow."""
OPEN_REPETITIONS: Final = 8
"""Count of a repetition without an end, in `PATTERN_STEPS_MAX`: nested ones cost as much as long ones."""
PATH_CHARACTERS_MAX: Final = 256
COUNTED_PROPERTIES_MAX: Final = 64
"""Bound on the properties beside `minProperties` or `maxProperties`; for several objects, on the root of their squares.

xgrammar's rules for them grow with the square, and the time to compile these faster: 64 take 0.2 s, 150 take 4 s.
"""
BOUNDED_TEXTS_MAX: Final = 256
"""Texts with bounds of their length in a schema: each is compiled on its own."""
PATTERN_COUNT_MAX: Final = 10**9
"""Highest count in a pattern that stands for a length: xgrammar's are 32 bits long, and no answer is longer."""
REFERENCE_CHARACTERS_MAX: Final = 1024
KEY_CHARACTERS_MAX: Final = 80
"""Longest key in a path; a longer one is cut."""

_TYPES: Final = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_SCHEMA: Final = frozenset(
    {"additionalItems", "additionalProperties", "contains", "items", "propertyNames", "unevaluatedItems",
     "unevaluatedProperties"}
)  # fmt: skip
_SCHEMAS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED_SCHEMAS: Final = frozenset({"$defs", "definitions", "patternProperties", "properties"})
_NOT_ENFORCED: Final = frozenset(
    {"$dynamicRef", "$recursiveRef", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "not",
     "then"}
)  # fmt: skip
_ASSERTIONS: Final = _SCHEMA | _SCHEMAS | frozenset(
    {"$ref", "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxContains", "maxItems", "maxLength",
     "maxProperties", "maximum", "minContains", "minItems", "minLength", "minProperties", "minimum", "multipleOf",
     "pattern", "patternProperties", "properties", "required", "type", "uniqueItems"}
)  # fmt: skip
_ALONE: Final = {"$ref": {"$ref"}, "anyOf": {"anyOf", "type"}, "oneOf": {"oneOf", "type"}, "allOf": {"allOf", "type"}}
"""Keywords beside which xgrammar ignores all other assertions, and the assertions that are let through with each.

A `type` beside alternatives repeats theirs in what generators write.
"""
_COUNTS: Final = (
    ("minLength", "maxLength"),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
    ("minContains", "maxContains"),
)
_LENGTHS: Final = frozenset({"minLength", "maxLength"})
_TEXTS: Final = frozenset({"const", "enum", "format", "pattern"})
"""Keywords beside which xgrammar ignores lengths."""
_NUMBERS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")

_CHARACTER: Final = (
    r"[ !#-\[\]-~\x7f"
    "\x80-\u07ff\u0800-\u0fff\u1000-\ucfff\ud000-\ud7ff\ue000-\uffff"
    "\U00010000-\U0003ffff\U00040000-\U000fffff\U00100000-\U0010ffff]"
)
"""Pattern of one character of a text in JSON that needs no escape.

In each range all characters have one form in UTF-8, since xgrammar 0.2.7 reads others wrongly. A pattern with an
alternative for escapes would be computed in the engine's step.
"""
_IDENTIFIER: Final = re.compile(r"[A-Za-z_$][\w$]*", re.ASCII)
_TOKEN: Final = re.compile(
    r"\\.|\((?:\?(?:[:=!]|<[=!]|P?<\w+>))?|\[(?:\\.|[^\]\\])*(?:\]|$)|\{(\d*)(?:(,)(\d*))?\}|.", re.DOTALL
)
"""One token of a pattern: an escape, the beginning of a group, a class, a count, or a character."""
_ANCHORS: Final = ("^", "$", "\\b", "\\B")
"""Tokens that match between characters."""
_LOOKAROUNDS: Final = ("(?=", "(?!", "(?<=", "(?<!")
"""Tokens that begin look-around: xgrammar 0.2 ignores look-ahead in a schema's patterns."""
_ESCAPES: Final = frozenset("DSWacdefknprstuvwxPbB0123456789")
"""Letters and digits that mean something behind a backslash. xgrammar 0.2 takes any other for itself, such as `\\A`."""
_CLASS_ESCAPES: Final = _ESCAPES - frozenset("BPkp123456789")
"""The same within a class."""
_ESCAPE: Final = re.compile(
    r"\\(?P<kind>.)(?P<wrong>(?<=x)\{|(?<=0)[0-9]|(?<=u)[dD][89a-fA-F][0-9a-fA-F]{2})?", re.DOTALL
)
"""An escape, with what xgrammar 0.2 misreads behind its letter: `\\x{41}`, octal numbers, halves of surrogate pairs."""
_ESCAPED_IN_JSON: Final = re.compile(
    r"""[\x00-\x1f"]|\\(?:[\\"0aefnrtv]|c[A-Za-z]|(?:x|u00)(?:[01][0-9a-fA-F]|22|5[cC])
    |u\{0*(?:1?[0-9a-fA-F]|22|5[cC])\})""",
    re.VERBOSE,
)
"""A character that JSON writes as an escape. xgrammar 0.2 has it written as it is, so that the answer is no JSON."""


class _Below(NamedTuple):
    """A path, as links: only an error pays for its text."""

    parent: str | _Below
    key: str | int


def is_within_depth(value: object, depth_max: int) -> bool:
    """Return whether `value` has at most `depth_max` levels of nested containers."""
    if isinstance(value, dict):
        value = list(cast("dict[str, object]", value).values())
    if not isinstance(value, list):
        return True
    return depth_max > 0 and all(is_within_depth(inner, depth_max - 1) for inner in cast("list[object]", value))


def check_schema(schema: object, where: str) -> None:
    """Raise InvalidRequest with the path, from `where` on, of the first key that cannot be enforced."""
    if not isinstance(schema, dict):
        raise _wrong(where, "a schema is an object")
    if not is_within_depth(cast("object", schema), DEPTH_MAX):
        raise _wrong(where, f"a schema is nested at most {DEPTH_MAX} deep")
    root = cast("dict[str, object]", schema)
    ended: set[int] = set()
    counted = bounded = 0
    nodes = list(_subschemas(root, where))
    # What no keyword makes a schema is not checked here, so nothing may refer to it.
    schemas = {id(node) for node, _ in nodes}
    for node, path in nodes:
        _check_keywords(node, path)
        if key := next((key for key in ("minProperties", "maxProperties") if key in node), None):
            properties = node.get("properties")
            counted += len(cast("dict[str, object]", properties)) ** 2 if isinstance(properties, dict) else 0
            if counted > COUNTED_PROPERTIES_MAX**2:
                raise _wrong(_Below(path, key), f"stands beside more than {COUNTED_PROPERTIES_MAX} properties")
        bounded += _bounds_text(node)
        if bounded > BOUNDED_TEXTS_MAX:
            raise _wrong(path, f"more than {BOUNDED_TEXTS_MAX} texts have bounds of their length")
        _check_reference(node, path, root, schemas, ended)


def spell_lengths(schema: Mapping[str, object]) -> None:
    """Replace the bounds of texts' lengths in a checked schema by patterns.

    Into texts of a bounded length xgrammar 0.2 lets control characters and bytes that are no UTF-8.
    """
    for node, _ in _subschemas(schema, ""):
        if _bounds_text(node):
            least, most = (
                min(cast("int", node.pop(key)), PATTERN_COUNT_MAX) if key in node else ""
                for key in ("minLength", "maxLength")
            )
            node["pattern"] = f"^{_CHARACTER}{{{least or 0},{most}}}$"


def _bounds_text(schema: Mapping[str, object]) -> bool:
    """Return whether lengths are all that a schema says of a text."""
    kind = schema.get("type", "string")
    is_text = "string" in kind if isinstance(kind, list) else kind == "string"
    return is_text and not _LENGTHS.isdisjoint(schema) and _TEXTS.isdisjoint(schema)


def check_references(schema: Mapping[str, object], where: str, places: Sequence[str]) -> None:
    """Raise InvalidRequest, with the path, if a checked schema refers to a part that is in none of `places`."""
    for node, path in _subschemas(schema, where):
        reference = node.get("$ref")
        if isinstance(reference, str) and not reference.startswith(tuple(f"#/{place}/" for place in places)):
            raise _wrong(_Below(path, "$ref"), f"refers to a part of {' or '.join(f'`{place}`' for place in places)}")


def _subschemas(schema: Mapping[str, object], where: str) -> Iterator[tuple[dict[str, object], str | _Below]]:
    """Yield each schema and its path, parents first. Raises InvalidRequest for a subschema that is none."""
    pending: list[tuple[object, str | _Below]] = [(schema, where)]
    while pending:
        node, path = pending.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise _wrong(path, "a schema is an object or a boolean")
        keywords = cast("dict[str, object]", node)
        yield keywords, path
        for key in keywords:
            value, below = keywords[key], _Below(path, key)
            if key in _SCHEMAS or (key == "items" and isinstance(value, list)):
                if not isinstance(value, list) or not value:
                    raise _wrong(below, "is a list of schemas, and not empty")
                pending += [(each, _Below(below, index)) for index, each in enumerate(cast("list[object]", value))]
            elif key in _NAMED_SCHEMAS:
                if not isinstance(value, dict):
                    raise _wrong(below, "is an object of schemas by name")
                named = cast("dict[str, object]", value)
                if key == "patternProperties":
                    for name in named:
                        _check_json_pattern(name, below)
                pending += [(each, _Below(below, name)) for name, each in named.items()]
            elif key in _SCHEMA:
                pending.append((value, below))


def _check_keywords(schema: Mapping[str, object], path: str | _Below) -> None:
    for key in schema:
        if key in _NOT_ENFORCED:
            raise _wrong(_Below(path, key), "no engine enforces this keyword")
        ignored = (schema.keys() & _ASSERTIONS) - _ALONE[key] if key in _ALONE else ()
        if ignored:
            raise _wrong(_Below(path, key), f"no engine enforces `{min(ignored)}` beside it")
    if isinstance(every := schema.get("allOf"), list) and len(cast("list[object]", every)) > 1:
        raise _wrong(_Below(path, "allOf"), "no engine enforces more than one schema")
    if "type" in schema:
        _check_type(schema["type"], _Below(path, "type"))
    if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
        raise _wrong(_Below(path, "enum"), "is a list of values, and not empty")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in cast("list[object]", required)):
        raise _wrong(_Below(path, "required"), "is a list of names")
    properties = schema.get("properties", {})
    for index, name in enumerate(cast("list[str]", required)):
        if isinstance(properties, dict) and name not in properties:
            raise _wrong(_Below(_Below(path, "required"), index), "no engine enforces a name without a schema")
    for key in _NUMBERS:
        # A boolean is a number in Python, and `exclusiveMinimum: true` is JSON Schema of 2010.
        if key in schema and (isinstance(schema[key], bool) or not isinstance(schema[key], int | float)):
            raise _wrong(_Below(path, key), "is a number")
    for least, most in product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if least in schema and most in schema:
            lowest, highest = (cast("float", schema[key]) for key in (least, most))
            if lowest > highest or (lowest == highest and (least, most) != ("minimum", "maximum")):
                raise _wrong(_Below(path, least), f"leaves nothing below `{most}`")
    for least, most in _COUNTS:
        low, high = (_count(schema, key, path) for key in (least, most))
        if low is not None and high is not None and low > high:
            raise _wrong(_Below(path, least), f"is above `{most}`")
    for key in ("format", "pattern"):
        if key in schema and (lengths := _LENGTHS & schema.keys()):
            raise _wrong(_Below(path, min(lengths)), f"no engine enforces it beside `{key}`")
    if "pattern" in schema:
        _check_json_pattern(schema["pattern"], _Below(path, "pattern"))


def _check_type(kind: object, path: str | _Below) -> None:
    kinds = cast("list[object]", kind) if isinstance(kind, list) else [kind]
    if not kinds:
        raise _wrong(path, "is not empty")
    for each in kinds:
        if not isinstance(each, str) or each not in _TYPES:
            raise _wrong(path, f"{str(each)[:40]!r} is not one of {', '.join(sorted(_TYPES))}")


def _count(schema: Mapping[str, object], key: str, path: str | _Below) -> int | None:
    count = schema.get(key)
    if key in schema and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
        raise _wrong(_Below(path, key), "is a whole number of at least 0")
    return cast("int | None", count)


def _check_reference(
    schema: Mapping[str, object], path: str | _Below, root: dict[str, object], schemas: set[int], ended: set[int]
) -> None:
    """Follow `$ref` over `schemas` to one without it, or to one of `ended`, which gets those that were passed."""
    below, followed = _Below(path, "$ref"), {id(schema)}
    while "$ref" in schema and id(schema) not in ended:
        reference = schema["$ref"]
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise _wrong(below, "refers to a part of the same schema, as `#/$defs/name`")
        if len(reference) > REFERENCE_CHARACTERS_MAX:
            raise _wrong(below, f"has at most {REFERENCE_CHARACTERS_MAX} characters")
        target: object = root
        for part in reference.split("/")[1:]:
            target = _member(target, unquote(part).replace("~1", "/").replace("~0", "~"))
        if isinstance(target, bool):
            break
        if not isinstance(target, dict) or id(cast("object", target)) not in schemas:
            raise _wrong(below, f"there is no schema at {reference[:80]!r}")
        schema = cast("dict[str, object]", target)
        if id(schema) in followed:
            raise _wrong(below, "refers to itself")
        followed.add(id(schema))
    ended |= followed


def _member(container: object, name: str) -> object:
    if isinstance(container, dict):
        return cast("dict[str, object]", container).get(name)
    if isinstance(container, list) and name.isascii() and name.isdigit():
        items = cast("list[object]", container)
        return items[int(name)] if len(name) < 10 and int(name) < len(items) else None
    return None


def _check_json_pattern(pattern: object, where: str | _Below) -> None:
    """Check a pattern of texts in JSON, too, which a pattern can neither escape nor leave as they are.

    From a class with others, xgrammar leaves such characters out.
    """
    check_pattern(pattern, where)
    assert isinstance(pattern, str)
    for found in _TOKEN.finditer(pattern):
        token = found.group()
        if token[0] == "[":
            members = token[1:-1]
            escaped = members != "" and not _ESCAPED_IN_JSON.sub("", members)
        else:
            escaped = _ESCAPED_IN_JSON.match(pattern, found.start()) is not None
        if escaped:
            raise _wrong(where, f"no engine enforces {pattern[found.start() :][:8]!r}: JSON writes it as an escape")


def check_pattern(pattern: object, where: str | _Below) -> None:
    """Raise InvalidRequest if `pattern` is no text or empty, looks around, or could hold an engine's step up."""
    if not isinstance(pattern, str) or not pattern:
        raise _wrong(where, "is a regular expression, and not empty")
    if len(pattern) > PATTERN_CHARACTERS_MAX:
        raise _wrong(where, f"a regular expression has at most {PATTERN_CHARACTERS_MAX} characters")
    if "\0" in pattern:
        raise _wrong(where, "a regular expression has no NUL character")
    if "(?" in pattern and any(found.group() in _LOOKAROUNDS for found in _TOKEN.finditer(pattern)):
        raise _wrong(where, "no engine enforces look-ahead or look-behind")
    _check_dialect(pattern, where)
    if _steps(pattern, where) > PATTERN_STEPS_MAX:
        raise _wrong(where, "repetitions within repetitions make this regular expression too large")
    if _is_crowded(pattern):
        raise _wrong(where, f"a regular expression has {CROWDED}")


def _check_dialect(pattern: str, where: str | _Below) -> None:
    """Raise InvalidRequest for syntax that no engine refuses, and that xgrammar 0.2 takes for something else.

    In a schema's patterns it takes `a++` for `(a+)+`. It reads `(?i)` and `(?P<name>…)` there as Python does.
    """
    quantified = lazy = False
    for found in _TOKEN.finditer(pattern):
        token = found.group()
        if _repetitions(found) is None:
            quantified = lazy = False
            if token[0] == "\\" and (escape := _ESCAPE.match(pattern, found.start())):
                _check_escape(escape, _ESCAPES, where)
            elif token[0] == "[" and "\\" in token:
                for escape in _ESCAPE.finditer(token):
                    _check_escape(escape, _CLASS_ESCAPES, where)
        elif not quantified:
            quantified = True
        elif token == "?" and not lazy:
            lazy = True
        else:
            raise _wrong(where, f"no engine enforces a repetition of a repetition, such as `a+{token}`: use a group")


def _check_escape(escape: re.Match[str], known: frozenset[str], where: str | _Below) -> None:
    kind = escape["kind"]
    if escape["wrong"] or (kind.isascii() and kind.isalnum() and kind not in known):
        raise _wrong(where, f"no engine knows the escape `{escape.group()}`")


def _steps(pattern: str, where: str | _Below) -> int:
    """Return the number of atoms in `pattern`, each counted as often as the repetitions around it allow."""
    groups, last = [0], 0
    for found in _TOKEN.finditer(pattern):
        token = found.group()
        if token.startswith("("):
            groups.append(0)
            last = 0
            if len(groups) > PATTERN_GROUPS_MAX:
                raise _wrong(where, f"a regular expression has at most {PATTERN_GROUPS_MAX} groups within groups")
        elif token == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif (repetitions := _repetitions(found)) is not None:
            # `last` is in the sum once already.
            groups[-1] += last * (repetitions - 1)
            last *= repetitions
        else:
            last = 1
            groups[-1] += 1
    return sum(groups)


def _is_crowded(pattern: str) -> bool:
    rules = dict[str, list[list[Part]]]()
    parser = Parser(rules)
    parser.begin("")
    for found in _TOKEN.finditer(pattern):
        token = found.group()
        if token.startswith("("):
            parser.open()
        elif token == ")":
            parser.close()
        elif token == "|":
            parser.alternative()
        elif token in ("?", "*", "+"):
            parser.quantify(token, "")
        elif _repetitions(found) is not None:
            parser.quantify("", token[1:-1])
        elif token not in _ANCHORS:
            parser.add(one_of(token))
    parser.end()
    return crowds_places(rules)


def _repetitions(found: re.Match[str]) -> int | None:
    """Return the most repetitions that a token of a pattern allows, or None if it is no quantifier."""
    token = found.group()
    if token in ("*", "+"):
        return OPEN_REPETITIONS
    if not token.startswith("{") or token == "{":
        return 1 if token == "?" else None
    least, comma, most = found.groups()
    # The digits are as many as the pattern is long: a count beyond the bound need not be exact.
    counts = [min(int(digits[:9]), PATTERN_STEPS_MAX + 1) for digits in (least, most) if digits]
    return max([*counts, OPEN_REPETITIONS if comma and not most else 1, 1])


def _wrong(path: str | _Below, why: str) -> InvalidRequest:
    text = _text(path)
    if len(text) > PATH_CHARACTERS_MAX:
        text = f"{text[: PATH_CHARACTERS_MAX // 2]}…{text[-PATH_CHARACTERS_MAX // 2 :]}"
    return InvalidRequest(f"`{text}`: {why}", param=text)


def _text(path: str | _Below) -> str:
    parts: list[str] = []
    while isinstance(path, _Below):
        path, key = path
        if isinstance(key, int):
            parts.append(f"[{key}]")
        else:
            key = key[:KEY_CHARACTERS_MAX]
            parts.append(f".{key}" if _IDENTIFIER.fullmatch(key) else f'["{key}"]')
    return path + "".join(reversed(parts))
