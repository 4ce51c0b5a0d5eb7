"""Tokens of a text, and text of tokens, as vLLM's /tokenize and /detokenize give them. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from baton.errors import InvalidRequest
from baton.messages.base import unpack_tokens
from baton_gateway.bodies import ChatBody, ChatMessage, ModelName, TokenId, decode_object, validate
from baton_gateway.body_checks import MESSAGES_MAX, check_counts, check_messages
from baton_gateway.tokenise import ModelTokenizer
from baton_gateway.tool_bodies import Text, Tools
from baton_gateway.workers import Model

Conversion = Literal["tokenize", "detokenize"]
CHAT_FIELDS: Final = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template",
    "chat_template_kwargs", "documents", "reasoning_effort",
)  # fmt: skip
"""Fields of /tokenize that mean what they mean in chats."""


class Converted(msgspec.Struct, frozen=True, tag=True):
    """The answer, as JSON: it may have millions of tokens, and is not written on the gateway's event loop."""

    answer: bytes


class TokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    model: ModelName
    prompt: Text | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give `prompt` or `messages`, and not both", param="prompt")
        if self.messages is not None:
            self.chat().check()

    def chat(self) -> ChatBody:
        return ChatBody.model_construct(**{name: getattr(self, name) for name in CHAT_FIELDS})

    def convert(self, tokenizer: ModelTokenizer, model: Model, salt: str) -> dict[str, Any]:
        text = self.prompt if self.prompt is not None else tokenizer.render(self.chat())
        # Chat templates write the special tokens themselves.
        default = self.prompt is not None
        add_special = default if self.add_special_tokens is None else self.add_special_tokens
        tokens = unpack_tokens(tokenizer.tokenise(text, add_special=add_special, salt=salt))
        spelled = [tokenizer.spelling(token) for token in tokens] if self.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": model.context_tokens_max,
            "tokens": tokens,
            "token_strs": spelled,
        }


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    model: ModelName
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    skip_special_tokens: bool | None = None

    def check(self) -> None:
        pass

    def convert(self, tokenizer: ModelTokenizer, model: Model, salt: str) -> dict[str, Any]:
        del model, salt
        tokenizer.check_tokens(self.tokens, "tokens")
        return {"prompt": tokenizer.decode(self.tokens, skip_special=bool(self.skip_special_tokens))}


def parse_conversion(conversion: Conversion, payload: bytes | bytearray) -> TokenizeBody | DetokenizeBody:
    """Return the body in `payload`. Raises InvalidRequest that names the field and its fault."""
    given = decode_object(payload)
    check_counts(given)
    check_messages(given.get("messages"))
    body = validate(TokenizeBody if conversion == "tokenize" else DetokenizeBody, given)
    body.check()
    return body


def convert(body: TokenizeBody | DetokenizeBody, tokenizer: ModelTokenizer, model: Model, salt: str) -> Converted:
    """Return the answer to a body. Raises InvalidRequest for messages or tokens that the model does not have.

    `salt`: what keeps the client's texts apart from others' in the tokenizer's memory.
    """
    return Converted(msgspec.json.encode(body.convert(tokenizer, model, salt)))
