"""Tools in the bodies of chats: their definitions, the choice among them, and calls in the history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from baton.errors import InvalidRequest

TOOLS_MAX: Final = 1024
SCHEMA_DEPTH_MAX: Final = 64
SCHEMA_BYTES_MAX: Final = 256 << 10
"""Longest schema of a tool's parameters, as JSON."""
CALLS_MAX: Final = 128
"""Most calls in one message."""
PATH_CHARS_MAX: Final = 200
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

    def described(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        function = self.function
        described: dict[str, Any] = {"name": function.name}
        if function.description is not None:
            described["description"] = function.description
        described["parameters"] = NO_PARAMETERS if function.parameters is None else function.parameters
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


Tools = Annotated[list[Tool], Field(max_length=TOOLS_MAX, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | dict[str, Any]
CalledTools = Annotated[list[CalledTool], Field(max_length=CALLS_MAX, fail_fast=True)]


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raise InvalidRequest if tools have one name or a schema beyond the limits, or the choice cannot be served."""
    if choice == "required" or isinstance(choice, dict):
        raise InvalidRequest(
            "`tool_choice` can be `auto` or `none`: this server cannot force a call yet", param="tool_choice"
        )
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}].function"
        if tool.function.name in names:
            raise InvalidRequest(f"`{where}.name`: another tool has this name, too", param=f"{where}.name")
        names.add(tool.function.name)
        check_schema(tool.function.parameters, f"{where}.parameters")


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


def text_parameters(tools: Sequence[Tool]) -> dict[str, tuple[str, ...]]:
    """Return the names of each tool's parameters that take text."""
    found: dict[str, tuple[str, ...]] = {}
    for tool in tools:
        properties: object = (tool.function.parameters or {}).get("properties")
        schemas = cast("dict[str, object]", properties) if isinstance(properties, dict) else {}
        found[tool.function.name] = tuple(name for name, schema in schemas.items() if _takes_text(schema))
    return found


def _takes_text(schema: object) -> bool:
    if not isinstance(schema, dict):
        return False
    described = cast("dict[str, object]", schema)
    kind = described.get("type")
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return True
    unions = [described.get(union) for union in ("anyOf", "oneOf")]
    return any(_takes_text(each) for union in unions if isinstance(union, list) for each in cast("list[object]", union))
