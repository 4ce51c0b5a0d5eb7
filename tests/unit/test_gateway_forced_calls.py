"""Answers that must have calls: the form that is enforced is the form that is read, in each family."""

from __future__ import annotations

import json
from itertools import combinations, pairwise, product
from typing import Any

import pytest
from baton_gateway.bodies import ChatBody, parse
from baton_gateway.intake import Intake
from baton_gateway.parsing.forced_calls import Reasoning, calls_format, opening_of, reasoning_of
from baton_gateway.parsing.formats import CallSyntax, FormatName, ParsingOptions, read_family
from baton_gateway.parsing.python_calls import arguments_format, check_tool
from baton_gateway.tool_bodies import ENFORCED_MAX
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from tests.harness.gateway.samples import FAMILIES, form_of

FORCED = [name for name in FAMILIES if read_family(name).calls]
WORDS = st.text(st.characters(exclude_categories=["C"], exclude_characters='<[`|"\\{}'), min_size=1, max_size=8)
# Models write text in tags without its ends' white space.
TEXTS = WORDS.map(str.strip).filter(bool)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(["f", "get-weather", "a.b_c"]),
        st.dictionaries(st.sampled_from(["city", "x-y", "größe"]), TEXTS | st.integers(), max_size=3),
    ),
    min_size=1,
    max_size=3,
)


def syntax_of(family: FormatName) -> CallSyntax:
    syntax = read_family(family).calls
    assert syntax is not None
    return syntax


def written(syntax: CallSyntax, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Return calls as the enforced form has them: an oracle that knows no grammar."""
    texts = [
        syntax.call.replace("{name}", name)
        .replace("{index}", str(index))
        .replace("{arguments}", arguments_in(syntax.style, arguments))
        for index, (name, arguments) in enumerate(calls)
    ]
    return syntax.before + syntax.between.join(texts) + syntax.after


def arguments_in(style: str, arguments: dict[str, Any]) -> str:
    match style:
        case "json":
            return json.dumps(arguments, ensure_ascii=False)
        case "python":
            return ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
        case "glm_xml":
            pairs = (f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments.items())
            return "\n".join(pairs)
        case _:
            return "\n".join(f"<parameter={key}>{value}</parameter>" for key, value in arguments.items())


def in_python(name: str) -> str:
    return name.replace("-", "_")


@pytest.mark.parametrize("family", FORCED)
@given(calls=CALLS, reasoned=st.booleans(), data=st.data())
def test_what_is_enforced_is_read(
    family: FormatName, calls: list[tuple[str, dict[str, Any]]], reasoned: bool, data: st.DataObject
) -> None:
    syntax = syntax_of(family)
    calls = calls if syntax.parallel else calls[:1]
    if syntax.style == "python":
        calls = [(in_python(name), {in_python(key): value for key, value in each.items()}) for name, each in calls]
    begin, end = syntax.reasoning
    reasoned = reasoned and "thinking" in read_family(family).response_template["fields"]
    text = (f"{begin}Hm.{end}\n\n" if reasoned else "") + written(syntax, calls)
    texts = {
        name: tuple(
            {key for of, arguments in calls if of == name for key, value in arguments.items() if isinstance(value, str)}
        )
        for name, _ in calls
    }
    parser = form_of(family).parser(ParsingOptions(tools=True, text_parameters=texts))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [parser.feed(text[a:b]) for a, b in pairwise([0, *cuts, len(text)])]
    parts.append(parser.finish())
    assert "".join(part.reasoning for part in parts) == ("Hm." if reasoned else "")
    found = [(call.name, json.loads(call.arguments)) for part in parts for call in part.calls]
    if syntax.style in ("json", "python"):
        assert found == calls
    else:  # Where two calls of one name have a text and a number, the schema says text.
        assert [name for name, _ in found] == [name for name, _ in calls]
        assert [{key: str(value) for key, value in each.items()} for _, each in found] == [
            {key: str(value) for key, value in each.items()} for _, each in calls
        ]


def test_families_that_cannot_be_forced() -> None:
    assert set(FAMILIES) - set(FORCED) == {FormatName.THINK}


def test_calls_that_are_told_from_json_by_their_beginning() -> None:
    unlike = {name: opening_of(syntax_of(name)) for name in FORCED}
    assert [name for name, opening in unlike.items() if not opening] == [
        FormatName.LLAMA4_PYTHONIC,
        FormatName.LLAMA_JSON,
    ]
    assert unlike[FormatName.MISTRAL_V3] == "[T"


@pytest.mark.parametrize(
    ("family", "mark"),
    [
        (FormatName.HERMES, ["</tool_call>"]),
        (FormatName.KIMI_K2, ["<|tool_call_end|>"]),
        (FormatName.DEEPSEEK_V3, ["<｜tool▁call▁end｜>"]),
        (FormatName.QWEN3_CODER, ["</function>"]),
        (FormatName.MISTRAL, None),
    ],
)
def test_the_mark_that_ends_a_call_is_kept_out_of_its_texts(family: FormatName, mark: list[str] | None) -> None:
    def excluded(text: dict[str, Any]) -> object:
        tools = {"f": {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, text]}}}}
        form = calls_format(syntax_of(family), tools, parallel=False)
        calls = next(part for part in form["elements"] if part["type"] == "tags_with_separator")
        (arguments,) = (part for part in calls["tags"][0]["content"]["elements"] if part["type"] == "json_schema")
        return arguments.get("excludes")

    assert excluded({"type": "string"}) == mark
    # xgrammar would not bound the length then.
    assert excluded({"type": "string", "maxLength": 5}) is None


def test_one_call_where_parallel_calls_are_not_wanted() -> None:
    for family in FORCED:
        syntax = syntax_of(family)
        for parallel in (False, True):
            form = calls_format(syntax, {"f": {"type": "object"}}, parallel=parallel)
            (calls,) = (part for part in form["elements"] if part["type"] == "tags_with_separator")
            assert calls["at_least_one"]
            assert calls["stop_after_first"] == (not (parallel and syntax.parallel))


@pytest.mark.parametrize(
    ("prefix", "reasons", "expected"),
    [
        ("", False, Reasoning.NONE),
        ("", True, Reasoning.OPTIONAL),
        ("<think>\n", True, Reasoning.BEGUN),
        ("<think>\n\n</think>\n\n", True, Reasoning.NONE),
        ("I look.", True, Reasoning.NONE),
    ],
)
def test_where_reasoning_may_be(prefix: str, reasons: bool, expected: Reasoning) -> None:
    assert reasoning_of(syntax_of(FormatName.HERMES), prefix, reasons=reasons) is expected


def sequences(form: dict[str, Any]) -> set[str]:
    """Return all texts of a format, each value as a `?`."""
    match form["type"]:
        case "const_string":
            return {form["value"]}
        case "optional":
            return {"", *sequences(form["content"])}
        case "or":
            return set[str]().union(*map(sequences, form["elements"]))
        case "sequence":
            return set(map("".join, product(*map(sequences, form["elements"]))))
        case _:
            return {"?"}


@given(st.integers(0, 7), st.sets(st.integers(0, 6)))
def test_python_arguments_are_all_required_ones_and_any_others(count: int, required: set[int]) -> None:
    names = [f"a{number}" for number in range(count)]
    needed = [name for number, name in enumerate(names) if number in required]
    others = [name for name in names if name not in needed]
    form = arguments_format({"properties": {name: {} for name in names}, "required": needed}, {})
    chosen = [[*needed, *each] for length in range(len(others) + 1) for each in combinations(others, length)]
    assert sequences(form) == {", ".join(f"{name}=?" for name in each) for each in chosen}


@pytest.mark.parametrize(
    ("name", "parameters", "path"),
    [
        ("get-weather", {}, "name"),
        ("a..b", {}, "name"),
        ("f", {"properties": {"a": {}, "from": {}}}, "parameters.properties"),
        ("f", {"properties": {"x-y": {}}}, "parameters.properties"),
        ("f", {"properties": {"ﬁ": {}}}, "parameters.properties"),
        ("f", {"minProperties": 1}, "parameters.minProperties"),
        ("f", {"properties": {"a": {"items": {"$ref": "#"}}}}, "parameters.properties.a.items.$ref"),
        ("f", {"$defs": {"b": {"$ref": "#/properties/a"}}, "properties": {"a": {}}}, "parameters.$defs.b.$ref"),
    ],
)
def test_tools_that_have_no_form_in_python_syntax(name: str, parameters: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_tool(name, parameters, "tools[3].function")
    assert refused.value.param == f"tools[3].function.{path}"


def test_references_of_python_arguments_find_their_definitions() -> None:
    definitions = {"city": {"enum": ["Rome"]}}
    parameters = {"$defs": definitions, "properties": {"a": {"$ref": "#/$defs/city"}, "b": True}, "required": ["a"]}
    check_tool("maps.find_city", parameters, "tools[0].function")
    value = arguments_format(parameters, {})["elements"][0]["elements"][1]
    assert value["json_schema"] == {"$ref": "#/$defs/city", "$defs": definitions}


def chat(parameters: dict[str, Any], **fields: Any) -> bytes:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    messages = [{"role": "user", "content": "x"}]
    return json.dumps({"model": "m", "messages": messages, "tools": tools} | fields).encode()


WHERE = "tools[0].function.parameters"
UNENFORCED: list[tuple[dict[str, Any], str]] = [
    ({"type": "string"}, f"{WHERE}.type"),
    ({"type": "object", "anyOf": [{"type": "object"}]}, f"{WHERE}.anyOf"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, f"{WHERE}.$ref"),
    ({"properties": {"a": {"type": "text"}}}, f"{WHERE}.properties.a.type"),
    ({"properties": {"a": {"not": {}}}}, f"{WHERE}.properties.a.not"),
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize(("parameters", "param"), UNENFORCED)
def test_schemas_that_cannot_be_enforced_are_refused_where_they_would_be(
    parameters: dict[str, Any], param: str, choice: object
) -> None:
    assert parse(ChatBody, chat(parameters))
    with pytest.raises(InvalidRequest) as refused:
        parse(ChatBody, chat(parameters, tool_choice=choice))
    assert refused.value.param == param


def test_only_so_many_tools_are_enforced() -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(ENFORCED_MAX + 1)]
    form = {"type": "json_object"}
    assert parse(ChatBody, chat({}, tools=tools))
    assert parse(ChatBody, chat({}, tools=tools[1:], tool_choice="required"))
    with pytest.raises(InvalidRequest, match="at most") as refused:
        parse(ChatBody, chat({}, tools=tools, tool_choice="required"))
    assert refused.value.param == "tools"
    with pytest.raises(InvalidRequest, match="at most"):
        Intake().parse("chat", chat({}, tools=tools, response_format=form))


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "g"}}, {"type": "function"}, {}]
)
def test_a_choice_of_no_tool_is_refused(choice: object) -> None:
    fields: dict[str, Any] = {"tools": []} if choice == "required" else {}
    with pytest.raises(InvalidRequest) as refused:
        parse(ChatBody, chat({}, tool_choice=choice, **fields))
    assert refused.value.param == "tool_choice"
