"""Prompts in chunks: in order or not at all, and bounded."""

from __future__ import annotations

import pytest

from baton.errors import MalformedMessage
from baton.messages.attempts import TokenChunk
from baton.messages.base import Context, pack_tokens
from baton.worker.assembly import Assembly


def chunk(offset: int, tokens: list[int], request: str = "r") -> TokenChunk:
    return TokenChunk(context=Context(request=request, budget_s=10), offset=offset, tokens=pack_tokens(tokens))


def test_chunks_and_tail_make_the_prompt() -> None:
    assembly = Assembly()
    assembly.add(chunk(0, [1, 2]), 0.0)
    assembly.add(chunk(2, [3]), 0.0)
    assembly.add(chunk(2, [3]), 0.0)
    assert assembly.complete(("r", 0), pack_tokens([4]), 4) == pack_tokens([1, 2, 3, 4])
    assert len(assembly) == 0


def test_a_prompt_in_one_piece_needs_no_chunks() -> None:
    assert Assembly().complete(("r", 0), pack_tokens([4]), 1) == pack_tokens([4])


@pytest.mark.parametrize("prompt_tokens", [0, 2, 4])
def test_a_prompt_of_another_length_is_incomplete(prompt_tokens: int) -> None:
    assembly = Assembly()
    assembly.add(chunk(0, [1, 2]), 0.0)
    assert assembly.complete(("r", 0), pack_tokens([3]), prompt_tokens) is None


def test_a_gap_drops_the_prompt() -> None:
    assembly = Assembly()
    assembly.add(chunk(0, [1]), 0.0)
    assembly.add(chunk(2, [3]), 0.0)
    assert len(assembly) == 0
    assert assembly.complete(("r", 0), pack_tokens([4]), 4) is None


def test_odd_bytes_are_malformed() -> None:
    with pytest.raises(MalformedMessage):
        Assembly().complete(("r", 0), b"abc", 1)


def test_what_waits_is_bounded_in_number_bytes_and_time() -> None:
    assembly = Assembly(prompts_max=3, bytes_max=100, wait_s=5.0)
    for number in range(5):
        assembly.add(chunk(0, [1] * 4, f"r{number}"), float(number))
    assert len(assembly) == 3
    assert assembly.complete(("r1", 0), b"", 4) is None
    assembly.add(chunk(0, [1] * 20, "big"), 4.0)
    assert len(assembly) == 2
    assembly.purge(8.9)
    assert len(assembly) == 2
    assembly.purge(9.0)
    assert len(assembly) == 0
    assembly.add(chunk(0, [1] * 26, "huge"), 9.0)
    assert len(assembly) == 0
