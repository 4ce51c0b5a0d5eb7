"""Parsing of answers: every family's samples, cut in every way."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from baton_gateway.parsing.calls import call_id
from baton_gateway.parsing.formats import OWN, FormatName, ParsingOptions, find_format, read_family
from baton_gateway.parsing.parser import AnswerFormat, Parsed, load_format
from baton_gateway.tool_bodies import Tool, text_parameters
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.gateway.samples import FAMILIES, Sample, chat_template, form_of, samples_of, sources

SAMPLES = [(family, sample) for family in FAMILIES for sample in samples_of(family)]


def parse(form: AnswerFormat, pieces: Iterable[str], options: ParsingOptions) -> Parsed:
    parser, whole = form.parser(options), Parsed()
    for part in [*map(parser.feed, pieces), parser.finish()]:
        whole.content += part.content
        whole.reasoning += part.reasoning
        whole.calls += part.calls
    return whole


def options_of(sample: Sample) -> ParsingOptions:
    described = [{"type": "function", "function": tool} for tool in sample.tools]
    texts = text_parameters([Tool.model_validate(tool) for tool in described])
    return ParsingOptions(prefix=sample.prefix, tools=True, text_parameters=texts)


@pytest.mark.parametrize(("family", "sample"), SAMPLES, ids=[f"{family}-{sample.name}" for family, sample in SAMPLES])
def test_samples(family: FormatName, sample: Sample) -> None:
    form, text, options = form_of(family), sample.text, options_of(sample)
    whole = parse(form, [text], options)
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == sample.calls
    assert (whole.content, whole.reasoning) == (sample.content, sample.reasoning)
    assert parse(form, text, options) == whole, "character by character"
    check_cuts(family, sample, range(1, len(text), 7))


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "sample"), SAMPLES, ids=[f"{family}-{sample.name}" for family, sample in SAMPLES])
def test_samples_cut_anywhere(family: FormatName, sample: Sample) -> None:
    check_cuts(family, sample, range(1, len(sample.text)))


def check_cuts(family: FormatName, sample: Sample, cuts: range) -> None:
    """Check that a text in two pieces, cut at each of these places, is parsed as the whole."""
    form, text, options = form_of(family), sample.text, options_of(sample)
    whole = parse(form, [text], options)
    for cut in cuts:
        assert parse(form, [text[:cut], text[cut:]], options) == whole, f"cut at {cut}"


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_samples_of_every_kind(family: FormatName) -> None:
    samples = samples_of(family)
    assert len(samples) >= 10
    published = [sample for sample in samples if sample.source]
    assert len(published) >= 10
    assert {sample.source.split(": ")[0] for sample in published} <= set(sources())
    if read_family(family).has_tools:
        assert any(len(sample.calls) > 1 for sample in samples), "parallel calls"
        assert any(not sample.calls and sample.content for sample in samples), "malformed calls"


@st.composite
def scrambled(draw: st.DrawFn) -> tuple[FormatName, str, list[int]]:
    """Return a text of parts of a family's samples, in any order, and places to cut it."""
    family = draw(st.sampled_from([family for family in FAMILIES if read_family(family).has_tools]))
    texts = [sample.text for sample in samples_of(family)]
    parts: list[str] = []
    for _ in range(draw(st.integers(1, 4))):
        text = draw(st.sampled_from(texts))
        begin = draw(st.integers(0, len(text)))
        parts.append(text[begin : draw(st.integers(begin, len(text)))])
    text = draw(st.sampled_from(["", "\n", " \n\n"])).join(parts)
    return family, text, sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))


@given(scrambled(), st.booleans())
def test_no_text_is_an_error_and_no_cut_changes_the_result(
    case: tuple[FormatName, str, list[int]], tools: bool
) -> None:
    family, text, cuts = case
    form, options = form_of(family), ParsingOptions(tools=tools)
    whole = parse(form, [text], options)
    assert parse(form, [text[a:b] for a, b in pairwise([0, *cuts, len(text)])], options) == whole
    assert tools or not whole.calls
    for call in whole.calls:
        assert isinstance(json.loads(call.arguments), dict)


ENDLESS = [
    ("<tool_call>f", "<arg_key>", "</tool_call>"),
    ("<tool_call>f", "<arg_key>a</arg_key><arg_value>", "</tool_call>"),
    ("<function=f>", "<parameter=", "</function>"),
    ("<function=f>", "<parameter=a>", "</function>"),
    *(
        ("", mark, "")
        for mark in (
            "<", " ", "\n", "<tool_call>", "<tool_call>f", "<function=", "<think>", "</think>", "[TOOL_CALLS]", "[f(",
            "<｜tool▁call▁begin｜>", "<|tool_calls_section_begin|>", "<|channel|>commentary to=", '{"name": "f", ',
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_time_is_in_proportion_to_the_text(family: FormatName) -> None:
    """A pattern whose time is quadratic exceeds the test's time limit."""
    for begin, repeated, end in ENDLESS:
        text = begin + repeated * ((400_000 if end else 100_000) // len(repeated)) + end
        pieces = [text[at : at + 4000] for at in range(0, len(text), 4000)]
        parsed = parse(form_of(family), pieces, ParsingOptions(tools=True))
        assert len(parsed.content) + len(parsed.reasoning) <= len(text)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_found_by_its_chat_template(family: FormatName) -> None:
    found = find_format(chat_template(family), FormatName.AUTO)
    assert found == read_family(family)


def test_a_model_that_does_not_reason_is_found_by_its_template() -> None:
    template = chat_template(FormatName.HERMES).replace("</think>", "")
    found = find_format(template, FormatName.AUTO)
    assert found is not None
    assert (found.name, found.reasoning) == ("hermes", False)


def test_a_name_wins_over_the_template_and_none_over_all() -> None:
    template = chat_template(FormatName.HERMES)
    assert find_format(template, FormatName.THINK) == read_family(FormatName.THINK)
    assert find_format(template, FormatName.NONE) is None
    assert find_format("{{ messages }}", FormatName.AUTO) is None


OWN_TEMPLATE: dict[str, Any] = {
    "start_anchor": "<start_of_turn>model\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<thought>", "close": "</thought>", "optional": False},
        "tool_calls": {
            "open": ["<call>", "<function>"],
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"function": {"name": "{content.n}", "arguments": "{content.a}"}},
        },
    },
}


def test_a_tokenizers_own_template_comes_first() -> None:
    form = load_format(chat_template(FormatName.HERMES), OWN_TEMPLATE, FormatName.AUTO)
    assert form is not None
    assert (form.spec.name, form.spec.reasoning, form.spec.has_tools) == (OWN, True, True)
    text = '<thought>hm</thought>ok<call>{"n": "f", "a": {"x": 1}}</call><function>{"n": 5}</call>'
    for pieces in ([text], list(text)):
        parsed = parse(form, pieces, ParsingOptions(tools=True))
        assert (parsed.reasoning, parsed.content) == ("hm", 'ok<function>{"n": 5}</call>')
        assert [(call.name, call.arguments) for call in parsed.calls] == [("f", '{"x": 1}')]


@pytest.mark.parametrize("pieces", [1, 3, 1000])
def test_own_templates_with_tags_and_with_a_dialect_of_json(pieces: int) -> None:
    """Templates as tokenizers bring them: the end of a call is a pattern, and strings have marks of their own."""
    function = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
    tagged = {
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "repeats": True, "content": "xml-inline", "transform": function,
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    }  # fmt: skip
    dialect = {
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)", "close": "<tool_call|>", "repeats": True, "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [["<|", "|>"]]}, "transform": function,
    }  # fmt: skip
    texts = [
        (tagged, "Ok.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
        (dialect, "Ok.<|tool_call>call:f{a:1}<tool_call|>"),
    ]
    for calls, text in texts:
        own = {"start_anchor": "<a>", "fields": {"tool_calls": calls, "content": {"close_pattern": r"\s*(?:<eos>)"}}}
        form = load_format("", own, FormatName.AUTO)
        assert form is not None
        parts = [text[at : at + pieces] for at in range(0, len(text), pieces)]
        parsed = parse(form, parts, ParsingOptions(tools=True))
        assert parsed.content == "Ok."
        assert [(call.name, call.arguments) for call in parsed.calls] == [("f", '{"a": 1}')]


@pytest.mark.parametrize(
    "template",
    [
        {},
        {"fields": 5},
        {"fields": {"content": {}}, "start_anchor": "a", "version": 2},
        {"fields": {"content": 3}, "start_anchor": "a"},
        {"fields": {"tool_calls": {"open_pattern": "("}, "content": {}}, "start_anchor": "a"},
        {"fields": {"tool_calls": {}}, "start_anchor": "a"},
    ],
)
def test_of_a_malformed_template_the_family_is_used(template: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    form = load_format(chat_template(FormatName.HERMES), template, FormatName.AUTO)
    assert form is not None
    assert form.spec.name == "hermes"
    assert "the answer format `own` is malformed" in caplog.text


def test_the_prefix_is_what_the_prompt_has_of_the_answer() -> None:
    form = form_of(FormatName.HERMES)
    prompt = (
        "<|im_start|>assistant\n<think>old</think><|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert form.prefix_of(prompt) == ""
    assert form.prefix_of(prompt + "<think>\n") == "<think>\n"
    assert form.prefix_of("no chat") == ""
    assert form_of(FormatName.THINK).prefix_of("anything<think>\n") == "<think>\n"


@pytest.mark.parametrize("prefix", ["\n\n", "Ok. ", "<think>\n\n</think>\n\n"])
def test_white_space_of_the_prompt_is_no_part_of_the_answer(prefix: str) -> None:
    parsed = parse(form_of(FormatName.HERMES), ["It is sunny."], ParsingOptions(prefix=prefix, tools=True))
    assert parsed == Parsed(content="It is sunny.")


AFTER_TOOLS: list[tuple[FormatName, str]] = [
    (
        FormatName.MISTRAL,
        '[INST]hi[/INST][TOOL_CALLS]f[ARGS]{"x": 1}</s>[TOOL_RESULTS][TOOL_CONTENT]a [THINK][/TOOL_RESULTS]',
    ),
    (
        FormatName.MISTRAL_V3,
        '[INST] hi[/INST][TOOL_CALLS] [{"name": "f"}]</s>[TOOL_RESULTS] {"content": "[TOOL_CALLS]"}[/TOOL_RESULTS]',
    ),
    (
        FormatName.DEEPSEEK_V3,
        "<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>"
        "a <think><｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    ),
    (
        FormatName.DEEPSEEK_V31,
        "<｜Assistant｜></think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁output▁begin｜>a <think><｜tool▁output▁end｜>",
    ),
]
"""Ends of prompts whose template lets the answer follow a tool's output, without a mark of the assistant."""


@pytest.mark.parametrize(("family", "prompt"), AFTER_TOOLS)
def test_calls_and_outputs_of_tools_are_no_beginning_of_the_answer(family: FormatName, prompt: str) -> None:
    form = form_of(family)
    parsed = parse(form, ["It is sunny."], ParsingOptions(prefix=form.prefix_of(prompt), tools=True))
    assert parsed == Parsed(content="It is sunny.")


def test_only_the_special_tokens_that_mark_regions_are_kept() -> None:
    spelled = {1: "<think>", 2: "<|im_end|>", 3: "<tool_call>", 4: "", 5: "</tool_call>"}
    assert AnswerFormat(read_family(FormatName.HERMES), spelled).marks == {1, 3, 5}


@pytest.mark.parametrize("family", [family for family in FAMILIES if read_family(family).has_tools])
def test_without_tools_a_call_is_content(family: FormatName) -> None:
    call = next(sample for sample in samples_of(family) if sample.name == "one call").text
    parsed = parse(form_of(family), [call], ParsingOptions())
    assert not parsed.calls
    assert call.startswith(parsed.content)
    assert len(parsed.content) > len(call) / 2


def test_ids_of_calls_are_unique_and_repeatable() -> None:
    ids = [call_id(request, index, prefix="call_", chars=24) for request in ("a", "b") for index in (0, 1)]
    assert len(set(ids)) == 4
    assert ids[0] == call_id("a", 0, prefix="call_", chars=24)
    assert len(ids[0]) == len("call_") + 24
