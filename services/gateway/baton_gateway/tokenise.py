"""Tokenisation: one model's tokenizer, chat template and sampling defaults."""

from __future__ import annotations

import gc
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from jinja2 import TemplateError

from baton.errors import ConfigurationError, ContextLengthExceeded, InvalidRequest
from baton.messages.base import pack_tokens
from baton_gateway.bodies import ChatBody, ChatMessage, SamplingDefaults, pack_bounded
from baton_gateway.detokenise import Spellings
from baton_gateway.segments import Segments, separators_of
from baton_gateway.text_bound import chars_per_token_max

TEMPLATE_ERRORS: Final = (TemplateError, TypeError, ValueError, KeyError, IndexError, RecursionError)
"""Errors that a template raises on messages that it was not written for."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The part of a model's tokenizer that turns output into text."""

    spellings: Spellings
    eos_tokens: frozenset[int]


class ModelTokenizer:
    """One model's tokenizer, chat template and sampling defaults. Only what it keeps of earlier texts changes."""

    def __init__(self, path: str) -> None:
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
        self._reserved = frozenset(inspect.signature(tokenizer.apply_chat_template).parameters)
        self._chars_per_token_max = chars_per_token_max(backend)
        self._knows_developer = self._probe_developer()
        self._adds_special = bool(self.encode("", add_special=True))
        self._segments = Segments(
            separators_of(backend, self._sample_chat()), lambda text: self.encode(text, add_special=False)
        )
        self.tokens_known = max(len(tokenizer), _integer(_read_json(path, "config.json").get("vocab_size")))
        generation = _read_json(path, "generation_config.json")
        eos = generation.get("eos_token_id")
        listed = cast("list[object]", eos) if isinstance(eos, list) else [eos]
        eos_tokens = frozenset(token for token in [tokenizer.eos_token_id, *listed] if isinstance(token, int))
        self.facts = ModelFacts(spellings=Spellings.of(backend), eos_tokens=eos_tokens)
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

    def render(self, body: ChatBody) -> str:
        """Return the prompt's text. Raises InvalidRequest if the template refuses the messages."""
        if not self._tokenizer.chat_template:
            raise InvalidRequest(f"the model `{body.model}` has no chat template; use /v1/completions", param="model")
        variables = self._template_variables(body)
        going_on = bool(body.continue_final_message)
        opening = body.add_generation_prompt if body.add_generation_prompt is not None else not going_on
        if going_on and opening:
            raise InvalidRequest(
                "`continue_final_message` needs `add_generation_prompt` to be false", param="continue_final_message"
            )
        try:
            return self._tokenizer.apply_chat_template(
                [self._plain(message) for message in body.messages],
                tokenize=False,
                add_generation_prompt=opening,
                continue_final_message=going_on,
                **variables,
            )
        except TEMPLATE_ERRORS as error:
            detail = f"the model's chat template refuses these messages: {error}"
            raise InvalidRequest(detail, param="messages") from error

    def _plain(self, message: ChatMessage) -> dict[str, Any]:
        """Return the message as templates expect it: a dictionary with plain text and a known role."""
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        plain: dict[str, Any] = {**(message.model_extra or {}), "role": role, "content": message.text()}
        if message.name is not None:
            plain["name"] = message.name
        return plain

    def _sample_chat(self) -> str:
        """Return a rendered conversation, empty if the template renders none."""
        messages = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TEMPLATE_ERRORS:
            return ""

    def _probe_developer(self) -> bool:
        """Return whether the template supports `developer` messages: it names the role and shows the text.

        Templates that name no role render any role, even one that the model was not trained on.
        """
        if "developer" not in str(self._tokenizer.chat_template):
            return False
        messages = [{"role": "developer", "content": "<probe>"}, {"role": "user", "content": "x"}]
        try:
            return "<probe>" in self._tokenizer.apply_chat_template(messages, tokenize=False)
        except TEMPLATE_ERRORS:
            return False

    def _template_variables(self, body: ChatBody) -> dict[str, Any]:
        variables = dict(body.chat_template_kwargs or {})
        pack_bounded({"chat_template_kwargs": variables})
        if taken := sorted(self._reserved & variables.keys()):
            raise InvalidRequest(f"`chat_template_kwargs` cannot set `{taken[0]}`", param="chat_template_kwargs")
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        return variables

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raise InvalidRequest if a token id is outside this model's vocabulary."""
        if tokens and max(tokens) >= self.tokens_known:
            raise InvalidRequest(f"token id {max(tokens)} is not below the model's {self.tokens_known}", param=param)


def load_to_stay(path: str) -> ModelTokenizer:
    """Load a tokenizer and freeze its 100,000 objects, so that the garbage collector skips them.

    A full collection that visits them stops every stream for 60 ms.
    """
    tokenizer = ModelTokenizer(path)
    gc.collect()
    gc.freeze()
    return tokenizer


def _load(path: str) -> Any:
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
