"""Chat templates as models are published with: the answer format is found, and it reads what the template writes."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

import pytest
from baton_gateway.bodies import ChatBody
from baton_gateway.chat_template import ChatTemplate
from baton_gateway.parsing.formats import FormatName, ParsingOptions, find_format
from baton_gateway.parsing.parser import AnswerFormat
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.harness.gateway.samples import FAMILIES, Template, published_templates, sources

USER: Final = {"role": "user", "content": "What is the weather?"}
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name."},
                "days": {"type": "integer", "description": "How many."},
            },
            "required": ["city"],
        },
    },
}
TEMPLATES: Final = published_templates()
WITH_TOOLS: Final = [template for template in TEMPLATES if template.tools]


def loop_of(template: Template) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a call and its result, as messages."""
    # Kimi K2's ids tell the name and the number; Mistral's templates take only nine letters and digits.
    own_id = "functions.get_weather:0" if template.family is FormatName.KIMI_K2 else "abcDEF123"
    function = {"name": "get_weather", "arguments": '{"city": "Lisbon", "days": 3}'}
    called = {"role": "assistant", "tool_calls": [{"id": own_id, "type": "function", "function": function}]}
    return called, {"role": "tool", "tool_call_id": own_id, "name": "get_weather", "content": "sunny all week"}


def name_of(template: Template) -> str:
    return template.file.removesuffix(".jinja")


@cache
def loaded(template: Template) -> ChatTemplate:
    return ChatTemplate(
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE()), bos_token="<bos>", eos_token="<eos>", chat_template=template.text
        )
    )


def rendered(template: Template, *messages: dict[str, Any], begins: bool = True) -> str:
    asked = {"model": "m", "messages": list(messages), "tools": [TOOL], "add_generation_prompt": begins}
    return loaded(template).render(ChatBody.model_validate(asked))


@cache
def format_of(template: Template) -> AnswerFormat:
    spec = find_format(template.text, FormatName.AUTO)
    assert spec is not None
    return AnswerFormat(spec)


def test_every_family_has_a_published_template() -> None:
    assert {template.family for template in TEMPLATES} == set(FAMILIES)
    assert all(template.licence and template.source.split(": ")[0] in sources() for template in TEMPLATES)


@pytest.mark.parametrize("template", TEMPLATES, ids=name_of)
def test_the_format_is_found(template: Template) -> None:
    spec = find_format(template.text, FormatName.AUTO)
    assert spec is not None
    assert (spec.name, spec.reasoning) == (template.family, template.reasons)
    assert loaded(template).takes_tools == template.tools


@pytest.mark.parametrize("template", WITH_TOOLS, ids=name_of)
def test_a_call_as_the_template_writes_it_is_read(template: Template) -> None:
    form, (called, _) = format_of(template), loop_of(template)
    # The end of the turn is a special token, which no parser sees.
    text = form.prefix_of(rendered(template, USER, called, begins=False)).removesuffix("<|eot|>")
    (call,) = form.parser(ParsingOptions(tools=True)).finish(text).calls
    # The template for Python's syntax writes every argument as text.
    days = "3" if template.family is FormatName.LLAMA4_PYTHONIC else 3
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Lisbon", "days": days}), text


@pytest.mark.parametrize("template", WITH_TOOLS, ids=name_of)
def test_a_loop_of_calls_and_results(template: Template) -> None:
    form, prompt = format_of(template), rendered(template, USER, *loop_of(template))
    places = [prompt.rfind(part) for part in ("What is the weather?", "Lisbon", "sunny all week")]
    assert "The weather in a city." in prompt
    assert -1 not in places, prompt
    assert places == sorted(places)
    prefix = form.prefix_of(prompt)
    thought = "Hm.\n</think>\n\n" if prefix.rstrip().endswith("<think>") else ""
    parsed = form.parser(ParsingOptions(prefix=prefix, tools=True)).finish(thought + "It is sunny.")
    assert (parsed.content, parsed.reasoning, parsed.calls) == ("It is sunny.", "Hm." if thought else "", [])
