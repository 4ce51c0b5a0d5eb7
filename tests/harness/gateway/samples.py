"""Answers as models of each family write them, with what they say, and chat templates to go with them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
from baton_gateway.parsing.formats import FormatName, read_family
from baton_gateway.parsing.parser import AnswerFormat

FAMILIES: Final = tuple(name for name in FormatName if name not in (FormatName.AUTO, FormatName.NONE))
SAMPLES: Final = Path(__file__).parents[2] / "samples"
_TEMPLATE: Final = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{%- for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{- '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}ANCHOR{% endif %}"
    "{#- MARKS #}"
)
_DEEPSEEK: Final = tuple(
    f"<｜{mark}｜>"
    for mark in ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep", "Assistant")
)
_SPECIAL: Final[dict[FormatName, tuple[str, ...]]] = {
    FormatName.GPT_OSS: tuple(
        f"<|{mark}|>" for mark in ("start", "end", "message", "channel", "constrain", "call", "return")
    ),
    FormatName.KIMI_K2: (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    FormatName.DEEPSEEK_V3: _DEEPSEEK,
    FormatName.DEEPSEEK_V31: _DEEPSEEK,
    FormatName.GLM: ("<|assistant|>", "<|observation|>"),
    FormatName.MISTRAL: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    FormatName.MISTRAL_V3: ("[TOOL_CALLS]",),
    FormatName.LLAMA_JSON: ("<|python_tag|>", "<|eom_id|>"),
    FormatName.LLAMA4_PYTHONIC: ("<|python_start|>", "<|python_end|>"),
}


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    text: str
    source: str = ""
    """Where it was published: a key of `sources.json` and a file. Empty: made for these tests."""
    limit: str = ""
    """Reason why what is expected is not what the model meant."""
    prefix: str = ""
    """Beginning of the answer in the prompt."""
    tools: list[dict[str, Any]] = []
    """Tools whose schemas the family needs to read arguments."""
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = []


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    repository: str
    revision: str
    licence: str


class Template(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A published chat template."""

    file: str
    family: FormatName
    reasons: bool
    """Whether its model reasons."""
    tools: bool
    """Whether it shows tools to the model."""
    model: str
    licence: str
    source: str

    @property
    def text(self) -> str:
        return (SAMPLES / "templates" / self.file).read_text()


def samples_of(family: FormatName) -> list[Sample]:
    return msgspec.json.decode((SAMPLES / "answers" / f"{family}.json").read_bytes(), type=list[Sample])


def sources() -> dict[str, Source]:
    return msgspec.json.decode((SAMPLES / "sources.json").read_bytes(), type=dict[str, Source])


def published_templates() -> list[Template]:
    return msgspec.json.decode((SAMPLES / "templates" / "index.json").read_bytes(), type=list[Template])


def chat_template(family: FormatName) -> str:
    """Return a chat template with tools and reasoning by which the family is found."""
    spec = read_family(family)
    marks = " ".join([*spec.found_by, spec.reasoning_by])
    anchor = spec.response_template.get("start_anchor", "<|im_start|>assistant\n")
    first = anchor if isinstance(anchor, str) else anchor[0]
    return _TEMPLATE.replace("ANCHOR", first).replace("MARKS", marks)


def marks_of(family: FormatName) -> tuple[str, ...]:
    """Return the marks of a family that are special tokens in its models."""
    return _SPECIAL.get(family, ())


@cache
def form_of(family: FormatName) -> AnswerFormat:
    """Return a family's answer format, made once for all tests: it loads transformers."""
    return AnswerFormat(read_family(family))
