"""Calls in Python syntax, such as `[weather(city="Rome")]`: how they are read and how they are enforced. Pure."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from typing import Any, Final, cast
from unicodedata import normalize

from baton.errors import InvalidRequest
from baton_gateway.json_schema import check_references
from baton_gateway.parsing.calls import Call, make_call

SEPARATOR: Final = ", "
_JSON_NAMES: Final = {"true": True, "false": False, "null": None}
_DEFINITIONS: Final = ("$defs", "definitions")
_OF_ALL_ARGUMENTS: Final = ("maxProperties", "minProperties", "patternProperties", "propertyNames")
"""Keywords that a form of single arguments cannot enforce."""


def python_calls(text: str) -> list[Call]:
    """Return the calls in a list of Python calls. Raises one of `MALFORMED`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Strings with unknown escapes are the model's business.
        tree = ast.parse(text.strip(), mode="eval").body
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("no list of calls")
    return [_call(node) for node in tree.elts]


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call, or one with arguments without names")
    arguments: dict[str, object] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("arguments without names")
        arguments[keyword.arg] = ast.literal_eval(_JsonLiterals().visit(keyword.value))
    return make_call(ast.unparse(node.func), arguments)


class _JsonLiterals(ast.NodeTransformer):
    """Reads what JSON writes otherwise than Python: `true`, `false`, `null`, and characters as surrogate pairs."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id])

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, str) and not node.value.isascii():
            return ast.Constant(node.value.encode("utf-16", "surrogatepass").decode("utf-16"))
        return node


def check_tool(name: str, schema: Mapping[str, Any], where: str) -> None:
    """Raise InvalidRequest, with the path from `where` on, if calls of a tool have no form in Python syntax.

    `schema`: that of the arguments, which is checked already.
    """
    if not all(map(_is_identifier, name.split("."))):
        raise _unwritten(f"{where}.name", f"the name {name!r}")
    where = f"{where}.parameters"
    for argument in schema.get("properties", {}):
        if not _is_identifier(argument):
            raise _unwritten(f"{where}.properties", f"the argument {argument[:80]!r}")
    for keyword in _OF_ALL_ARGUMENTS:
        if keyword in schema:
            raise _unwritten(f"{where}.{keyword}", f"`{keyword}`")
    check_references(schema, where, _DEFINITIONS)


def _is_identifier(name: str) -> bool:
    # Python reads names in this normal form.
    return name.isidentifier() and not iskeyword(name) and normalize("NFKC", name) == name


def _unwritten(path: str, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"`{path}`: calls of this model are in Python syntax, which has no form for {what}", param=path
    )


def arguments_format(schema: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format of a call's arguments, required ones first. `options`: those of each value's format."""
    shared = {key: schema[key] for key in _DEFINITIONS if key in schema}
    arguments = {
        name: _sequence(_text(f"{name}="), {"type": "json_schema", "json_schema": _with(shared, value), **options})
        for name, value in cast("dict[str, object]", schema.get("properties", {})).items()
    }
    required = [arguments.pop(name) for name in dict.fromkeys(schema.get("required", ()))]
    optional = list(arguments.values())
    if required:
        first, *others = required
        return _sequence(first, *(_sequence(_text(SEPARATOR), each) for each in others), *_further(optional))
    return {"type": "optional", "content": _some(optional)} if optional else _text("")


def _some(arguments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the format of at least one of these arguments: halves, so that it grows by n log n and not n²."""
    if len(arguments) == 1:
        return arguments[0]
    middle = len(arguments) // 2
    left, right = arguments[:middle], arguments[middle:]
    return {"type": "or", "elements": [_sequence(_some(left), *_further(right)), _some(right)]}


def _further(arguments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "optional", "content": _sequence(_text(SEPARATOR), each)} for each in arguments]


def _with(shared: Mapping[str, object], schema: object) -> object:
    return {**cast("dict[str, object]", schema), **shared} if shared and isinstance(schema, dict) else schema


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(parts)}
