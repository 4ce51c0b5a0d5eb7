"""A response while it is generated: pieces of text in, its events and in the end the response out. Pure.

response.queued                       in background mode
response.created, .in_progress
  response.output_item.added            for each item: reasoning, message, function_call
    response.content_part.added           a call has no parts
      response.reasoning_text.delta …       or output_text, or function_call_arguments
      response.reasoning_text.done
    response.content_part.done
  response.output_item.done
response.completed                    or .incomplete, .failed; also .incomplete for a cancelled response
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from baton.errors import BatonError, InvalidRequest, Overloaded
from baton_gateway.answers import LOGPROB_MIN, to_json
from baton_gateway.choice import Candidate, LogprobEntry, Piece, ToolCall

TYPE_PREFIX: Final = b'{"type":"'


class Status(StrEnum):
    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL: Final = frozenset({Status.COMPLETED, Status.INCOMPLETE, Status.FAILED, Status.CANCELLED})


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0


class _Text(msgspec.Struct):
    """The item of text that is being written."""

    index: int
    item: dict[str, Any]
    part: dict[str, Any]
    name: str
    """Part of the names of its events."""
    texts: list[str]


class ResponseEvents:
    """Events of one response. Each is JSON that begins with its type."""

    def __init__(self, request: str, head: dict[str, Any], *, first: int = 0) -> None:
        """Begin a response. `head`: its fields but for `status` and `output`. `first`: number of its first event."""
        self._request = request
        self._head = {**head, "status": Status.IN_PROGRESS}
        self._next = first
        self._output: list[dict[str, Any]] = []
        self._open: _Text | None = None

    @property
    def status(self) -> Status:
        return self._head["status"]

    @property
    def ended(self) -> bool:
        return self._head["status"] in FINAL

    @property
    def number(self) -> int:
        """Number of the next event."""
        return self._next

    def head(self) -> bytes:
        """Return the response without its output, as a JSON object."""
        return to_json(self._head)

    def output(self) -> bytes:
        """Return the items of the output, as a JSON array."""
        return to_json(self._output)

    def note_unstored(self) -> None:
        """Note that the response is not stored although it could have been."""
        self._head["store"] = False

    def queue(self) -> list[bytes]:
        """Return the first events of a response that waits."""
        self._head["status"] = Status.QUEUED
        return [self._whole("response.created"), self._whole("response.queued")]

    def begin(self) -> list[bytes]:
        """Return the events that go before the first item."""
        created = [] if self._next else [self._whole("response.created")]
        self._head["status"] = Status.IN_PROGRESS
        return [*created, self._whole("response.in_progress")]

    def feed(self, piece: Piece) -> list[bytes]:
        """Return the events of a piece."""
        events: list[bytes] = []
        if piece.reasoning:
            self._write("reasoning", piece.reasoning, (), events)
        at = piece.calls_at if piece.calls else len(piece.text)
        before, after = piece.text[:at], piece.text[at:]
        if before:
            self._write("message", before, piece.logprobs, events)
        if piece.calls:
            events += self._close(Status.COMPLETED)
            for call in piece.calls:
                events += self._call(call)
        if after:
            self._write("message", after, () if before else piece.logprobs, events)
        return events

    def complete(self, finish_reason: str, usage: Usage, completed_at: int) -> list[bytes]:
        """Return the last events of a whole response."""
        cut = finish_reason == "length"
        status = Status.INCOMPLETE if cut else Status.COMPLETED
        if cut:
            self._head["incomplete_details"] = {"reason": "max_output_tokens"}
        self._head["completed_at"] = None if cut else completed_at
        self._head["usage"] = {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.input_tokens + usage.output_tokens,
        }
        return self._end(status)

    def fail(self, error: BatonError) -> list[bytes]:
        """Return the last events of a response that ends in an error."""
        self._head["error"] = error_of(error)
        return self._end(Status.FAILED)

    def cancel(self) -> list[bytes]:
        """Return the last events of a response that is not wanted any more; what was generated stays its output."""
        return self._end(Status.CANCELLED)

    def _end(self, status: Status) -> list[bytes]:
        item_status = Status.COMPLETED if status is Status.COMPLETED else Status.INCOMPLETE
        events = self._close(item_status)
        self._head["status"] = status
        name = Status.INCOMPLETE if status is Status.CANCELLED else status
        return [*events, self._whole(f"response.{name}")]

    # ------------------------------------------------------------ items

    def _write(self, kind: str, text: str, logprobs: Sequence[LogprobEntry], events: list[bytes]) -> None:
        """Add text to the item of this kind; another one ends first."""
        if self._open is None or self._open.item["type"] != kind:
            events += self._close(Status.COMPLETED)
            events += self._start(kind)
        opened = self._open
        assert opened is not None
        opened.texts.append(text)
        fields: dict[str, Any] = {"delta": text}
        if kind == "message":
            fields["logprobs"] = shown = [_logprob(entry) for entry in logprobs]
            opened.part["logprobs"] += shown
        events.append(self._of_part(f"{opened.name}.delta", opened, **fields))

    def _start(self, kind: str) -> Iterator[bytes]:
        index = len(self._output)
        item: dict[str, Any]
        if kind == "message":
            item = {"type": kind, "id": self._id("msg", index), "role": "assistant"}
            name, part = "output_text", {"type": "output_text", "text": "", "annotations": [], "logprobs": list[Any]()}
        else:
            item = {"type": kind, "id": self._id("rs", index), "summary": []}
            name, part = "reasoning_text", {"type": "reasoning_text", "text": ""}
        item |= {"status": Status.IN_PROGRESS, "content": []}
        self._output.append(item)
        self._open = opened = _Text(index, item, part, f"response.{name}", [])
        yield self._event("response.output_item.added", output_index=index, item=item)
        item["content"] = [part]
        yield self._of_part("response.content_part.added", opened, part=part)

    def _close(self, status: Status) -> list[bytes]:
        opened, self._open = self._open, None
        if opened is None:
            return []
        text = opened.part["text"] = "".join(opened.texts)
        logprobs = {"logprobs": opened.part["logprobs"]} if "logprobs" in opened.part else {}
        opened.item["status"] = status
        return [
            self._of_part(f"{opened.name}.done", opened, text=text, **logprobs),
            self._of_part("response.content_part.done", opened, part=opened.part),
            self._event("response.output_item.done", output_index=opened.index, item=opened.item),
        ]

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        index = len(self._output)
        item = {
            "type": "function_call",
            "id": self._id("fc", index),
            "status": Status.IN_PROGRESS,
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
        }
        self._output.append(item)
        where = {"item_id": item["id"], "output_index": index}
        yield self._event("response.output_item.added", output_index=index, item=item)
        yield self._event("response.function_call_arguments.delta", **where, delta=call.arguments)
        done = {**where, "name": call.name, "arguments": call.arguments}
        yield self._event("response.function_call_arguments.done", **done)
        item |= {"arguments": call.arguments, "status": Status.COMPLETED}
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _id(self, prefix: str, index: int) -> str:
        return f"{prefix}_{self._request}_{index}"

    # ------------------------------------------------------------ events

    def _whole(self, name: str) -> bytes:
        return self._event(name, response={**self._head, "output": self._output})

    def _of_part(self, name: str, opened: _Text, **fields: object) -> bytes:
        where = {"item_id": opened.item["id"], "output_index": opened.index, "content_index": 0}
        return self._event(name, **where, **fields)

    def _event(self, kind: str, /, **fields: object) -> bytes:
        number, self._next = self._next, self._next + 1
        return to_json({"type": kind, "sequence_number": number, **fields})


def error_of(error: BatonError) -> dict[str, Any]:
    """Return the error of a failed response, with one of OpenAI's codes."""
    code = "server_error"
    if isinstance(error, Overloaded):
        code = "rate_limit_exceeded"
    elif isinstance(error, InvalidRequest):
        code = "invalid_prompt"
    return {"code": code, "message": error.detail}


def sse_of(event: bytes) -> bytes:
    """Return an event as a server-sent one, which repeats its type."""
    start = len(TYPE_PREFIX)
    return b"event: %b\ndata: %b\n\n" % (event[start : event.index(b'"', start)], event)


def with_output(head: bytes, output: bytes) -> bytes:
    """Return a whole response: a JSON object, which is never empty, with one field more."""
    return b'%b,"output":%b}' % (head[:-1], output)


def merged(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Join pieces that follow each other and have only text, or only reasoning."""
    joined: Piece | None = None
    for piece in pieces:
        if joined is not None and _kind(joined) == _kind(piece) != "":
            joined.text += piece.text
            joined.reasoning += piece.reasoning
            joined.tokens += piece.tokens
            joined.logprobs += piece.logprobs
            continue
        if joined is not None:
            yield joined
        joined = msgspec.structs.replace(piece, logprobs=list(piece.logprobs))
    if joined is not None:
        yield joined


def _kind(piece: Piece) -> str:
    if piece.calls or (piece.text and piece.reasoning):
        return ""
    return "text" if piece.text else "reasoning" if piece.reasoning else ""


def _logprob(entry: LogprobEntry) -> dict[str, Any]:
    return {**_candidate(entry.chosen), "top_logprobs": [_candidate(each) for each in entry.top]}


def _candidate(candidate: Candidate) -> dict[str, Any]:
    # NaN and minus infinity, which JSON cannot express, become the bound.
    logprob = candidate.logprob if candidate.logprob > LOGPROB_MIN else LOGPROB_MIN
    return {"token": candidate.bytes.decode(errors="replace"), "logprob": logprob, "bytes": list(candidate.bytes)}
