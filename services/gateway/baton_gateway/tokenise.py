"""Tokenisation: one model's tokenizer, chat template and sampling defaults."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from baton.errors import ConfigurationError, ContextLengthExceeded, InvalidRequest
from baton.messages.attempts import Constraint
from baton.messages.base import pack_tokens
from baton_gateway.bodies import ChatBody, CompletionBody
from baton_gateway.chat_template import ChatTemplate
from baton_gateway.constraints import format_constraint
from baton_gateway.detokenise import Spellings
from baton_gateway.parameters import SamplingDefaults
from baton_gateway.parsing.forced_calls import calls_format, calls_or_json, opening_of, reasoning_of
from baton_gateway.parsing.formats import FormatName, FormatSpec, ParsingOptions
from baton_gateway.parsing.parser import load_format
from baton_gateway.parsing.python_calls import check_tool
from baton_gateway.segments import Segments, separators_of
from baton_gateway.text_bound import chars_per_token_max
from baton_gateway.tool_bodies import names_one_tool, schemas_of, text_parameters, trimmed_parameters


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The part of a model's tokenizer that turns output into text."""

    spellings: Spellings
    eos_tokens: frozenset[int]
    answers: FormatSpec | None = None
    """Format of the model's answers; None: none is known."""


class ModelTokenizer:
    """One model's tokenizer, chat template and sampling defaults. Only what it keeps of earlier texts changes."""

    def __init__(self, path: str, answer_format: FormatName = FormatName.AUTO) -> None:
        """Load from a folder or a hub id; slow. Raises ConfigurationError with a sentence that names `path`."""
        tokenizer = _load(path)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigurationError(f"the model {path} has no fast tokenizer (tokenizer.json), which Baton needs")
        # A tokenizer file may ask to cut or pad what it encodes; lengths are judged here, not there.
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = tokenizer
        self._backend = backend
        self._template = ChatTemplate(tokenizer)
        self._chars_per_token_max = chars_per_token_max(backend)
        self._adds_special = bool(self.encode("", add_special=True))
        self._segments = Segments(
            separators_of(backend, self._template.sample()), lambda text: self.encode(text, add_special=False)
        )
        self.tokens_known = max(len(tokenizer), _integer(_read_json(path, "config.json").get("vocab_size")))
        generation = _read_json(path, "generation_config.json")
        eos = generation.get("eos_token_id")
        listed = cast("list[object]", eos) if isinstance(eos, list) else [eos]
        eos_tokens = frozenset(token for token in [tokenizer.eos_token_id, *listed] if isinstance(token, int))
        own = getattr(tokenizer, "response_template", None)
        self._form = load_format(self._template.text, own, answer_format)
        self.facts = ModelFacts(
            spellings=Spellings.of(backend), eos_tokens=eos_tokens, answers=self._form and self._form.spec
        )
        self.defaults = _sampling_defaults(path, generation)

    def check_length(self, text: str, context_tokens_max: int, param: str) -> None:
        """Raise ContextLengthExceeded if a text cannot fit, however it is tokenised, before that slow work begins."""
        chars_max = self._chars_per_token_max and self._chars_per_token_max * context_tokens_max
        if chars_max and len(text) > chars_max:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {context_tokens_max} tokens, and the prompt has {len(text)} "
                f"characters: more than {chars_max}, which is more than so many tokens can hold",
                param=param,
            )

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        # Only the batch call releases the GIL and computes no offsets.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids

    def tokenise(self, text: str, *, add_special: bool, salt: str) -> bytes:
        """Return the packed tokens of a text, as `encode` would, but faster where parts of it are known."""
        if add_special and self._adds_special:
            return pack_tokens(self.encode(text, add_special=True))
        return self._segments.tokenise(text, salt)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of whole tokens."""
        return self._backend.decode(list(tokens), skip_special_tokens=skip_special)

    def spelling(self, token: int) -> str:
        """Return a token as the vocabulary has it."""
        return self._backend.id_to_token(token) or ""

    def render(self, body: ChatBody) -> str:
        """Return the prompt's text. Raises InvalidRequest for messages or tools that the model does not take."""
        if body.active_tools():
            self._check_takes_tools(body.model)
        return self._template.render(body)

    def _check_takes_tools(self, model: str) -> None:
        if self._form is None or not self._form.spec.has_tools:
            raise InvalidRequest(
                f"the format of the tool calls of `{model}` is not known: start the gateway with `--answer-format` and "
                "its name, or leave out `tools`",
                param="tools",
            )
        if not self._template.takes_tools:
            raise InvalidRequest(f"the chat template of the model `{model}` takes no tools", param="tools")

    def constraint_of(
        self, body: ChatBody | CompletionBody, prompt: str, stated: Constraint | None
    ) -> Constraint | None:
        """Return the constraint on the answers after this prompt. Raises InvalidRequest for calls without a form.

        `stated`: the constraint of the body's fields. Beside tools that may be called, it holds for answers without
        calls; an answer that must have calls is not under it.
        """
        if not isinstance(body, ChatBody) or not (body.required_tools() or (stated and body.active_tools())):
            return stated
        if (form := self._form) is None or (syntax := form.spec.calls) is None:
            said = "this server cannot enforce calls in the format of this model: "
            if body.required_tools():
                raise InvalidRequest(f"{said}`tool_choice` can be `auto` or `none`", param="tool_choice")
            raise InvalidRequest(f"{said}leave out `tools` or the constraint on the answer", param="tools")
        parallel = body.parallel_tool_calls is not False and not names_one_tool(body.tool_choice)
        if required := body.required_tools():
            if form.spec.is_python:
                for index, tool in enumerate(body.tools or ()):
                    if tool in required:
                        check_tool(tool.function.name, tool.arguments_schema(), f"tools[{index}].function")
            reasoning = reasoning_of(syntax, form.prefix_of(prompt), reasons=form.spec.reasoning)
            calls = calls_format(syntax, schemas_of(required), parallel=parallel, reasoning=reasoning)
            return format_constraint(calls, "tools")
        if not opening_of(syntax):
            said = (
                "the calls of this model cannot be told from the JSON that the answer is constrained to: leave out "
                "`tools` or the constraint, or set `tool_choice`"
            )
            raise InvalidRequest(said, param="tools")
        assert stated is not None
        calls = calls_format(syntax, schemas_of(body.active_tools()), parallel=parallel)
        return format_constraint(calls_or_json(calls, msgspec.Raw(stated.text.encode())), "tools")

    def parsing_of(
        self, body: ChatBody | CompletionBody, prompt: str, stated: Constraint | None = None
    ) -> ParsingOptions | None:
        """Return how the answers after this prompt are parsed; None: they are content as they are."""
        if not isinstance(body, ChatBody) or self._form is None:
            return None
        tools = body.active_tools()
        or_json = stated is not None and not body.required_tools()
        # A constraint holds from the first token, so nothing in the answer is a mark, unless it may be a call.
        if not tools and (or_json or not self._form.spec.reasoning):
            return None
        return ParsingOptions(
            prefix="" if or_json else self._form.prefix_of(prompt),
            tools=bool(tools),
            or_json=or_json,
            parallel=body.parallel_tool_calls is not False,
            text_parameters=text_parameters(tools) if self._form.writes_text else {},
            trimmed_parameters=trimmed_parameters(tools) if self._form.writes_text else {},
        )

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raise InvalidRequest if a token id is outside this model's vocabulary."""
        if tokens and max(tokens) >= self.tokens_known:
            raise InvalidRequest(f"token id {max(tokens)} is not below the model's {self.tokens_known}", param=param)


def load_to_stay(path: str, answer_format: FormatName = FormatName.AUTO) -> ModelTokenizer:
    """Load a tokenizer and freeze its 100,000 objects, so that the garbage collector skips them.

    A full collection that visits them stops every stream for 60 ms.
    """
    tokenizer = ModelTokenizer(path, answer_format)
    gc.collect()
    gc.freeze()
    return tokenizer


def _is_logged(record: logging.LogRecord) -> bool:
    """Return whether a record of transformers' is logged: Baton takes only tokenizers from it, so it needs no torch."""
    return "PyTorch was not found" not in str(record.msg)


def _load(path: str) -> Any:
    logging.getLogger("transformers").addFilter(_is_logged)
    # Imported here because the import takes seconds, and the gateway answers meanwhile.
    import transformers

    library = cast("Any", transformers)
    expected = (OSError, ValueError, KeyError, TypeError, ImportError)
    try:
        # `tokenizer.json` is enough; AutoTokenizer would import the model's family, and torch with it.
        return library.PreTrainedTokenizerFast.from_pretrained(path)
    except expected:
        try:
            return library.AutoTokenizer.from_pretrained(path)
        except expected as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigurationError(f"the tokenizer of {path} does not load: {reason}") from error


def _read_json(path: str, name: str) -> Mapping[str, object]:
    """Return a JSON file of the model, or an empty mapping if there is none."""
    from transformers.utils import hub

    find = cast("Callable[..., str | None]", cast("Any", hub).cached_file)
    found = find(path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
    if found is None:
        return {}
    content: object = json.loads(Path(found).read_text(encoding="utf-8"))
    return cast("Mapping[str, object]", content) if isinstance(content, dict) else {}


def _sampling_defaults(path: str, generation: Mapping[str, object]) -> SamplingDefaults:
    """Return the defaults in a model's generation_config.json that vLLM uses, too."""
    named = {"max_tokens": generation.get("max_new_tokens"), **generation}
    given = {name: value for name in SamplingDefaults.__slots__ if (value := named.get(name)) is not None}
    try:
        return msgspec.convert(given, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"the generation_config.json of {path} is malformed: {error}") from error


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 0
