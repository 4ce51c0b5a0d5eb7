"""Intake: turns a request's body into a plan. Parses, checks, renders, tokenises, cuts into blocks. Pure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, Literal, cast

import msgspec

from baton.blocks import hash_blocks, root_key
from baton.errors import ContextLengthExceeded, InvalidRequest
from baton.messages.attempts import Constraint, ConstraintKind, Sampling
from baton.messages.base import TOKEN_BYTES, pack_tokens, unpack_tokens
from baton_gateway.anthropic.conversion import parse_count, parse_messages
from baton_gateway.bodies import ChatBody, CompletionBody, parse
from baton_gateway.conversion import Conversion, Converted, DetokenizeBody, TokenizeBody, convert, parse_conversion
from baton_gateway.parameters import (
    NEUTRAL,
    OutputOptions,
    asked_of,
    constraint_field_of,
    constraint_of,
    extensions_of,
    limit_output,
    name_of,
    output_of,
    sampling_of,
    session_of,
)
from baton_gateway.responses.bodies import Asked, ResponseContext, ResponseRequest
from baton_gateway.tenants.tenant import request_salt
from baton_gateway.tokenise import ModelTokenizer
from baton_gateway.workers import Model

Operation = Literal["chat", "text_completion", "responses", "messages", "count_tokens"]
"""An endpoint; OpenTelemetry's conventions name the first two."""

CARRIED_BYTES_MAX: Final = 2 << 20
"""Bound on a request's engine parameters, counted once per answer: each answer has messages of its own."""

TRUNCATED_ROOM: Final = 8
"""Part of the context, as its denominator, that truncation leaves to an answer without a bound."""

_PARSERS: Final[dict[str, Callable[[bytes | bytearray], ChatBody | CompletionBody]]] = {
    "chat": partial(parse, ChatBody),
    "text_completion": partial(parse, CompletionBody),
    "messages": parse_messages,
    "count_tokens": parse_count,
}


class Parsed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Facts of a valid body that decide whether to plan it."""

    model: str
    prompts: int
    choices_per_prompt: int
    parameters: tuple[str, ...]
    """`Sampling.parameters`: those that not every engine takes."""
    constraint_field: str = ""
    """Path of the field that constrains the answer, which may be `tool_choice`; empty: none does."""
    beside_tools: bool = False
    """Whether the answer may be calls instead of what that field demands."""
    own_template: bool = False
    """Whether the body has a chat template, which is a program."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    tokens: bytes
    """Token ids, packed."""
    blocks: bytes
    """Ids of the prompt's full blocks."""
    max_tokens: int
    """Bound on the output."""
    echo: str = ""
    """The prompt's text, if the answer begins with it."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything needed to produce and write the answer, without the body itself."""

    prompts: tuple[Prompt, ...]
    choices_per_prompt: int
    sampling: Sampling
    extensions: dict[str, msgspec.Raw]
    """Engine parameters, the part of `sampling` that the gateway does not read, packed as in messages."""
    output: OutputOptions
    root: bytes
    """Key of the prompts' block ids."""
    cache_salt: str
    session: str
    """What the body says of the conversation that it belongs to; empty if nothing."""
    name: str
    """The client's name of the request, by which it can be looked up; empty if it has none."""
    stream: bool
    with_usage: bool
    tokens_as_ids: bool
    """Whether tokens are spelled `token_id:…` in log-probabilities."""
    asked: dict[str, int | float]
    """The request's parameters for traces, under the names of OpenTelemetry's `gen_ai.request`."""
    response: Asked | None = None
    """For a request to /v1/responses only."""


class Intake:
    """Takes in one body at a time: `parse`, then `plan` or `convert`."""

    def __init__(self) -> None:
        self._body: ChatBody | CompletionBody | None = None
        self._constraint: Constraint | None = None
        self._refuses_long = True
        """Whether a bound on the output above the context is an error. Messages always have a bound, so clients that
        want none send a large one."""
        self._request: ResponseRequest | None = None
        self._converted: TokenizeBody | DetokenizeBody | None = None

    def parse(
        self,
        operation: Operation | Conversion,
        payload: bytes | bytearray,
        context: ResponseContext | None = None,
    ) -> Parsed:
        """Parse and keep a body. Raises InvalidRequest if `payload` is no valid body. `context`: for responses."""
        self.drop()
        if operation == "tokenize" or operation == "detokenize":
            converted = self._converted = parse_conversion(operation, payload)
            own_template = isinstance(converted, TokenizeBody) and converted.chat_template is not None
            return Parsed(
                model=converted.model, prompts=1, choices_per_prompt=1, parameters=(), own_template=own_template
            )
        self._refuses_long = operation != "messages"
        if operation != "responses":
            parsed = self._parse(_PARSERS[operation](payload))
            if parsed.constraint_field == "response_format" and operation in ("messages", "count_tokens"):
                parsed = msgspec.structs.replace(parsed, constraint_field="output_config.format")
            return parsed
        assert context is not None, "a response has a context"
        request = self._request = ResponseRequest(payload, context)
        with request.naming():
            parsed = self._parse(request.chat())
        if field := parsed.constraint_field:
            parsed = msgspec.structs.replace(parsed, constraint_field=request.name_of(field))
        return parsed

    def drop(self) -> None:
        """Forget the body parsed last."""
        self._request = self._body = self._converted = self._constraint = None

    def _parse(self, body: ChatBody | CompletionBody) -> Parsed:
        self._body = body
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("`stream_options` needs `stream` to be true", param="stream_options")
        constraint = self._constraint = constraint_of(body)
        constraint_field, beside_tools = constraint_field_of(body) if constraint else "", False
        if isinstance(body, ChatBody):
            body.check_constrained_tools(constraint)
            # The text depends on the model's format of calls.
            if (required := body.required_tools()) or (constraint and body.active_tools()):
                constraint_field, beside_tools = ("tool_choice", False) if required else (constraint_field, True)
                constraint = Constraint(kind=ConstraintKind.STRUCTURAL_TAG, text="")
        return Parsed(
            model=body.model,
            prompts=body.prompt_count(),
            choices_per_prompt=body.n or 1,
            parameters=Sampling(max_tokens=1, constraint=constraint, extensions=extensions_of(body)).parameters,
            constraint_field=constraint_field,
            beside_tools=beside_tools,
            own_template=isinstance(body, ChatBody) and body.chat_template is not None,
        )

    def convert(self, tokenizer: ModelTokenizer, model: Model, *, salt: str) -> Converted:
        """Return the answer to the body of /tokenize or /detokenize parsed last. Raises InvalidRequest."""
        body, self._converted = self._converted, None
        assert body is not None, "no body was parsed"
        return convert(body, tokenizer, model, salt)

    def plan(self, tokenizer: ModelTokenizer, model: Model, *, model_defaults: bool, salt: str = "") -> Plan:
        """Return the plan of the body parsed last. Raises InvalidRequest and ContextLengthExceeded.

        `model_defaults`: parameters that the body leaves out take the model's defaults, not neutral values.
        `salt`: the tenant's cache salt, to which the body's own is added.
        """
        request, self._request = self._request, None
        if request is None:
            return self._plan(tokenizer, model, model_defaults=model_defaults, salt=salt)
        with request.naming():
            if request.truncates:
                self._shorten(request, tokenizer, model, salt)
            plan = self._plan(tokenizer, model, model_defaults=model_defaults, salt=salt)
        return msgspec.structs.replace(plan, response=request.asked)

    def _shorten(self, request: ResponseRequest, tokenizer: ModelTokenizer, model: Model, salt: str) -> None:
        body, context_tokens_max = self._body, model.context_tokens_max
        assert isinstance(body, ChatBody), "no body was parsed"
        room_tokens = body.explicit_tokens_max() or max(1, context_tokens_max // TRUNCATED_ROOM)

        def fits(body: ChatBody) -> bool:
            try:
                salted = request_salt(salt, body.cache_salt or "")
                ((tokens, _),) = _tokenise(body, tokenizer.render(body), tokenizer, context_tokens_max, salted)
            except ContextLengthExceeded:
                return False
            return len(tokens) // TOKEN_BYTES + room_tokens <= context_tokens_max

        self._body = request.shorten(body, fits)

    def _plan(self, tokenizer: ModelTokenizer, model: Model, *, model_defaults: bool, salt: str) -> Plan:
        body, self._body = self._body, None
        assert body is not None, "no body was parsed"
        # Checks that need no tokens come before the work of tokenising.
        sampling = sampling_of(body, tokenizer.defaults if model_defaults else NEUTRAL)
        extensions = cast("dict[str, msgspec.Raw]", sampling.extensions)
        choices_per_prompt = body.n or 1
        text = tokenizer.render(body) if isinstance(body, ChatBody) else ""
        constraint = tokenizer.constraint_of(body, text, self._constraint)
        carried_bytes = sum(len(bytes(packed)) for packed in extensions.values())
        carried_bytes += len(constraint.text.encode()) if constraint else 0
        if carried_bytes * body.prompt_count() * choices_per_prompt > CARRIED_BYTES_MAX:
            said = f"the parameters of all answers together are longer than {CARRIED_BYTES_MAX} bytes: ask for fewer"
            raise InvalidRequest(said, param="n")
        tokenizer.check_tokens(sampling.stop_token_ids, "stop_token_ids")
        if sampling.logit_bias:
            tokenizer.check_tokens(list(sampling.logit_bias), f'logit_bias["{max(sampling.logit_bias)}"]')
        context_tokens_max = model.context_tokens_max
        explicit = body.explicit_tokens_max()
        if self._refuses_long and explicit is not None and explicit > context_tokens_max:
            said = (
                f"`max_tokens` is {explicit}, above this model's maximum context length of {context_tokens_max} tokens"
            )
            raise ContextLengthExceeded(said, param="max_tokens")
        salt = request_salt(salt, body.cache_salt or "")
        root = root_key(model.digest, salt=salt)
        prompts: list[Prompt] = []
        for tokens, echo in _tokenise(body, text, tokenizer, context_tokens_max, salt):
            param = "messages" if isinstance(body, ChatBody) else "prompt"
            if not tokens:
                raise InvalidRequest("the prompt is empty", param=param)
            room_tokens = room_of(len(tokens) // TOKEN_BYTES, context_tokens_max, param)
            limited = limit_output(sampling, min(sampling.max_tokens, room_tokens))
            blocks = hash_blocks(root, tokens, model.block_tokens)
            prompts.append(Prompt(tokens=tokens, blocks=blocks, max_tokens=limited.max_tokens, echo=echo))
        return Plan(
            prompts=tuple(prompts),
            choices_per_prompt=choices_per_prompt,
            sampling=msgspec.structs.replace(sampling, constraint=constraint, extensions={}),
            extensions=extensions,
            output=output_of(body, tokenizer.parsing_of(body, text, self._constraint)),
            root=root,
            cache_salt=salt,
            session=session_of(body),
            name=name_of(body),
            stream=bool(body.stream),
            with_usage=bool(body.stream_options and body.stream_options.include_usage),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            asked=asked_of(body),
        )


def _tokenise(
    body: ChatBody | CompletionBody, text: str, tokenizer: ModelTokenizer, context_tokens_max: int, salt: str
) -> list[tuple[bytes, str]]:
    """Return the packed tokens of each prompt, with its text if the answer begins with it. `text`: a chat's prompt."""
    kept_tokens = _kept_tokens(body, context_tokens_max)
    if isinstance(body, ChatBody):
        if kept_tokens is None:
            tokenizer.check_length(text, context_tokens_max, "messages")
        # Chat templates write the special tokens themselves.
        tokens = tokenizer.tokenise(text, add_special=bool(body.add_special_tokens), salt=salt)
        return [(_truncated(body, tokens, kept_tokens), "")]
    tokenised: list[tuple[bytes, str]] = []
    for prompt in body.prompts():
        if isinstance(prompt, str):
            if kept_tokens is None:
                tokenizer.check_length(prompt, context_tokens_max, "prompt")
            whole = tokenizer.tokenise(prompt, add_special=body.add_special_tokens is not False, salt=salt)
        else:
            if kept_tokens is None:
                room_of(len(prompt), context_tokens_max, "prompt")
            tokenizer.check_tokens(prompt, "prompt")
            whole = pack_tokens(prompt)
        tokens = _truncated(body, whole, kept_tokens)
        echo = ""
        if body.echo:
            echo = prompt if isinstance(prompt, str) and tokens == whole else tokenizer.decode(unpack_tokens(tokens))
        tokenised.append((tokens, echo))
    return tokenised


def _kept_tokens(body: ChatBody | CompletionBody, context_tokens_max: int) -> int | None:
    """Return the length to which prompts are cut; None: they are not."""
    kept_tokens = body.truncate_prompt_tokens
    if kept_tokens is not None and kept_tokens > context_tokens_max:
        said = f"`truncate_prompt_tokens` is {kept_tokens}, above this model's maximum context length of "
        raise ContextLengthExceeded(f"{said}{context_tokens_max} tokens", param="truncate_prompt_tokens")
    return context_tokens_max - 1 if kept_tokens == -1 else kept_tokens


def _truncated(body: ChatBody | CompletionBody, tokens: bytes, kept_tokens: int | None) -> bytes:
    if kept_tokens is None or len(tokens) <= kept_tokens * TOKEN_BYTES:
        return tokens
    kept_bytes = kept_tokens * TOKEN_BYTES
    # As in vLLM, a prompt keeps its end unless its beginning is asked for.
    return tokens[:kept_bytes] if body.truncation_side == "right" else tokens[-kept_bytes:]


def room_of(prompt_tokens: int, context_tokens_max: int, param: str) -> int:
    """Return the number of tokens left for the output. Raises ContextLengthExceeded, with the figures, if none is."""
    if prompt_tokens < context_tokens_max:
        return context_tokens_max - prompt_tokens
    raise ContextLengthExceeded(
        f"this model's maximum context length is {context_tokens_max} tokens, and the request has {prompt_tokens} "
        "tokens in the prompt, which leaves none for the answer",
        param=param,
    )
