"""Tokens kept by segment are those of the whole text, for every kind of tokenizer, text and template."""

# The library leaves its lists without types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from baton_gateway.intake import Intake, Plan
from baton_gateway.segments import ENTRY_BYTES, SEGMENT_CHARS_MIN, Segments, separators_of
from baton_gateway.tokenise import ModelTokenizer
from baton_gateway.workers import Model
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from baton.messages.base import pack_tokens, unpack_tokens
from tests.harness.gateway.actors import make_tokenizer

BEGIN, END, SAID = "<|begin|>", "<|end|>", "<|said|>"
SAMPLE = BEGIN + END + SAID + "\n"
WORDS = ["the quick brown fox", "jumps over", "a", "é", "e\u0301", "ﬁ", "<|beg", "in|>", "|>", "<|", "<|en", "d|>"]
FRAGMENTS = [*WORDS, BEGIN, END, SAID, " ", "  ", "\n", "\t", "7", "42", "_", "'s"]
GPT_SPLIT = r"'s|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _trained(model: Any, trainer: Any, pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator([" ".join(WORDS) * 4], trainer)
    return tokenizer


def _byte_level(normalizer: Any = None, *, split: bool = False, prefix: bool = False) -> Tokenizer:
    pre_tokenizer: Any = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not split)
    if split:
        pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(GPT_SPLIT), "isolated"), pre_tokenizer])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    return _trained(models.BPE(), trainer, pre_tokenizer, normalizer)


def _metaspace(scheme: str) -> Tokenizer:
    """Return a tokenizer as SentencePiece's; with "first", only the beginning of a text gets a space."""
    trainer = trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    return _trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(prepend_scheme=scheme), normalizers.NFKC())


def _whole_pieces() -> Tokenizer:
    """Return a tokenizer as Llama 2's, which merges across words."""
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    model = models.BPE(unk_token="<unk>", fuse_unk=True)
    return _trained(
        model, trainer, None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    )


def _word_piece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=["[UNK]"], show_progress=False)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _trained(models.WordPiece(unk_token="[UNK]"), trainer, pre_tokenizer, normalizers.BertNormalizer())


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": _byte_level,
    "byte level, split as GPT-4": lambda: _byte_level(split=True),
    "byte level, NFC": lambda: _byte_level(normalizers.NFC()),
    "byte level, stripped": lambda: _byte_level(normalizers.Strip()),
    "byte level, space before": lambda: _byte_level(prefix=True),
    "metaspace first": lambda: _metaspace("first"),
    "metaspace always": lambda: _metaspace("always"),
    "whole pieces": _whole_pieces,
    "word pieces": _word_piece,
}


def _added(*spellings: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(spelling, **flags) for spelling in spellings]


ADDED: dict[str, list[AddedToken]] = {
    "special": _added(BEGIN, END, SAID, special=True),
    "normalised": _added(BEGIN, END, SAID, normalized=True),
    "some normalised": _added(BEGIN, normalized=True) + _added(END, SAID, special=True),
    "stripping on the right": _added(BEGIN, END, SAID, special=True, rstrip=True),
    "stripping on the left": _added(BEGIN, END, SAID, special=True, lstrip=True),
    "some stripping": _added(BEGIN, normalized=True, rstrip=True) + _added(END, lstrip=True) + _added(SAID),
    "whole words": _added(BEGIN, special=True) + _added("fox", SAID, single_word=True),
    "overlapped in front": _added(BEGIN, END, SAID, "fox<|", special=True),
    "overlapped behind": _added(BEGIN, END, SAID, normalized=True) + _added("|>a", special=True),
    "contained": _added(BEGIN, END, SAID, "a" + BEGIN, special=True),
    "containing": _added(BEGIN, END, SAID, normalized=True) + _added("end", special=True),
    "whitespace": _added(BEGIN, special=True, rstrip=True) + _added(END, "\n", special=True),
}


@cache
def tokenizer_of(kind: str, added: str) -> Tokenizer:
    tokenizer = KINDS[kind]()
    tokenizer.add_tokens(ADDED[added])
    return tokenizer


def separators(kind: str, added: str) -> list[str]:
    return separators_of(tokenizer_of(kind, added), SAMPLE)


@given(texts=st.lists(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12).map("".join), max_size=4))
def test_kept_tokens_are_those_of_the_whole_text(texts: list[str]) -> None:
    for kind, added in product(KINDS, ADDED):
        tokenizer = tokenizer_of(kind, added)

        def encode(text: str, tokenizer: Tokenizer = tokenizer) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False).ids

        segments = Segments(separators(kind, added), encode, chars_min=1)
        for end in range(len(texts)):
            text = "".join(texts[: end + 1])  # Each text goes on where the one before ended.
            assert unpack_tokens(segments.tokenise(text, "")) == encode(text), (kind, added)


@pytest.mark.parametrize(
    ("added", "cuts", "cuts_where_text_changes"),
    [
        ("special", [BEGIN, END, SAID], [BEGIN, END, SAID]),
        ("normalised", [BEGIN, END, SAID], []),
        ("some normalised", [BEGIN, END, SAID], [END, SAID]),
        ("stripping on the right", [BEGIN, END, SAID], [BEGIN, END, SAID]),
        ("stripping on the left", [], []),
        ("some stripping", [BEGIN, SAID], []),
        ("whole words", [], []),
        ("overlapped in front", [], []),
        ("overlapped behind", [], []),
        ("contained", [END, SAID], [END, SAID]),
        ("containing", [BEGIN, SAID], []),
        ("whitespace", [BEGIN, END], [BEGIN, END]),
    ],
)
def test_texts_are_cut_only_where_no_neighbour_matters(
    added: str, cuts: list[str], cuts_where_text_changes: list[str]
) -> None:
    assert sorted(separators("byte level", added)) == cuts
    assert sorted(separators("byte level, NFC", added)) == cuts_where_text_changes


def test_a_token_that_overlaps_itself_cuts_nothing() -> None:
    tokenizer = _byte_level()
    tokenizer.add_special_tokens(["##", "[a]"])
    assert separators_of(tokenizer, "## [a]") == ["[a]"]


def test_a_tokenizer_that_takes_special_tokens_for_text_is_not_cut() -> None:
    tokenizer = tokenizer_of("byte level", "special")
    tokenizer.encode_special_tokens = True
    try:
        assert separators_of(tokenizer, SAMPLE) == []
    finally:
        tokenizer.encode_special_tokens = False


class Encoder:
    """Makes a token of each character, and notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.asked.append(text)
        return list(map(ord, text))


def test_a_second_turn_encodes_what_is_new() -> None:
    encode = Encoder()
    segments = Segments([BEGIN, END], encode)
    first = f"{BEGIN}{'x' * SEGMENT_CHARS_MIN}{END}{BEGIN}"
    second = f"{first}{'y' * SEGMENT_CHARS_MIN}{END}{BEGIN}"
    segments.tokenise(first, "")
    encode.asked.clear()
    assert segments.tokenise(second, "") == pack_tokens(list(map(ord, second)))
    assert encode.asked == [f"{END}{BEGIN}{'y' * SEGMENT_CHARS_MIN}", f"{END}{BEGIN}"]
    encode.asked.clear()
    segments.tokenise(second, "a salt")
    assert encode.asked[0].startswith(f"{BEGIN}x"), "requests with another salt share nothing"


def test_what_is_kept_is_bounded_and_the_least_recently_used_goes_first() -> None:
    encode = Encoder()
    segments = Segments([END], encode, bytes_max=3 * (5 * SEGMENT_CHARS_MIN + 2 * ENTRY_BYTES))
    texts = [f"{letter * SEGMENT_CHARS_MIN}{END}" for letter in "abcd"]
    for number in (0, 1, 2, 0, 3):
        segments.tokenise(texts[number], "")
    assert segments.bytes <= 3 * (5 * SEGMENT_CHARS_MIN + 2 * ENTRY_BYTES)
    encode.asked.clear()
    for number in (0, 2, 3, 1):
        segments.tokenise(texts[number], "")
    assert [asked[0] for asked in encode.asked if asked != END] == ["b"]
    for number in range(1000):
        segments.tokenise(f"{number}{'x' * SEGMENT_CHARS_MIN}{END}", "")
    segments.tokenise("x" * 100_000 + END, "")
    assert segments.bytes <= 3 * (5 * SEGMENT_CHARS_MIN + 2 * ENTRY_BYTES)


# ---------------------------------------------------------------- templates

LONG = "the quick brown fox " * (SEGMENT_CHARS_MIN // 10)
TURNS: list[dict[str, str]] = [
    {"role": "system", "content": LONG + "0"},
    {"role": "user", "content": f"  {LONG}1\n "},
    {"role": "assistant", "content": f"<think>{LONG}2</think>{LONG}3"},
    {"role": "user", "content": f"{LONG}<|im_end|>{LONG}4"},
    {"role": "assistant", "content": f"<think>{LONG}5</think>6"},
    {"role": "user", "content": "7"},
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETTING = "(m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content)"
TEMPLATES = {
    "as it is": CHATML.replace("CONTENT", "m.content"),
    "without earlier thoughts": CHATML.replace("CONTENT", FORGETTING),
    "trimmed": CHATML.replace("CONTENT", "m.content | trim"),
    "with the number of turns first": "{{ messages | length }}" + CHATML.replace("CONTENT", "m.content"),
    "without separators": "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}",
    "that renders no sample": "{% if messages[0].role == 'user' %}{{ raise_exception('no') }}{% endif %}"
    + CHATML.replace("CONTENT", "m.content"),
}


class Forgetful(ModelTokenizer):
    """Keeps nothing."""

    def tokenise(self, text: str, *, add_special: bool, salt: str) -> bytes:
        return pack_tokens(self.encode(text, add_special=add_special))


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_every_turn_of_a_conversation_has_the_plan_of_an_unknown_one(tmp_path: Path, template: str) -> None:
    folder = make_tokenizer(tmp_path)
    described = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**described, "chat_template": template}))
    known, forgetful = ModelTokenizer(str(folder)), Forgetful(str(folder))

    def plan(tokenizer: ModelTokenizer, **fields: object) -> Plan:
        intake = Intake()
        intake.parse("chat", json.dumps({"model": "m", **fields}).encode())
        model = Model(name="m", path="", digest="d", block_tokens=16, context_tokens_max=1 << 16)
        return intake.plan(tokenizer, model, model_defaults=True)

    for turns in (2, 4, 6, 4, 2):
        for extra in (dict[str, Any](), {"cache_salt": "s"}, {"add_special_tokens": True}):
            fields = {"messages": TURNS[:turns], **extra}
            assert plan(known, **fields) == plan(forgetful, **fields)


def test_special_tokens_are_added_to_known_texts_too(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = backend.token_to_id("<|im_end|>")
    backend.post_processor = processors.TemplateProcessing(single="<|im_end|> $A", special_tokens=[("<|im_end|>", end)])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer, text = ModelTokenizer(str(folder)), f"<|im_start|>{LONG}<|im_end|>"
    for add_special in (True, False, True):
        tokens = unpack_tokens(tokenizer.tokenise(text, add_special=add_special, salt=""))
        assert tokens == tokenizer.encode(text, add_special=add_special)
        assert (tokens[0] == end) == add_special
