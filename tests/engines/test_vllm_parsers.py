"""vLLM's own parsers as an oracle of the answer formats: the same calls and content, but for the listed differences."""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from typing import Any, Final

import pytest
from baton_gateway.parsing.formats import FormatName
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.harness.gateway.samples import FAMILIES, Sample, marks_of, samples_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # vLLM's imports warn.

PARSERS: Final = {
    FormatName.HERMES: "hermes",
    FormatName.DEEPSEEK_V3: "deepseek_v3",
    FormatName.DEEPSEEK_V31: "deepseek_v31",
    FormatName.KIMI_K2: "kimi_k2",
    FormatName.GLM: "glm47",
    FormatName.QWEN3_CODER: "qwen3_coder",
    FormatName.LLAMA_JSON: "llama3_json",
    FormatName.LLAMA4_PYTHONIC: "llama4_pythonic",
    FormatName.MISTRAL: "mistral",
}
"""Parsers by family. vLLM's others need a tokenizer of the very model."""
TAGS: Final = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
CUT_OFF: Final = "vLLM drops a call that was cut off, or passes on the part that came"
MALFORMED: Final = "vLLM drops a malformed call, or passes its text on as arguments"
DIFFERENCES: Final[dict[FormatName, dict[str, str]]] = {
    FormatName.HERMES: {
        "arguments as a string in JSON": "vLLM writes the string as JSON once more",
        "malformed JSON, then a good call": "vLLM reads no call if one is malformed",
        "half a surrogate pair in an argument": "vLLM passes on what UTF-8 cannot hold",
        "a number that JSON does not have": "vLLM passes on what is no JSON",
        "end_marker_in_a_json_string": "neither reads a mark within a string",
    },
    FormatName.DEEPSEEK_V3: {
        "a line break before the end of a call": "vLLM drops the call",
        "a call that was cut off": CUT_OFF,
        "a call without its fence": MALFORMED,
        "malformed JSON, then a good call": MALFORMED,
        "end_marker_literal_inside_json_string": "neither reads a mark within a string",
        "extracts_raw_json_arguments": "vLLM drops text after calls",
        "incomplete_tool_call": CUT_OFF,
        "malformed_input_1": MALFORMED,
        "malformed_input_2": MALFORMED,
    },
    FormatName.DEEPSEEK_V31: {
        "a call that is not ended": "vLLM drops a call without its last mark",
        "a call that was cut off": CUT_OFF,
        "malformed JSON, then a good call": MALFORMED,
        "arguments that are no object": MALFORMED,
        "a call without a section": "vLLM reads calls in a section only",
        "does_not_validate_or_normalize_arguments": "vLLM passes on what is no JSON",
        "end_marker_literal_inside_json_string": "neither reads a mark within a string",
        "extracts_raw_json_arguments": "vLLM drops text after calls",
        "incomplete_tool_call": CUT_OFF,
        "malformed_empty_name": MALFORMED,
        "with_multiple_tools": "vLLM drops text after calls",
    },
    FormatName.KIMI_K2: {
        "an id without a name": MALFORMED,
        "arguments as text in JSON that is no object": MALFORMED,
        "a call that was cut off": CUT_OFF,
        "empty_tool_section": "vLLM drops the mark of a section without calls",
        "end_marker_literal_inside_json_string": "neither reads a mark within a string",
        "invalid_funcall_id": MALFORMED,
        "invalid_json": MALFORMED,
        "noise_between_markers": "vLLM drops text within a section",
    },
    FormatName.GLM: {
        "a tool without a schema": "vLLM drops arguments that the schema does not name",
        "a call that was cut off": CUT_OFF,
        "a call that was cut off between arguments": CUT_OFF,
        "an argument without a value, then a good call": MALFORMED,
        "text instead of a call": MALFORMED,
        "incomplete_tool_call": CUT_OFF,
    },
    FormatName.QWEN3_CODER: {
        "a boolean in Python's spelling": "vLLM leaves arguments without a type as text",
        "a call that was cut off": CUT_OFF,
        "a parameter that does not end": MALFORMED,
    },
    FormatName.LLAMA_JSON: {
        "text before a call": "vLLM drops text beside calls",
        "text after a call": "vLLM drops text beside calls",
        "simple": "vLLM drops text beside calls",
        "multiple_json_with_surrounding_text": "vLLM drops text beside calls",
    },
    FormatName.LLAMA4_PYTHONIC: {
        "a name with a dot": "vLLM reads names without dots only",
        "white space around": "vLLM reads no calls on several lines",
        "a value that JSON does not have": "vLLM makes a list of a set",
        "a character as a surrogate pair": "vLLM passes on what UTF-8 cannot hold",
        "half a surrogate pair": "vLLM passes on what UTF-8 cannot hold",
    },
    FormatName.MISTRAL: {
        "ids between names and arguments": "vLLM takes the id for a part of the name",
        "malformed JSON, then a good call": MALFORMED,
        "a call that was cut off": CUT_OFF,
        "a mark in the text": "vLLM takes text after the mark for a call",
        "complex": CUT_OFF,
        "empty_name_unparsable_args": MALFORMED,
        "malformed_then_well_formed": MALFORMED,
        "trailing_text_after_args_json": "vLLM drops text after calls",
    },
}


@cache
def tokenizer() -> Any:
    """Return a tokenizer of bytes that has all families' marks."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend: Any = Tokenizer(
        models.BPE(vocab={character: number for number, character in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([*TAGS, *(mark for family in FAMILIES for mark in marks_of(family))])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def parsed_by_vllm(family: FormatName, sample: Sample) -> tuple[list[tuple[str, object]], str]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    names = {name for name, _ in sample.calls}
    described = sample.tools or [{"name": name, "parameters": {"type": "object"}} for name in sorted(names) or ["f"]]
    tools: Any = [{"type": "function", "function": tool} for tool in described]
    request_of: Any = ChatCompletionRequest
    request = request_of(model="m", messages=[{"role": "user", "content": "x"}], tools=tools)
    parser_of: Any = ToolParserManager.get_tool_parser(PARSERS[family])
    result = parser_of(tokenizer(), request.tools).extract_tool_calls(sample.text, request)
    calls = [(call.function.name, _decoded(call.function.arguments)) for call in result.tool_calls]
    return calls, result.content or ""


def _decoded(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.mark.parametrize("family", PARSERS)
def test_vllm_reads_the_same(family: FormatName) -> None:
    differ: set[str] = set()
    for sample in samples_of(family):
        if sample.reasoning or sample.prefix:
            continue  # vLLM has parsers of their own for reasoning.
        calls, content = parsed_by_vllm(family, sample)
        if (calls, content.strip()) != (sample.calls, sample.content.strip()):
            differ.add(sample.name)
    assert differ == set(DIFFERENCES[family])


REFUSED: Final = "harmony refuses what is no message"
HARMONY_DIFFERENCES: Final = {
    "a call that was cut off": CUT_OFF,
    "malformed JSON, then an answer": MALFORMED,
    "an answer without a channel": REFUSED,
    "text before, between and after channels": REFUSED,
    "example_output": "harmony refuses the line break that its documentation has between messages",
    "an unknown channel": "harmony drops the marks of a message",
    "missing_message_token": "harmony drops a mark without a message",
    "missing_message_token_tool_call": "harmony drops a mark without a message",
}


def parsed_by_harmony(text: str) -> tuple[list[tuple[str, object]], str, str] | None:
    """Return calls, content and reasoning as OpenAI's own parser reads them, token by token; None: it refuses them."""
    library: Any = import_module("openai_harmony")
    encoding = library.load_harmony_encoding(library.HarmonyEncodingName.HARMONY_GPT_OSS)
    role = None if text.startswith("<|start|>") else library.Role.ASSISTANT
    parser = library.StreamableParser(encoding, role, strict=False)
    try:
        for token in encoding.encode(text, allowed_special="all"):
            parser.process(token)
        parser.process_eos()
    except library.HarmonyError:
        return None
    calls: list[tuple[str, object]] = []
    said = {"content": "", "reasoning": ""}
    for message in parser.messages:
        body = "".join(part.text for part in message.content)
        # A final answer's type is read as its recipient.
        if message.recipient and not message.recipient.startswith("<|constrain|>"):
            calls.append((message.recipient.removeprefix("functions."), _decoded(body)))
        else:
            said["reasoning" if message.channel == "analysis" else "content"] += body
    return calls, said["content"], said["reasoning"]


def test_harmony_reads_the_same() -> None:
    differ: set[str] = set()
    for sample in samples_of(FormatName.GPT_OSS):
        parsed = parsed_by_harmony(sample.text)
        if parsed is None or parsed != (sample.calls, sample.content, sample.reasoning):
            differ.add(sample.name)
    assert differ == set(HARMONY_DIFFERENCES)
