"""Answers as endpoints write them: what every format is made of. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from baton.errors import BatonError
from baton_gateway.choice import LogprobEntry, Piece, ToolCall
from baton_gateway.order import Outcome

LOGPROB_MIN: Final = -9999.0
"""Replacement for minus infinity, which JSON cannot express; the same value as vLLM's."""

SSE_DONE: Final = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def to_json(value: object) -> bytes:
    return _encoder.encode(value)


def sse_event(value: object) -> bytes:
    # JSON has no raw line ends, so one event is always one line.
    return b"data: " + _encoder.encode(value) + b"\n\n"


def usage_of(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int, reasoning_tokens: int | None = None
) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage


class AnswerHead(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that all chunks of one answer share."""

    request: str
    model: str
    created_s: int
    with_usage: bool = False
    """Whether a stream ends with a usage chunk; all other chunks then have a null `usage`."""
    with_logprobs: bool = False
    with_token_ids: bool = False
    tokens_as_ids: bool = False
    """Whether tokens are spelled `token_id:…` in log-probabilities."""
    with_counts: bool = False
    """Whether each chunk has the usage of its choice up to there."""
    prompts: tuple[PromptHead, ...] = ()
    """The prompt of each choice, if the answer says more of it than its length."""


class PromptHead(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer says of one choice's prompt."""

    tokens: int
    token_ids: tuple[int, ...] = ()
    echo: str = ""
    """The prompt's text, if the answer begins with it."""


@dataclass(slots=True)
class WholeChoice:
    """A choice that is collected instead of streamed."""

    texts: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    logprobs: list[LogprobEntry] = field(default_factory=list[LogprobEntry])
    ids: list[int] = field(default_factory=list[int])
    finish_reason: str = ""
    calls_at: int = 0
    """Number of characters of text that come before the first call."""

    def add(self, piece: Piece) -> None:
        if piece.calls and not self.calls:
            self.calls_at = sum(map(len, self.texts)) + piece.calls_at
        self.texts.append(piece.text)
        self.reasoning.append(piece.reasoning)
        self.calls += piece.calls
        self.logprobs += piece.logprobs
        self.ids += piece.ids

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Events(Protocol):
    """An answer as its endpoint writes it, in bytes."""

    @property
    def id(self) -> str: ...

    def opening(self, choice: int) -> bytes:
        """Return the events before a choice's first piece."""
        ...

    def piece(self, choice: int, piece: Piece) -> bytes: ...

    def around(self, choice: int) -> tuple[bytes, bytes] | None:
        """Return the bytes before and after the text, as a JSON string, of an event that has nothing else.

        None: they differ from event to event.
        """
        ...

    def closing(self, choice: int, outcome: Outcome) -> bytes: ...

    def end(self, usage: dict[str, Any]) -> bytes:
        """Return the events after all choices."""
        ...

    def failure(self, error: BatonError) -> bytes:
        """Return the event that ends a stream which has begun."""
        ...

    def whole(self, choices: Sequence[WholeChoice], outcomes: Sequence[Outcome], usage: dict[str, Any]) -> bytes: ...
