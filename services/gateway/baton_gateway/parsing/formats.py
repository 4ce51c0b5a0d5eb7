"""Formats in which models write reasoning and tool calls: one data file per family, found by the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from importlib import resources
from typing import Any, Final, Literal

import msgspec

OWN: Final = "own"
"""Name of a format that a tokenizer brings along in its `response_template`."""


class FormatName(StrEnum):
    """The families, each with a data file of its name, and two ways to do without a name.

    The first family whose marks are all in a model's chat template is the model's.
    """

    AUTO = "auto"
    NONE = "none"
    GPT_OSS = "gpt_oss"
    KIMI_K2 = "kimi_k2"
    DEEPSEEK_V3 = "deepseek_v3"
    DEEPSEEK_V31 = "deepseek_v31"
    GLM = "glm"
    QWEN3_CODER = "qwen3_coder"
    HERMES = "hermes"
    MISTRAL = "mistral"
    MISTRAL_V3 = "mistral_v3"
    LLAMA4_PYTHONIC = "llama4_pythonic"
    LLAMA_JSON = "llama_json"
    THINK = "think"


class CallSyntax(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text of calls as a family's models write it, for answers that must have calls."""

    call: str
    """One call, with the places `{name}`, `{arguments}` and `{index}`: a number of at most three digits."""
    before: str = ""
    between: str = ""
    after: str = ""
    style: Literal["json", "qwen_xml", "glm_xml", "python"] = "json"
    """The form of arguments: xgrammar's name of it, or `python`."""
    parallel: bool = True
    """Whether an answer may have several calls."""
    reasoning: tuple[str, str] = ("<think>", "</think>")
    """Text before and after reasoning, in models that reason before they call."""


class FormatSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Description of a format: a family's data file, or a tokenizer's own `response_template`."""

    name: str = ""
    found_by: tuple[str, ...] = ()
    """Marks in the chat templates of the models that write this format."""
    reasoning: bool = False
    """Whether the model reasons; then every chat is parsed, with tools or without."""
    reasoning_by: str = ""
    """Mark in the chat templates of the models of this family that reason; empty: none of them does."""
    id_prefix: str = "call_"
    id_chars: int = 24
    calls: CallSyntax | None = None
    """None: no answer of this format can be forced to have calls."""
    response_template: dict[str, Any]
    """Regions of the text, in the form that `transformers.utils.chat_parsing` reads."""

    @property
    def is_python(self) -> bool:
        """Whether calls are written as a list of Python calls."""
        return self.calls is not None and self.calls.style == "python"

    @property
    def has_tools(self) -> bool:
        return "tool_calls" in self.response_template.get("fields", {})


class ParsingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options for parsing one request's answers."""

    prefix: str = ""
    """Beginning of the answer that the prompt already has, such as `<think>`."""
    tools: bool = False
    or_json: bool = False
    """Whether an answer is either calls or JSON, in which nothing is a mark."""
    parallel: bool = True
    """Whether an answer may have more than one call; otherwise all but the first are left out."""
    text_parameters: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict[str, tuple[str, ...]])
    """Names of each tool's parameters that take text, for formats that write all arguments as text."""
    trimmed_parameters: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict[str, tuple[str, ...]])
    """Text parameters whose schemas do not allow any text: white space at its ends belongs to the tags."""


def read_family(name: FormatName) -> FormatSpec:
    data = resources.files("baton_gateway.parsing").joinpath("families", f"{name}.json").read_bytes()
    spec = msgspec.json.decode(data, type=FormatSpec)
    return msgspec.structs.replace(spec, name=name.value, reasoning=bool(spec.reasoning_by))


def own_format(response_template: Mapping[str, Any]) -> FormatSpec:
    """Return the format that a tokenizer brings along."""
    fields: object = response_template.get("fields")
    reasoning = isinstance(fields, dict) and "thinking" in fields
    return FormatSpec(name=OWN, reasoning=reasoning, response_template=dict(response_template))


def find_format(chat_template: str, wanted: FormatName) -> FormatSpec | None:
    """Return the format of a model's answers; None if none is known, or none is wanted."""
    if wanted is FormatName.NONE:
        return None
    if wanted is not FormatName.AUTO:
        return read_family(wanted)
    for name in list(FormatName)[2:]:
        spec = read_family(name)
        if all(mark in chat_template for mark in spec.found_by):
            return msgspec.structs.replace(spec, reasoning=spec.reasoning and spec.reasoning_by in chat_template)
    return None
