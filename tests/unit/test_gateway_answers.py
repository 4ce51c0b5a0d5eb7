"""OpenAI's answer formats: log-probabilities of tokens that are no text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from baton_gateway.answers import LOGPROB_MIN, AnswerHead
from baton_gateway.choice import Candidate, LogprobEntry, Piece
from baton_gateway.guard import error_response
from baton_gateway.openai_answers import ChatFormat, CompletionFormat

from baton.errors import BatonError

HEAD = AnswerHead(request="r", model="m", created_s=0, with_logprobs=True)
SMILE = "😀".encode()


def entry(*candidates: tuple[int, bytes, float]) -> LogprobEntry:
    """Return an entry whose first candidate was chosen."""
    top = tuple(Candidate(*candidate) for candidate in candidates)
    return LogprobEntry(top[0], top)


def completion_logprobs(*entries: LogprobEntry) -> dict[str, Any]:
    return CompletionFormat(HEAD).chunk(0, Piece(logprobs=list(entries)))["choices"][0]["logprobs"]


def test_alternatives_without_text_of_their_own_are_all_reported() -> None:
    shown = completion_logprobs(
        entry((5, b"\xf0\x9f", -0.1), (6, b"\xe4", -0.2), (7, b"\xe5\xa5", -0.3), (8, b"a", -0.4))
    )
    assert shown["top_logprobs"] == [
        {"bytes:\\xf0\\x9f": -0.1, "bytes:\\xe4": -0.2, "bytes:\\xe5\\xa5": -0.3, "a": -0.4}
    ]
    assert shown["tokens"] == ["bytes:\\xf0\\x9f"]


def test_alternatives_that_read_the_same_are_told_apart_by_their_ids() -> None:
    shown = completion_logprobs(entry((70, b"A", -0.1), (65, b"A", -0.2), (900, b"", -0.3), (901, b"", -0.4)))
    assert shown["top_logprobs"] == [{"A": -0.1, "token_id:65": -0.2, "": -0.3, "token_id:901": -0.4}]


def test_offsets_are_places_in_the_text() -> None:
    pieces = [b"h", SMILE[:2], SMILE[2:], b"ok", b"!"]
    shown = completion_logprobs(*(entry((at, piece, -1.0)) for at, piece in enumerate(pieces)))
    assert shown["text_offset"] == [0, 1, 1, 2, 4]


def test_offsets_go_on_from_chunk_to_chunk() -> None:
    form = CompletionFormat(HEAD)
    chunks = [form.chunk(0, Piece(logprobs=[entry((1, piece, -1.0))])) for piece in (b"ab", SMILE[:3], SMILE[3:], b"c")]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [2], [2], [3]]


def test_a_chat_reports_bytes() -> None:
    chunk = ChatFormat(HEAD).chunk(0, Piece(logprobs=[entry((5, b"\xf0", float("-inf")), (6, b"\xf1", float("nan")))]))
    (shown,) = chunk["choices"][0]["logprobs"]["content"]
    assert [other["bytes"] for other in shown["top_logprobs"]] == [[0xF0], [0xF1]]
    assert {other["logprob"] for other in shown["top_logprobs"]} == {LOGPROB_MIN}


def test_the_chosen_token_is_among_the_alternatives_of_completions() -> None:
    shown = completion_logprobs(LogprobEntry(Candidate(9, b"z", -7.0), (Candidate(5, b"a", -0.1),)))
    assert shown["top_logprobs"] == [{"a": -0.1, "z": -7.0}]
    assert completion_logprobs(LogprobEntry(Candidate(9, b"z", -7.0), ()))["top_logprobs"] == [{"z": -7.0}]


def all_errors(root: type[BatonError] = BatonError) -> Iterator[type[BatonError]]:
    yield root
    for kind in root.__subclasses__():
        yield from all_errors(kind)


ERRORS: list[type[BatonError]] = list(all_errors())


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_has_openais_shape(kind: type[BatonError]) -> None:
    response = error_response(kind("a sentence", param="field", retry_after_s=1.2), {"path": "/v1/chat/completions"})
    assert (response.status_code, response.headers["content-type"]) == (kind.http_status, "application/json")
    assert response.headers["retry-after"] == "2"
    assert json.loads(bytes(response.body)) == {
        "error": {"message": "a sentence", "type": kind.openai_type, "param": "field", "code": kind.code}
    }
