"""OpenAI's answer formats: whole answers, chunks, errors. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from baton.errors import BatonError
from baton_gateway.answers import LOGPROB_MIN, SSE_DONE, AnswerHead, WholeChoice, sse_event, to_json
from baton_gateway.choice import Candidate, LogprobEntry, Piece, ToolCall
from baton_gateway.order import Outcome


def error_body(error: BatonError) -> dict[str, Any]:
    return {"error": {"message": error.detail, "type": error.openai_type, "param": error.param, "code": error.code}}


class Format(Protocol):
    """Answer format of one of OpenAI's two endpoints."""

    id: str

    def opening(self, choice: int) -> dict[str, Any] | None:
        """Return the chunk that goes before a choice's text."""
        ...

    def chunk(self, choice: int, piece: Piece) -> dict[str, Any]: ...

    def closing(self, choice: int, finish_reason: str) -> dict[str, Any]: ...

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]: ...

    def whole(self, choices: Sequence[WholeChoice], usage: dict[str, Any]) -> dict[str, Any]: ...


class ChatFormat:
    def __init__(self, head: AnswerHead) -> None:
        self.id = f"chatcmpl-{head.request}"
        self._head: dict[str, Any] = {
            "id": self.id,
            "created": head.created_s,
            "model": head.model,
        }
        self._details = _Details(head)
        self._with_logprobs = head.with_logprobs

    def opening(self, choice: int) -> dict[str, Any] | None:
        return {**self._chunk(choice, {"role": "assistant", "content": ""}), **self._details.of_prompt(choice)}

    def chunk(self, choice: int, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.text or not (piece.reasoning or piece.calls):
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = [{"index": call.index, **_call(call)} for call in piece.calls]
        return self._chunk(choice, delta, self._logprobs(piece.logprobs), None, piece)

    def closing(self, choice: int, finish_reason: str) -> dict[str, Any]:
        return self._chunk(choice, {}, None, finish_reason)

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}

    def whole(self, choices: Sequence[WholeChoice], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            **self._head,
            "object": "chat.completion",
            **self._details.of_prompt(0),
            "choices": [
                {
                    "index": index,
                    "message": _message(choice),
                    "logprobs": self._logprobs(choice.logprobs),
                    "finish_reason": choice.finish_reason,
                    **self._details.of_output(choice),
                }
                for index, choice in enumerate(choices)
            ],
            "usage": usage,
        }

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        piece: Piece | None = None,
    ) -> dict[str, Any]:
        details = self._details
        shown = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        shown |= details.of_output(piece)
        return {**self._head, "object": "chat.completion.chunk", "choices": [shown], **details.tail(choice, piece)}

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        content = [
            {
                **self._details.chat_token(entry.chosen),
                "top_logprobs": [self._details.chat_token(candidate) for candidate in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}


class CompletionFormat:
    def __init__(self, head: AnswerHead) -> None:
        self.id = f"cmpl-{head.request}"
        self._head: dict[str, Any] = {
            "id": self.id,
            "object": "text_completion",
            "created": head.created_s,
            "model": head.model,
        }
        self._details = _Details(head)
        self._with_logprobs = head.with_logprobs
        self._offsets: dict[int, TextOffset] = {}

    def opening(self, choice: int) -> dict[str, Any] | None:
        echo, of_prompt = self._details.echo(choice), self._details.of_prompt(choice)
        if not (echo or of_prompt):
            return None
        shown = {**self._choice(choice, echo, None), **of_prompt}
        return {**self._head, "choices": [shown], **self._details.tail(choice, None)}

    def chunk(self, choice: int, piece: Piece) -> dict[str, Any]:
        shown = self._choice(choice, piece.text, self._logprobs(choice, piece.logprobs))
        shown |= self._details.of_output(piece)
        return {**self._head, "choices": [shown], **self._details.tail(choice, piece)}

    def closing(self, choice: int, finish_reason: str) -> dict[str, Any]:
        shown = self._choice(choice, "", None, finish_reason)
        return {**self._head, "choices": [shown], **self._details.tail(choice, None)}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage}

    def whole(self, choices: Sequence[WholeChoice], usage: dict[str, Any]) -> dict[str, Any]:
        shown = [
            {
                **self._choice(
                    index,
                    self._details.echo(index) + choice.text,
                    self._logprobs(index, choice.logprobs),
                    choice.finish_reason,
                ),
                **self._details.of_prompt(index),
                **self._details.of_output(choice),
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._head, "choices": shown, "usage": usage}

    def _choice(
        self, choice: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, choice: int, entries: Sequence[LogprobEntry]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        offset = self._offsets.setdefault(choice, TextOffset())
        return {
            "tokens": [self._details.spell(entry.chosen) for entry in entries],
            "token_logprobs": [_finite(entry.chosen.logprob) for entry in entries],
            "top_logprobs": [self._details.by_spelling(_with_chosen(entry)) for entry in entries],
            "text_offset": [offset.advance(entry.chosen.bytes) for entry in entries],
        }


class _Details:
    """What clients ask to know beside the text."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._tail: dict[str, Any] = {"usage": None} if head.with_usage else {}
        self._counts: dict[int, int] = {}
        """Tokens so far, by choice."""

    def of_prompt(self, choice: int) -> dict[str, Any]:
        return {"prompt_token_ids": self._head.prompts[choice].token_ids} if self._head.with_token_ids else {}

    def of_output(self, output: Piece | WholeChoice | None) -> dict[str, Any]:
        return {"token_ids": output.ids if output else ()} if self._head.with_token_ids else {}

    def echo(self, choice: int) -> str:
        return self._head.prompts[choice].echo if self._head.prompts else ""

    def tail(self, choice: int, piece: Piece | None) -> dict[str, Any]:
        """Return the end of a chunk."""
        if not self._head.with_counts:
            return self._tail
        if piece is not None and piece.tokens_so_far:
            self._counts[choice] = piece.tokens_so_far
        prompt_tokens, tokens = self._head.prompts[choice].tokens, self._counts.get(choice, 0)
        return {
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": tokens,
                "total_tokens": prompt_tokens + tokens,
            }
        }

    def chat_token(self, candidate: Candidate) -> dict[str, Any]:
        text = f"token_id:{candidate.id}" if self._head.tokens_as_ids else candidate.bytes.decode(errors="replace")
        return {"token": text, "logprob": _finite(candidate.logprob), "bytes": list(candidate.bytes)}

    def spell(self, candidate: Candidate) -> str:
        return f"token_id:{candidate.id}" if self._head.tokens_as_ids else _spell(candidate)

    def by_spelling(self, candidates: Sequence[Candidate]) -> dict[str, float]:
        """Return the log-probabilities by text. Where tokens have the same text, all but the first are keyed by id."""
        shown: dict[str, float] = {}
        for candidate in candidates:
            text = self.spell(candidate)
            shown[f"token_id:{candidate.id}" if text in shown else text] = _finite(candidate.logprob)
        return shown


class EventWriter:
    """Writes the chunks of one answer as server-sent events. Most bytes of a chunk are those of the choice's others."""

    def __init__(self, shape: Format, *, detailed: bool, with_usage: bool = False) -> None:
        """Write chunks of this shape. `detailed`: pieces have more than text."""
        self.id = shape.id
        self._shape = shape
        self._detailed = detailed
        self._with_usage = with_usage
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """The bytes before and after the text, by choice."""

    def piece(self, choice: int, piece: Piece) -> bytes:
        around = self.around(choice)
        if around is None or piece.reasoning or piece.calls:
            return sse_event(self._shape.chunk(choice, piece))
        return around[0] + to_json(piece.text) + around[1]

    def around(self, choice: int) -> tuple[bytes, bytes] | None:
        if self._detailed:
            return None
        around = self._around.get(choice)
        if around is None:
            # The text is the last empty string of a chunk without one.
            before, _, after = sse_event(self._shape.chunk(choice, Piece())).rpartition(b'""')
            around = self._around[choice] = (before, after)
        return around

    def opening(self, choice: int) -> bytes:
        opening = self._shape.opening(choice)
        return b"" if opening is None else sse_event(opening)

    def closing(self, choice: int, outcome: Outcome) -> bytes:
        return sse_event(self._shape.closing(choice, outcome.finish_reason))

    def end(self, usage: dict[str, Any]) -> bytes:
        return (sse_event(self._shape.usage_chunk(usage)) if self._with_usage else b"") + SSE_DONE

    def failure(self, error: BatonError) -> bytes:
        # OpenAI's clients raise on an event with an `error`.
        return sse_event(error_body(error))

    def whole(self, choices: Sequence[WholeChoice], outcomes: Sequence[Outcome], usage: dict[str, Any]) -> bytes:
        for choice, outcome in zip(choices, outcomes, strict=True):
            choice.finish_reason = outcome.finish_reason
        return to_json(self._shape.whole(choices, usage))


class TextOffset:
    """Counts the complete characters of the tokens so far."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = 0

    def advance(self, token: bytes) -> int:
        """Return where this token begins."""
        before = self._chars
        self._chars += len(self._decoder.decode(token))
        return before


def _message(choice: WholeChoice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if reasoning := "".join(choice.reasoning):
        message["reasoning_content"] = reasoning
    if choice.calls:
        # OpenAI's clients take null, not an empty text, for an answer of calls alone.
        message |= {"content": choice.text or None, "tool_calls": [_call(call) for call in choice.calls]}
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _with_chosen(entry: LogprobEntry) -> tuple[Candidate, ...]:
    """Return the likeliest candidates, and the chosen one if it is none of them."""
    if any(candidate.id == entry.chosen.id for candidate in entry.top):
        return entry.top
    return (*entry.top, entry.chosen)


def _spell(candidate: Candidate) -> str:
    """Return the token's text; for a partial character, `bytes:\\xNN…`, as OpenAI does."""
    try:
        return candidate.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in candidate.bytes)


def _finite(logprob: float) -> float:
    # NaN compares as False, so it becomes the bound as well.
    return logprob if logprob > LOGPROB_MIN else LOGPROB_MIN
