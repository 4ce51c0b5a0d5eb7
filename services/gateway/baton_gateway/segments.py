"""Tokens kept by segment of text: the next prompt of a conversation costs the tokenising of its new part.

A text is cut before separators, added tokens such as `<|im_start|>`. A tokenizer takes these out of a text before it
looks at what is between them, so the tokens of a text are those of its segments, one after another:

    <|im_start|>system⏎Be brief. …  |  <|im_end|>⏎<|im_start|>user⏎How … ?  |  <|im_end|>⏎<|im_start|>assistant⏎
    segment, kept                   |  segment, kept                       |  rest, not kept: the next turn changes it
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from sys import getsizeof
from typing import Any, Final, cast

from tokenizers import Tokenizer

from baton.messages.base import pack_tokens
from baton_gateway.text_bound import parts_of, state_of

SEGMENT_CHARS_MIN: Final = 1024
"""Shortest segment: a shorter one costs more to cut out and keep than it saves."""
KEPT_BYTES_MAX: Final = 32 << 20
ENTRY_BYTES: Final = 256
"""Size of an entry beside its text and tokens, rounded up."""


class Segments:
    """Tokeniser of texts that keeps the tokens of their segments; the least recently used make room for new ones."""

    def __init__(
        self,
        separators: Sequence[str],
        encode: Callable[[str], Sequence[int]],
        *,
        chars_min: int = SEGMENT_CHARS_MIN,
        bytes_max: int = KEPT_BYTES_MAX,
    ) -> None:
        self._next_separator = re.compile("|".join(map(re.escape, separators)) or "(?!)").search
        self._encode = encode
        self._chars_min = chars_min
        self._bytes_max = bytes_max
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self.bytes = 0

    def tokenise(self, text: str, salt: str) -> bytes:
        """Return the packed tokens of `text`. Requests with different salts share nothing, so that the time for a text
        tells nobody with another salt whether it was seen before."""
        tokens: list[bytes] = []
        start = 0
        # A cut depends on the text before it only, so a longer text has the cuts of its beginning.
        while found := self._next_separator(text, start + self._chars_min):
            tokens.append(self._of_segment((salt, text[start : found.start()])))
            start = found.start()
        tokens.append(pack_tokens(self._encode(text[start:])))
        return b"".join(tokens)

    def _of_segment(self, key: tuple[str, str]) -> bytes:
        tokens = self._kept.get(key)
        if tokens is not None:
            self._kept.move_to_end(key)
            return tokens
        tokens = self._kept[key] = pack_tokens(self._encode(key[1]))
        self.bytes += _size(key, tokens)
        while self.bytes > self._bytes_max:
            self.bytes -= _size(*self._kept.popitem(last=False))
        return tokens


def _size(key: tuple[str, str], tokens: bytes) -> int:
    return sum(map(getsizeof, key)) + len(tokens) + ENTRY_BYTES


def separators_of(tokenizer: Tokenizer, sample: str) -> list[str]:
    """Return the added tokens in `sample` that cut every text that they are in.

    The tokenizer looks for added tokens from left to right and takes the longest: at first for those that are not
    normalised, in the text as it is; then for the others, in the normalised pieces between them. So a token is found
    wherever it is if no other can overlap it, and if it is not looked for in a text that is changed before. Of its
    neighbourhood, it must not take whitespace before it, nor have any to give to the token before it; tokens that are
    only found beside certain characters (`single_word`) are a reason not to cut at all.
    """
    added = cast("list[Any]", list(tokenizer.get_added_tokens_decoder().values()))
    if tokenizer.encode_special_tokens or any(token.single_word for token in added):
        return []
    changes_text = bool(parts_of(state_of(tokenizer.normalizer), "normalizers"))
    spellings = [str(token.content) for token in added]
    return [
        spelling
        for spelling, token in zip(spellings, added, strict=True)
        if spelling
        and spelling in sample
        and not (token.lstrip or spelling[0].isspace() or (changes_text and token.normalized))
        and not _can_be_overlapped(spelling, spellings)
    ]


def _can_be_overlapped(spelling: str, spellings: list[str]) -> bool:
    """Return whether a text can have `spelling` at a place where it has a part of another, or of itself, too."""
    beginnings = tuple(spelling[:length] for length in range(1, len(spelling)))
    endings = tuple(spelling[start:] for start in range(1, len(spelling)))
    return spelling.endswith(beginnings) or any(
        other.endswith(beginnings) or other.startswith(endings) or spelling in other or other in spelling
        for other in spellings
        if other and other != spelling
    )
