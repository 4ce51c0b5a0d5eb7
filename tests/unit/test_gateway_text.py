"""Conversion of tokens to text: whole characters, stop strings at any position, the same text for any split."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from baton_gateway.choice import ChoiceText
from baton_gateway.detokenise import PROMPT_TOKENS, Spellings, Vocabulary
from baton_gateway.parameters import OutputOptions
from baton_gateway.parsing.formats import FormatName, ParsingOptions
from baton_gateway.parsing.parsed_text import ParsedText
from baton_gateway.stop_strings import StopScanner
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from baton.messages.attempts import TokenLogprob
from tests.harness.gateway.actors import EOS, make_tokenizer
from tests.harness.gateway.samples import form_of


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """Return a tokenizer as Llama 2's: pieces with ▁ for spaces, and bytes for what no piece covers."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *[f"<0x{byte:02X}>" for byte in range(256)],
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
        "▁ab",
        "é",
    ]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(Spellings.of(tokenizer))


def text_of(tokenizer: Tokenizer, tokens: list[int], *, skip_special: bool = True) -> str:
    detokeniser = vocabulary_of(tokenizer).detokeniser(skip_special=skip_special)
    return "".join(map(detokeniser.feed, tokens)) + detokeniser.flush()


@given(tokens=st.lists(st.integers(0, 399), max_size=40), skip_special=st.booleans())
def test_any_tokens_give_the_tokenizers_own_text(byte_level: Tokenizer, tokens: list[int], skip_special: bool) -> None:
    assert text_of(byte_level, tokens, skip_special=skip_special) == byte_level.decode(
        tokens, skip_special_tokens=skip_special
    )


@given(text=st.text(alphabet="ab é你好😀", max_size=20))
def test_valid_text_through_byte_fallback(byte_fallback: Tokenizer, text: str) -> None:
    tokens = byte_fallback.encode(text.replace(" ", "▁"), add_special_tokens=False).ids
    assert text_of(byte_fallback, tokens) == byte_fallback.decode(tokens, skip_special_tokens=False)


@pytest.fixture(scope="module", params=["replace", "metaspace"])
def sentence_piece(request: pytest.FixtureRequest, byte_fallback: Tokenizer) -> Tokenizer:
    """Return tokenizers whose decoders strip the space before a text's first word."""
    tokenizer = Tokenizer.from_str(byte_fallback.to_str())
    tokenizer.add_special_tokens(["<s>", "</s>"])  # pyright: ignore[reportUnknownMemberType]
    if request.param == "metaspace":
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()])
    return tokenizer


@given(prompt=st.text(alphabet="ab é你😀", max_size=20), output=st.text(alphabet="ab é你😀", max_size=20))
@example(prompt="a", output=" a")
@example(prompt="", output=" a")
@example(prompt=" ", output=" a")
@example(prompt="你" * 30, output="好")
def test_an_output_is_what_it_adds_to_the_prompt(sentence_piece: Tokenizer, prompt: str, output: str) -> None:
    before, tokens = (
        sentence_piece.encode(text.replace(" ", "▁"), add_special_tokens=False).ids for text in (prompt, output)
    )
    detokeniser = vocabulary_of(sentence_piece).detokeniser(prompt=[1, *before][-PROMPT_TOKENS:])
    shown = "".join(map(detokeniser.feed, tokens)) + detokeniser.flush()
    assert shown == sentence_piece.decode([1, *before, *tokens])[len(sentence_piece.decode([1, *before])) :]


def test_special_tokens_at_the_end_of_a_prompt_are_no_context(byte_fallback: Tokenizer) -> None:
    tokenizer = Tokenizer.from_str(byte_fallback.to_str())
    tokenizer.add_special_tokens(["</s>"])  # pyright: ignore[reportUnknownMemberType]
    prompt, output = tokenizer.encode("▁a", add_special_tokens=False).ids, tokenizer.encode("▁ab").ids
    end = 2
    detokeniser = vocabulary_of(tokenizer).detokeniser(prompt=[*prompt, *[end] * 20])
    assert "".join(map(detokeniser.feed, output)) == " ab"


@given(tokens=st.lists(st.integers(0, 280), max_size=20))
def test_spellings_decode_as_the_tokenizer(byte_fallback: Tokenizer, tokens: list[int]) -> None:
    vocabulary = vocabulary_of(byte_fallback)
    spelled = b"".join(vocabulary.token_bytes(token) for token in tokens if token > 258)
    known = [token for token in tokens if 258 < token < byte_fallback.get_vocab_size()]
    assert spelled.decode().removeprefix(" ") == byte_fallback.decode(known)


def test_bytes_that_never_become_a_character_are_shown(byte_fallback: Tokenizer) -> None:
    detokeniser = vocabulary_of(byte_fallback).detokeniser()
    shown = [detokeniser.feed(3 + 0xFF) for _ in range(20)]
    assert "".join(shown), "held for ever"


@pytest.mark.parametrize("fixture", ["byte_level", "byte_fallback"])
def test_no_piece_ends_inside_a_character(fixture: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(fixture)
    text = "é你好😀a"
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    detokeniser = vocabulary_of(tokenizer).detokeniser()
    pieces = [piece for token in tokens if (piece := detokeniser.feed(token))]
    assert len(tokens) > len(text), "some character must span several tokens for this to say anything"
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


# ---------------------------------------------------------------- stop strings


def first_stop(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The naive answer: the stop string that is complete first, the longest if several are."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


SHORT = st.text(alphabet="ab", max_size=24)


@given(
    text=SHORT,
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=8),
    include=st.booleans(),
)
def test_stop_strings_equal_the_naive_search(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    scanner = StopScanner(stops, include_stop=include)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    shown, found = "", None
    for start, end in pairwise(edges):
        piece, found = scanner.feed(text[start:end])
        shown += piece
        assert not any(shown.endswith(stop) for stop in stops) or include, "a stop string was shown"
        if found is not None:
            break
    if found is None:
        shown += scanner.flush()
    assert (shown, found) == first_stop(text, stops, include=include)


def test_only_the_possible_start_of_a_stop_is_held() -> None:
    scanner = StopScanner(["</end>"])
    assert scanner.feed("hello <") == ("hello ", None)
    assert scanner.feed("/e") == ("", None)
    assert scanner.feed("lse") == ("</else", None)
    assert scanner.feed("</end> more") == ("", "</end>")


# ---------------------------------------------------------------- choices


def run_choice(
    tokenizer: Tokenizer, tokens: list[int], options: OutputOptions, cuts: list[int], *, ends: bool
) -> tuple[str, int, bool]:
    """Feed the tokens in frames that end at `cuts`; return the text, the tokens counted, and whether it stopped."""
    choice = ChoiceText(vocabulary_of(tokenizer), options)
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    text = ""
    for start, end in pairwise(edges):
        piece = choice.feed(tokens[start:end], (), ends=ends and end == len(tokens))
        text += piece.text
        if piece.stopped:
            return text, choice.tokens, True
    rest = choice.finish()
    return text + rest.text, choice.tokens, rest.stopped


@given(
    tokens=st.lists(st.integers(3, 399), max_size=40),
    stops=st.lists(st.sampled_from(["the", " f", "é", "好", "\N{REPLACEMENT CHARACTER}", "o"]), max_size=2),
    cuts=st.lists(st.integers(0, 40), max_size=10),
    min_tokens=st.integers(0, 10),
    ends=st.booleans(),
)
def test_a_stream_in_pieces_equals_the_whole(
    byte_level: Tokenizer, tokens: list[int], stops: list[str], cuts: list[int], min_tokens: int, ends: bool
) -> None:
    options = OutputOptions(stops=tuple(stops), min_tokens=min_tokens)
    pieces = run_choice(byte_level, tokens, options, cuts, ends=ends)
    assert pieces == run_choice(byte_level, tokens, options, [], ends=ends)
    if not stops:
        shown = tokens[:-1] if ends else tokens
        assert pieces == (byte_level.decode(shown), len(tokens), False)


def test_tokens_are_counted_up_to_the_match(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("the quick brown fox", add_special_tokens=False).ids
    choice = ChoiceText(vocabulary_of(byte_level), OutputOptions(stops=("quick",)))
    piece = choice.feed(tokens, (), ends=False)
    shown = byte_level.decode(tokens[: piece.tokens])
    assert piece.stopped
    assert piece.text == "the "
    assert "quick" in shown
    assert "quick" not in byte_level.decode(tokens[: piece.tokens - 1])
    assert choice.tokens == piece.tokens < len(tokens)


def test_the_last_token_is_counted_and_not_shown(byte_level: Tokenizer) -> None:
    tokens = [*byte_level.encode("the fox", add_special_tokens=False).ids, EOS]
    plain = ChoiceText(vocabulary_of(byte_level), OutputOptions(skip_special=False))
    assert plain.feed(tokens, (), ends=True).text == "the fox"
    assert plain.tokens == len(tokens)


@pytest.mark.parametrize("at_once", [1, 3])
def test_reasoning_is_counted_in_tokens(byte_level: Tokenizer, at_once: int) -> None:
    def encode(text: str) -> list[int]:
        return byte_level.encode(text, add_special_tokens=False).ids

    vocabulary, form, options = vocabulary_of(byte_level), form_of(FormatName.THINK), OutputOptions()
    choice = ParsedText(vocabulary, options, (), parsing=ParsingOptions(), form=form, request="r")
    thought, rest = encode("<think>a fox"), encode("</think>dog")
    for tokens in (thought, rest):
        for start in range(0, len(tokens), at_once):
            choice.feed(tokens[start : start + at_once], (), ends=False)
    assert choice.reasoning_tokens == len(thought)
    assert ChoiceText(vocabulary, options).reasoning_tokens is None, "no format with reasoning"


def test_logprobs_carry_the_tokens_own_bytes(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("😀", add_special_tokens=False).ids
    choice = ChoiceText(vocabulary_of(byte_level), OutputOptions(logprobs=True))
    logprobs = [TokenLogprob(logprob=-0.1, top=((token, -0.1),)) for token in tokens]
    piece = choice.feed(tokens, logprobs, ends=False)
    assert b"".join(entry.chosen.bytes for entry in piece.logprobs) == "😀".encode()
    assert [entry.top[0] for entry in piece.logprobs] == [entry.chosen for entry in piece.logprobs]
