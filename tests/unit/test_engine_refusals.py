"""What clients read of an engine's errors."""

from __future__ import annotations

from baton.engines.refusals import sentence_of


def test_a_place_in_a_source_file_is_left_out() -> None:
    error = "Failed to convert: [16:53:38] /project/cpp/regex_converter.cc:83: Regex parsing error\nmore"
    assert sentence_of(ValueError(error)) == "Failed to convert: Regex parsing error"
    assert sentence_of("[a]: plain") == "[a]: plain"
