"""Tools in requests: their limits, and the form in which chat templates get them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from baton_gateway.bodies import ChatBody, parse
from baton_gateway.parsing.calls import calls_of
from baton_gateway.parsing.formats import OWN, ParsingOptions
from baton_gateway.tokenise import ModelTokenizer
from baton_gateway.tool_bodies import Tool, check_schema, text_parameters, trimmed_parameters

from baton.errors import InvalidRequest
from tests.harness.gateway.actors import make_tokenizer

USER = {"role": "user", "content": "hi"}
WEATHER: dict[str, Any] = {"name": "weather", "parameters": {"type": "object"}, "strict": True, "returns": "text"}
TOOLS_SHOWN = "{{ tools | tojson if tools }}<tool_call></tool_call>"
TO_JSON = "{{ c.function.arguments | tojson }}"


def template(each: str = "", call: str = "") -> str:
    """Return a chat template that shows `each` after a message, and `call` for each of its calls."""
    calls = f"{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}" if call else ""
    return f"{{% for m in messages %}}{{{{ m.role }}}}:{{{{ m.content }}}}{each}{calls}{{% endfor %}}{TOOLS_SHOWN}"


@pytest.fixture
def render(tmp_path: Path) -> Callable[..., str]:
    """Return a function that renders a body with a chat template."""

    def render(template: str, **body: Any) -> str:
        tokenizer = ModelTokenizer(str(make_tokenizer(tmp_path, template)))
        return tokenizer.render(parse(ChatBody, json.dumps({"model": "m", "messages": [USER], **body}).encode()))

    return render


def called(arguments: str, content: str | None = None) -> dict[str, Any]:
    call = {"id": "abcDEF123", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def test_a_tool_reaches_the_template_as_it_was_sent(render: Callable[..., str]) -> None:
    tools = [{"type": "function", "function": tool} for tool in (WEATHER, {"name": "g"})]
    shown = render(template(), tools=tools).removesuffix("<tool_call></tool_call>")
    first, second = json.loads(shown[shown.index("[") :])
    assert first == {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object"}, "returns": "text"},
    }, "`strict` is no part of a prompt"
    assert second["function"] == {"name": "g", "parameters": {"type": "object", "properties": {}}}


def test_the_model_is_told_of_allowed_tools_only(render: Callable[..., str]) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]
    for mode, required in (("auto", []), ("required", ["a", "c"])):
        named = [{"type": "function", "function": {"name": name}} for name in "ca"]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        shown = render(template(), tools=tools, tool_choice=choice).removesuffix("<tool_call></tool_call>")
        assert [tool["function"]["name"] for tool in json.loads(shown[shown.index("[") :])] == ["a", "c"]
        asked = {"model": "m", "messages": [USER], "tools": tools, "tool_choice": choice}
        body = parse(ChatBody, json.dumps(asked).encode())
        assert [tool.function.name for tool in body.required_tools()] == required


IDIOMS: list[tuple[str, str]] = [
    (TO_JSON, '{"x": "é"}'),
    ("{{ '<sep>' + c.function.arguments }}", '<sep>{"x":  "é"}'),
    ("{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}", '{"x": "é"}'),
    ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "x=é"),
    (
        "{{ raise_exception('id') if c.id | length != 9 }}{{ c.function | tojson }}",
        '{"name": "f", "arguments": {"x": "é"}}',
    ),
    ("{% if m.content is none %}{{ c.function.arguments | tojson }}{% endif %}", '{"x": "é"}'),
]


@pytest.mark.parametrize(("idiom", "shown"), IDIOMS)
def test_calls_reach_templates_in_the_form_they_were_written_for(
    render: Callable[..., str], idiom: str, shown: str
) -> None:
    messages = [USER, called('{"x":  "é"}'), {"role": "tool", "tool_call_id": "abcDEF123", "content": "ok"}]
    text = render(template(call=idiom), messages=messages)
    assert shown in text
    assert text.count("tool:ok") == 1


def test_no_arguments_are_an_empty_object(render: Callable[..., str]) -> None:
    assert "assistant:{}" in render(template(call=TO_JSON), messages=[USER, called("")])


@pytest.mark.parametrize("arguments", ["[1]", "{", "x", '"{}"', "[" * 5000])
def test_calls_with_other_arguments_are_refused(render: Callable[..., str], arguments: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        render(template(call=TO_JSON), messages=[USER, called(arguments)])
    assert refused.value.param == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("shown", "properties"),
    [
        ("p | dictsort", ["x"]),
        ("p.items()", 5),
        ("p.values() | join | float | int", {"x": "inf"}),
        ("1 / (2 - p | length)", [1, 2]),
    ],
)
def test_schemas_that_a_template_was_not_written_for_are_refused(
    render: Callable[..., str], shown: str, properties: object
) -> None:
    each = f"{{% set p = t.function.parameters.properties %}}{{{{ {shown} }}}}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        render(f"{{% for t in tools or [] %}}{each}{{% endfor %}}{TOOLS_SHOWN}", tools=tools)


@pytest.mark.parametrize("shown", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize(
    "given", [{"reasoning_content": "Hm."}, {"reasoning": "Hm."}, {"reasoning_content": "No.", "reasoning": "Hm."}]
)
def test_reasoning_in_the_history_reaches_the_template(
    render: Callable[..., str], given: dict[str, str], shown: str
) -> None:
    messages = [USER, {"role": "assistant", "content": "4", **given}]
    assert "assistant:4Hm." in render(template(f"{{{{ m.{shown} }}}}"), messages=messages)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"x": [schema]} if levels % 2 else {"x": schema}
    return schema


def test_schemas_at_the_limits_pass_and_one_beyond_is_named() -> None:
    check_schema(nested(64), "p")
    check_schema({"x": "y" * ((256 << 10) - len('{"x":""}'))}, "p")
    with pytest.raises(InvalidRequest, match="more than 64 deep") as deep:
        check_schema({"a": 1, "b": {"c": nested(63)}}, "p")
    assert (deep.value.param or "").startswith("p.b.c.x")
    wide: dict[str, Any] = {str(number): {} for number in range(10_000)}
    for _ in range(60):
        wide = {"k" * 3000: wide}
    with pytest.raises(InvalidRequest, match="longer than 262144 bytes"):
        check_schema(wide, "p")  # Paths of all its keys together would take gigabytes.
    with pytest.raises(InvalidRequest, match="longer than 262144 bytes"):
        check_schema({"x": "y" * ((256 << 10) - len('{"x":""}') + 1)}, "p")


def test_parameters_that_take_text() -> None:
    properties = {
        "a": {"type": "string"}, "b": {"type": ["null", "string"]}, "c": {"anyOf": [{}, {"type": "string"}]},
        "d": {"type": "integer"}, "e": {}, "f": True, "g": {"anyOf": 5},
    }  # fmt: skip
    tools = [{"name": "f", "parameters": {"properties": properties}}, {"name": "g", "parameters": {"properties": 5}}]
    described = [Tool.model_validate({"type": "function", "function": tool}) for tool in tools]
    assert text_parameters(described) == {"f": ("a", "b", "c"), "g": ()}


def test_texts_that_a_schema_bounds_are_trimmed() -> None:
    properties = {
        "free": {"type": "string", "description": "any"},
        "one": {"type": "string", "enum": ["a"]},
        "short": {"type": ["string", "null"], "maxLength": 3},
        "number": {"type": "integer", "enum": [1]},
    }
    tool = Tool.model_validate(
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    )
    assert trimmed_parameters([tool]) == {"f": ("one", "short")}
    written = {"free": " x ", "one": " a\n", "short": "b ", "number": " 1 "}
    options = ParsingOptions(text_parameters=text_parameters([tool]), trimmed_parameters=trimmed_parameters([tool]))
    (call,) = calls_of({"function": {"name": "f", "arguments": written}}, options)
    assert json.loads(call.arguments) == {"free": " x ", "one": "a", "short": "b", "number": 1}


def test_a_tokenizers_own_template_is_used(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    described = json.loads((folder / "tokenizer_config.json").read_text())
    own = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"thinking": {"open": "<t>", "close": "</t>"}, "content": {}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**described, "response_template": own}))
    spec = ModelTokenizer(str(folder)).facts.answers
    assert spec is not None
    assert (spec.name, spec.reasoning, spec.has_tools) == (OWN, True, False)
