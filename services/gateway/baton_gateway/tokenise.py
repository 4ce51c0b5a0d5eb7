"""Text to token ids, once per request: chat templates and tokenizers of the models that workers serve."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from jinja2 import TemplateError

from baton.clock import Clock
from baton.errors import ConfigurationError, InvalidRequest, Unavailable
from baton_gateway.bodies import ChatBody, ChatMessage, check_depth
from baton_gateway.detokenise import Vocabulary

log = logging.getLogger(__name__)

INLINE_CHARS_MAX: Final = 2048
"""Shorter prompts are tokenised on the event loop: that takes less than a switch to a thread and back."""
LOAD_RETRY_S: Final = 5.0

Result = TypeVar("Result")


class ModelTokenizer:
    """One model's tokenizer and chat template. Safe for several threads, as nothing changes after the start."""

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
        self.vocabulary = Vocabulary(backend)
        self.tokens_known = max(len(tokenizer), _integer(_read_json(path, "config.json").get("vocab_size")))
        generation = _read_json(path, "generation_config.json").get("eos_token_id")
        listed = cast("list[object]", generation) if isinstance(generation, list) else [generation]
        self.eos_tokens = frozenset(token for token in [tokenizer.eos_token_id, *listed] if isinstance(token, int))

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        # The batch call is the one that lets go of the GIL and computes no offsets.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids

    def render(self, body: ChatBody) -> str:
        """Return the prompt's text. Raises InvalidRequest where the template refuses the messages."""
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
                [_plain(message) for message in body.messages],
                tokenize=False,
                add_generation_prompt=opening,
                continue_final_message=going_on,
                **variables,
            )
        except (TemplateError, TypeError, ValueError, KeyError, IndexError, RecursionError) as error:
            detail = f"the model's chat template refuses these messages: {error}"
            raise InvalidRequest(detail, param="messages") from error

    def _template_variables(self, body: ChatBody) -> dict[str, Any]:
        variables = dict(body.chat_template_kwargs or {})
        check_depth(variables, "chat_template_kwargs")
        if taken := sorted(self._reserved & variables.keys()):
            raise InvalidRequest(f"`chat_template_kwargs` cannot set `{taken[0]}`", param="chat_template_kwargs")
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        return variables

    def check_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Raise InvalidRequest where a token id is none of this model's."""
        if tokens and max(tokens) >= self.tokens_known:
            raise InvalidRequest(f"token id {max(tokens)} is not below the model's {self.tokens_known}", param=param)


class Tokenizers:
    """Loads each model's tokenizer once and runs long work on threads of its own."""

    def __init__(
        self, *, clock: Clock, threads: int = 2, load: Callable[[str], ModelTokenizer] = ModelTokenizer
    ) -> None:
        self._clock = clock
        self._load = load
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="tokenise")
        # Loading has a thread of its own, so that a slow hub does not hold up models that are there.
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer-load")
        self._loaded: dict[tuple[str, str], asyncio.Future[ModelTokenizer]] = {}
        self._failed_at_s: dict[tuple[str, str], float] = {}

    def prepare(self, path: str, digest: str) -> asyncio.Future[ModelTokenizer]:
        """Begin to load, unless that was done; a failed load is tried again after a while."""
        key = (path, digest)
        known = self._loaded.get(key)
        if known is not None:
            failed = known.done() and known.exception() is not None
            if not failed or self._clock.now_s() - self._failed_at_s.get(key, 0.0) < LOAD_RETRY_S:
                return known
        future = asyncio.get_running_loop().run_in_executor(self._loader, self._load, path)
        self._loaded[key] = future
        future.add_done_callback(lambda done: self._note_failure(key, done))
        return future

    def _note_failure(self, key: tuple[str, str], done: asyncio.Future[ModelTokenizer]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            self._failed_at_s[key] = self._clock.now_s()
            log.error("%s", error)

    async def get(self, path: str, digest: str) -> ModelTokenizer:
        """Return the tokenizer, waiting while it loads. Raises Unavailable where it does not load."""
        try:
            return await asyncio.shield(self.prepare(path, digest))
        except ConfigurationError as error:
            raise Unavailable(str(error), retry_after_s=LOAD_RETRY_S) from error

    async def run(self, chars: int, work: Callable[[], Result]) -> Result:
        """Return `work()`, done on a thread when it concerns more than a little text."""
        if chars <= INLINE_CHARS_MAX:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._loader.shutdown(wait=False, cancel_futures=True)


def _plain(message: ChatMessage) -> dict[str, Any]:
    """Return the message as templates expect it: a dictionary with plain text."""
    plain: dict[str, Any] = {**(message.model_extra or {}), "role": message.role, "content": message.text()}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _load(path: str) -> Any:
    # Imported here, since it takes seconds and the gateway answers meanwhile.
    import transformers

    library = cast("Any", transformers)
    expected = (OSError, ValueError, KeyError, TypeError, ImportError)
    try:
        # `tokenizer.json` says everything; AutoTokenizer would import the model's family, and torch with it.
        return library.PreTrainedTokenizerFast.from_pretrained(path)
    except expected:
        try:
            return library.AutoTokenizer.from_pretrained(path)
        except expected as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigurationError(f"the tokenizer of {path} does not load: {reason}") from error


def _read_json(path: str, name: str) -> Mapping[str, object]:
    """Return a JSON file of the model, or nothing where it has none."""
    from transformers.utils import hub

    find = cast("Callable[..., str | None]", cast("Any", hub).cached_file)
    found = find(path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
    if found is None:
        return {}
    content: object = json.loads(Path(found).read_text(encoding="utf-8"))
    return cast("Mapping[str, object]", content) if isinstance(content, dict) else {}


def _integer(value: object) -> int:
    return value if isinstance(value, int) else 0
