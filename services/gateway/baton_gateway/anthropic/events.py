"""Answers in Anthropic's form: a message of blocks, whole or as events. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec

from baton.errors import BatonError
from baton.messages.attempts import FinishReason
from baton_gateway.answers import AnswerHead, WholeChoice, to_json
from baton_gateway.anthropic.errors import error_body
from baton_gateway.choice import Piece, ToolCall
from baton_gateway.order import Outcome

SIGNATURE_BYTES: Final = 16


def sse_event(event: dict[str, Any]) -> bytes:
    """Return an event, which is named as its `type`."""
    return b"event: " + event["type"].encode() + b"\ndata: " + to_json(event) + b"\n\n"


class MessageEvents:
    """Writes one message.

    Its blocks are thinking, text, the uses of tools, and the text after the first of these, where there are any and
    they are more than white space. So blocks depend on the answer alone, not on the pieces in which it came.
    """

    def __init__(self, head: AnswerHead, prompt_tokens: int) -> None:
        self.id = f"msg_{head.request}"
        self._request = head.request
        self._model = head.model
        self._prompt_tokens = prompt_tokens
        self._block = -1
        """Number of the newest block."""
        self._kind = ""
        """Type of the open block; empty if none is."""
        self._around = (b"", b"")
        """Bytes before and after the text of an event of the open block."""
        self._blank = ""
        """White space that begins a block of text if anything follows."""
        self._after = ""
        """Text after the first use of a tool."""
        self._used_tools = False
        self._signature = blake2b(digest_size=SIGNATURE_BYTES)
        self._outcome: Outcome | None = None

    # ------------------------------------------------------------ events

    def opening(self, choice: int) -> bytes:
        del choice
        message = self._message([], None, _usage(self._prompt_tokens, 0, 0))
        return sse_event({"type": "message_start", "message": message}) + sse_event({"type": "ping"})

    def piece(self, choice: int, piece: Piece) -> bytes:
        del choice
        if self._kind == "text" and not (piece.reasoning or piece.calls or self._used_tools):
            return self._delta(piece.text) if piece.text else b""
        events = self._thought(piece.reasoning) if piece.reasoning else b""
        if self._used_tools:
            self._after += piece.text
        elif piece.calls:
            events += self._said(piece.text[: piece.calls_at])
            self._after = piece.text[piece.calls_at :]
        else:
            events += self._said(piece.text)
        for call in piece.calls:
            self._used_tools = True
            events += self._begin("tool_use", {**_use(call), "input": {}}) + self._delta(call.arguments)
        return events

    def around(self, choice: int) -> tuple[bytes, bytes] | None:
        del choice

    def closing(self, choice: int, outcome: Outcome) -> bytes:
        del choice
        self._outcome = outcome
        self._blank = ""
        return self._said(self._after) + self._end_block()

    def end(self, usage: dict[str, Any]) -> bytes:
        assert self._outcome is not None
        delta = {"type": "message_delta", "delta": _stop(self._outcome), "usage": _usage_of(usage)}
        return sse_event(delta) + sse_event({"type": "message_stop"})

    def failure(self, error: BatonError) -> bytes:
        return sse_event(error_body(error, self._request))

    def _thought(self, text: str) -> bytes:
        events = b"" if self._kind == "thinking" else self._begin("thinking", {"thinking": "", "signature": ""})
        self._signature.update(text.encode())
        return events + self._delta(text)

    def _said(self, text: str) -> bytes:
        if self._kind != "text":
            self._blank += text
            if not self._blank.strip():
                return b""
            text, self._blank = self._blank, ""
            return self._begin("text", {"text": ""}) + self._delta(text)
        return self._delta(text) if text else b""

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        events = self._end_block()
        self._block += 1
        self._kind = kind
        name, field = _DELTAS[kind]
        # The text is the last empty string of an event without one.
        delta = {"type": "content_block_delta", "index": self._block, "delta": {"type": name, field: ""}}
        before, _, after = sse_event(delta).rpartition(b'""')
        self._around = (before, after)
        start = {"type": "content_block_start", "index": self._block, "content_block": {"type": kind, **block}}
        return events + sse_event(start)

    def _delta(self, text: str) -> bytes:
        return self._around[0] + to_json(text) + self._around[1]

    def _end_block(self) -> bytes:
        if not self._kind:
            return b""
        events = b""
        if self._kind == "thinking":
            signed = {"type": "signature_delta", "signature": self._signature.hexdigest()}
            events = sse_event({"type": "content_block_delta", "index": self._block, "delta": signed})
        self._kind = ""
        return events + sse_event({"type": "content_block_stop", "index": self._block})

    # ------------------------------------------------------------ whole

    def whole(self, choices: Sequence[WholeChoice], outcomes: Sequence[Outcome], usage: dict[str, Any]) -> bytes:
        (choice,), (outcome,) = choices, outcomes
        return to_json(self._message(blocks_of(choice), outcome, _usage_of(usage)))

    def _message(self, content: list[dict[str, Any]], outcome: Outcome | None, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **_stop(outcome),
            "usage": usage,
        }


def blocks_of(choice: WholeChoice) -> list[dict[str, Any]]:
    """Return the blocks of a complete answer."""
    thinking, text = "".join(choice.reasoning), choice.text
    before, after = (text[: choice.calls_at], text[choice.calls_at :]) if choice.calls else (text, "")
    blocks: list[dict[str, Any]] = []
    if thinking:
        signature = blake2b(thinking.encode(), digest_size=SIGNATURE_BYTES).hexdigest()
        blocks.append({"type": "thinking", "thinking": thinking, "signature": signature})
    if before.strip():
        blocks.append({"type": "text", "text": before})
    blocks += [
        {"type": "tool_use", **_use(call), "input": msgspec.Raw(call.arguments.encode())} for call in choice.calls
    ]
    if after.strip():
        blocks.append({"type": "text", "text": after})
    return blocks


_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def _use(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "name": call.name}


def _stop(outcome: Outcome | None) -> dict[str, Any]:
    match outcome:
        case None:
            reason = None
        case Outcome(reason=FinishReason.LENGTH):
            reason = "max_tokens"
        case Outcome(calls=calls) if calls:
            reason = "tool_use"
        case _:
            reason = "stop_sequence" if outcome.stop else "end_turn"
    return {"stop_reason": reason, "stop_sequence": outcome.stop if outcome and reason == "stop_sequence" else None}


def _usage_of(usage: dict[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return _usage(usage["prompt_tokens"], cached, usage["completion_tokens"])


def _usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Return the usage: Anthropic counts cached tokens of the prompt apart from the others."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }
