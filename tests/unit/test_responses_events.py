"""Events of a response: in order, and the same response however its text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from baton_gateway.choice import Candidate, LogprobEntry, Piece, ToolCall
from baton_gateway.responses.events import ResponseEvents, Status, Usage, merged, sse_of, with_output
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import BatonError, InvalidRequest, Overloaded, WorkerLost
from tests.harness.gateway.responses import rebuilt

HEAD: dict[str, Any] = {"id": "resp_1", "usage": None, "error": None, "incomplete_details": None, "completed_at": None}
USAGE = Usage(input_tokens=5, output_tokens=1000, cached_tokens=2, reasoning_tokens=7)
TEXT = st.text(min_size=1, max_size=4)
LOGPROBS = st.lists(
    st.builds(
        LogprobEntry,
        st.builds(Candidate, st.just(1), st.just(b"a"), st.floats(-20, 0)),
        st.just((Candidate(2, b"\xf0", float("-inf")),)),
    ),
    max_size=2,
)
CALLS = st.lists(st.tuples(TEXT, st.just('{"a":1}')), max_size=2).map(
    lambda calls: tuple(ToolCall(0, f"call_{name}", name, arguments) for name, arguments in calls)
)
PIECES = st.lists(
    st.builds(
        Piece, text=st.just("") | TEXT, tokens=st.integers(1, 3), logprobs=LOGPROBS, reasoning=st.just("") | TEXT,
        calls=st.just(()) | CALLS, calls_at=st.integers(0, 4),
    ),
    max_size=12,
)  # fmt: skip


def produce(pieces: list[Piece], *, ends: str = "stop", groups: list[int] | None = None) -> list[dict[str, Any]]:
    """Return the events of a response whose pieces come in groups."""
    events = ResponseEvents("r", HEAD)
    made = events.begin()
    rest = list(pieces)
    for size in [*(groups or []), len(pieces)]:
        for piece in merged(rest[:size]):
            made += events.feed(piece)
        del rest[:size]
    match ends:
        case "cancel":
            made += events.cancel()
        case "fail":
            made += events.fail(WorkerLost("gone"))
        case _:
            made += events.complete(ends, USAGE, 7)
    whole = with_output(events.head(), events.output())
    decoded = [json.loads(event) for event in made]
    assert json.loads(whole) == decoded[-1]["response"]
    return decoded


def items_of(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Return the kinds and texts of a response's items, by hand."""
    items: list[tuple[str, str]] = []
    for piece in pieces:
        at = piece.calls_at if piece.calls else len(piece.text)
        before, after = piece.text[:at], piece.text[at:]
        called = [("function_call", call.name) for call in piece.calls]
        for kind, text in (("reasoning", piece.reasoning), ("message", before), *called, ("message", after)):
            if kind != "function_call" and text and items and items[-1][0] == kind:
                items[-1] = (kind, items[-1][1] + text)
            elif text:
                items.append((kind, text))
    return items


def text_of(item: dict[str, Any]) -> str:
    return item["name"] if item["type"] == "function_call" else "".join(part["text"] for part in item["content"])


@given(PIECES, st.sampled_from(["stop", "length", "cancel", "fail"]), st.lists(st.integers(0, 4), max_size=6))
def test_the_events_make_the_response_whatever_the_pieces(pieces: list[Piece], ends: str, groups: list[int]) -> None:
    events = produce(pieces, ends=ends)
    response = rebuilt(events)
    assert [(item["type"], text_of(item)) for item in response["output"]] == items_of(pieces)
    statuses = {item.get("status") for item in response["output"][:-1]}
    assert statuses <= {"completed"}, "only the last item may be cut"
    gathered = rebuilt(produce(pieces, ends=ends, groups=groups))
    assert gathered == response


def test_text_after_a_call_is_a_message_after_it() -> None:
    call = ToolCall(0, "call_f", "f", "{}")
    logprob = LogprobEntry(Candidate(1, b"M", -1.0), ())
    pieces = [Piece("Bef", 1), Piece("ore.M", 3, [logprob], calls=(call,), calls_at=4), Piece("iddle.", 1)]
    output = rebuilt(produce(pieces))["output"]
    said = [(item["type"], text_of(item)) for item in output]
    assert said == [("message", "Before."), ("function_call", "f"), ("message", "Middle.")]
    assert sum(len(item["content"][0]["logprobs"]) for item in output if item["type"] == "message") == 1


@pytest.mark.parametrize(
    ("ends", "status", "last", "item"),
    [
        ("stop", "completed", "response.completed", "completed"),
        ("tool_calls", "completed", "response.completed", "completed"),
        ("length", "incomplete", "response.incomplete", "incomplete"),
        ("cancel", "cancelled", "response.incomplete", "incomplete"),
        ("fail", "failed", "response.failed", "incomplete"),
    ],
)
def test_how_a_response_ends(ends: str, status: str, last: str, item: str) -> None:
    events = produce([Piece("a", 1)], ends=ends)
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"]) == (last, status)
    assert response["output"][0]["status"] == item
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if ends == "length" else None)
    assert response["completed_at"] == (7 if status == "completed" else None)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("x"), "rate_limit_exceeded"),
        (InvalidRequest("x"), "invalid_prompt"),
        (WorkerLost("x"), "server_error"),
    ],
)
def test_errors_have_openais_codes(error: BatonError, code: str) -> None:
    events = ResponseEvents("r", HEAD)
    assert json.loads(events.fail(error)[-1])["response"]["error"] == {"code": code, "message": "x"}


def test_usage_has_reasoning_apart() -> None:
    usage = rebuilt(produce([Piece(reasoning="a"), Piece("t")]))["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 7}


def test_a_queued_response_begins_later() -> None:
    events = ResponseEvents("r", HEAD)
    queued = [json.loads(event) for event in events.queue()]
    assert [event["type"] for event in queued] == ["response.created", "response.queued"]
    assert events.status is Status.QUEUED
    (begun,) = events.begin()
    assert json.loads(begun)["sequence_number"] == 2
    assert sse_of(begun) == b"event: response.in_progress\ndata: " + begun + b"\n\n"
