"""Tools in the bodies of chats: their definitions, the choice among them, and calls in the history."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from baton.errors import InvalidRequest
from baton_gateway import json_schema

TOOLS_MAX: Final = 1024
ENFORCED_MAX: Final = 256
"""Most tools of which calls are enforced: xgrammar's time to compile grows faster than their number."""
SCHEMA_DEPTH_MAX: Final = 64
SCHEMA_BYTES_MAX: Final = 256 << 10
"""Longest schema of a tool's parameters, as JSON."""
CALLS_MAX: Final = 128
"""Most calls in one message."""
PATH_CHARS_MAX: Final = 200
_NOT_OBJECTS: Final = frozenset({"$ref", "allOf", "anyOf", "const", "enum", "oneOf"})
"""Keywords that may make arguments anything but an object, whatever `type` beside them says."""
_TEXT_BOUNDS: Final = frozenset({"const", "enum", "format", "maxLength", "minLength", "pattern"})
NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}}

Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")]
Text = Annotated[str, Field(max_length=16 << 20)]


class Function(BaseModel):
    """A function that the model may call. Fields not named here reach the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function

    def arguments_schema(self) -> dict[str, Any]:
        """Return the schema of the arguments."""
        return NO_PARAMETERS if self.function.parameters is None else self.function.parameters

    def described(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        function = self.function
        described: dict[str, Any] = {"name": function.name}
        if function.description is not None:
            described["description"] = function.description
        described["parameters"] = self.arguments_schema()
        described |= function.model_extra or {}
        return {"type": "function", "function": described, **(self.model_extra or {})}


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True)

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Text


class CalledTool(BaseModel):
    """A call in an assistant's message."""

    model_config = ConfigDict(strict=True)

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class AllowedTool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True):
    """Part of the tools, of which the model may call, or must."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], msgspec.Meta(min_length=1, max_length=TOOLS_MAX)]


Tools = Annotated[list[Tool], Field(max_length=TOOLS_MAX, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | dict[str, Any]
CalledTools = Annotated[list[CalledTool], Field(max_length=CALLS_MAX, fail_fast=True)]


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raise InvalidRequest if tools have one name or a schema beyond the limits, or the choice cannot be served."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}].function"
        if tool.function.name in names:
            raise InvalidRequest(f"`{where}.name`: another tool has this name, too", param=f"{where}.name")
        names.add(tool.function.name)
        check_schema(tool.function.parameters, f"{where}.parameters")
    offered_tools(tools, choice)
    check_enforceable(tools, {tool.function.name for tool in required_tools(tools, choice)})


def offered_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> Sequence[Tool]:
    """Return the tools that the model is told of. Raises InvalidRequest."""
    if choice == "none":
        return ()
    if (allowed := _allowed_tools(choice)) is None:
        return tools
    names = {tool.function.name for tool in allowed.tools}
    offered = [tool for tool in tools if tool.function.name in names]
    if missing := names.difference(tool.function.name for tool in offered):
        said = f"`tool_choice` allows {min(missing)[:80]!r}, which is none of `tools`"
        raise InvalidRequest(said, param="tool_choice")
    return offered


def names_one_tool(choice: ToolChoice | None) -> bool:
    return isinstance(choice, dict) and choice.get("type") == "function"


def _allowed_tools(choice: ToolChoice | None) -> AllowedTools | None:
    """Return the content of a choice of the type `allowed_tools`; None: it is another one."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None
    try:
        return msgspec.convert(choice.get("allowed_tools"), AllowedTools)
    except msgspec.ValidationError as error:
        said = f"`tool_choice.allowed_tools` has a `mode`, `auto` or `required`, and a list of `tools`: {error}"
        raise InvalidRequest(said, param="tool_choice") from error


def required_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> Sequence[Tool]:
    """Return the tools of which an answer must call one; none if it need not. Raises InvalidRequest."""
    if choice in (None, "auto", "none"):
        return ()
    if choice == "required":
        if not tools:
            raise InvalidRequest("`tool_choice` requires a call, and there are no `tools`", param="tool_choice")
        return tools
    match choice:
        case {"type": "function", "function": {"name": str() as name}}:
            if named := [tool for tool in tools if tool.function.name == name]:
                return named
            raise InvalidRequest(f"`tool_choice` names {name[:80]!r}, which is none of `tools`", param="tool_choice")
        case {"type": "allowed_tools"}:
            allowed = _allowed_tools(choice)
            return offered_tools(tools, choice) if allowed and allowed.mode == "required" else ()
        case _:
            known = '`auto`, `none`, `required`, {"type": "function", "function": {"name": …}} or `allowed_tools`'
            raise InvalidRequest(f"`tool_choice` is {known}", param="tool_choice")


def check_enforceable(tools: Sequence[Tool], names: Container[str]) -> None:
    """Raise InvalidRequest if the tools of these names are too many, or have schemas that engines do not enforce."""
    named = [(index, tool) for index, tool in enumerate(tools) if tool.function.name in names]
    if len(named) > ENFORCED_MAX:
        said = f"calls of {len(named)} `tools` would have to be enforced; this server enforces at most {ENFORCED_MAX}"
        raise InvalidRequest(said, param="tools")
    for index, tool in named:
        _check_arguments(tool, f"tools[{index}].function.parameters")


def _check_arguments(tool: Tool, where: str) -> None:
    schema = tool.arguments_schema()
    json_schema.check_schema(schema, where)
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"`{where}.type`: arguments are of type `object`", param=f"{where}.type")
    for keyword in sorted(_NOT_OBJECTS & schema.keys()):
        said = f"`{where}.{keyword}` is not enforced: state the `properties` of the arguments"
        raise InvalidRequest(said, param=f"{where}.{keyword}")


def check_schema(schema: object, where: str) -> None:
    """Raise InvalidRequest, with the path of the offending key, if a schema is too long or nested too deeply."""
    if (below := _path_below(schema, SCHEMA_DEPTH_MAX)) is not None:
        path = "".join([where, *below])[:PATH_CHARS_MAX]
        raise InvalidRequest(f"`{path}` is nested more than {SCHEMA_DEPTH_MAX} deep", param=path)
    if len(msgspec.json.encode(schema)) > SCHEMA_BYTES_MAX:
        raise InvalidRequest(f"`{where}` is longer than {SCHEMA_BYTES_MAX} bytes", param=where)


def _path_below(value: object, depth_max: int) -> list[str] | None:
    """Return the path, in parts, of the first container that is nested more than `depth_max` deep."""
    if isinstance(value, dict):
        inner = ((f".{key}", each) for key, each in cast("dict[str, object]", value).items())
    elif isinstance(value, list):
        inner = ((f"[{index}]", each) for index, each in enumerate(cast("list[object]", value)))
    else:
        return None
    if depth_max == 0:
        return []
    for part, each in inner:
        if (below := _path_below(each, depth_max - 1)) is not None:
            return [part, *below]
    return None


def schemas_of(tools: Sequence[Tool]) -> dict[str, object]:
    """Return the schema of each tool's arguments, as it is enforced."""
    return {tool.function.name: {"type": "object", **tool.arguments_schema()} for tool in tools}


def text_parameters(tools: Sequence[Tool]) -> dict[str, tuple[str, ...]]:
    """Return the names of each tool's parameters that take text."""
    return _parameters_that(tools, _takes_text)


def trimmed_parameters(tools: Sequence[Tool]) -> dict[str, tuple[str, ...]]:
    """Return the names of each tool's parameters that take some texts only."""
    return _parameters_that(tools, lambda schema: _takes_text(schema) and _bounds_text(schema))


def _parameters_that(tools: Sequence[Tool], holds: Callable[[object], bool]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for tool in tools:
        properties: object = (tool.function.parameters or {}).get("properties")
        schemas = cast("dict[str, object]", properties) if isinstance(properties, dict) else {}
        found[tool.function.name] = tuple(name for name, schema in schemas.items() if holds(schema))
    return found


def _bounds_text(schema: object) -> bool:
    return isinstance(schema, dict) and not _TEXT_BOUNDS.isdisjoint(cast("dict[str, object]", schema))


def _takes_text(schema: object) -> bool:
    if not isinstance(schema, dict):
        return False
    described = cast("dict[str, object]", schema)
    kind = described.get("type")
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return True
    unions = [described.get(union) for union in ("anyOf", "oneOf")]
    return any(_takes_text(each) for union in unions if isinstance(union, list) for each in cast("list[object]", union))
