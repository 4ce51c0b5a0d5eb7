"""From token ids to text, as they arrive, never cutting a character in two.

A character may span several tokens, so text is held until its last byte came. Where the tokenizer
maps each token to bytes (byte-level BPE: GPT-2, Llama 3, Qwen), an incremental UTF-8 decoder does it
exactly and in constant time per token. Any other tokenizer is asked for the text of a short window of
tokens, before and after the new one, and the difference is the news.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, Protocol

from tokenizers import Tokenizer

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
HELD_TOKENS_MAX: Final = 8
"""A character has at most four bytes: longer than this, the bytes are no character and are shown as they are."""


class Detokeniser(Protocol):
    def feed(self, token: int) -> str:
        """Return the text that became certain with this token; may be empty."""
        ...

    def flush(self) -> str:
        """Return what is left at the end of the output: a replacement for an unfinished character."""
        ...


@cache
def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's mapping of 256 printable characters to bytes, inverted (source: openai/gpt-2 encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    mapping = {chr(byte): byte for byte in printable}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in set(printable)):
        mapping[chr(256 + offset)] = byte
    return mapping


class Vocabulary:
    """Text and bytes of single tokens, and detokenisers over them. One per tokenizer, shared by all requests."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        description: dict[str, Any] = json.loads(tokenizer.to_str())
        self._special = frozenset(
            entry["id"] for entry in description.get("added_tokens") or () if entry.get("special")
        )
        decoder: dict[str, Any] | None = description.get("decoder")
        self._is_byte_level = decoder is not None and decoder.get("type") == "ByteLevel"
        self._bytes: dict[int, bytes] = {}

    def detokeniser(self, *, skip_special: bool = True) -> Detokeniser:
        special = self._special if skip_special else frozenset[int]()
        if self._is_byte_level:
            return ByteDetokeniser(self.token_bytes, special)
        return WindowDetokeniser(lambda tokens: self._tokenizer.decode(tokens, skip_special_tokens=False), special)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that this token adds; empty for an id the tokenizer does not know."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._look_up(token)
        return known

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def _look_up(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._is_byte_level:
            byte_of = _byte_of_character()
            if all(character in byte_of for character in piece):
                return bytes(byte_of[character] for character in piece)
            return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        # Decoders strip the space before a first word: behind another token it is kept.
        alone = self._tokenizer.decode([token], skip_special_tokens=False)
        twice = self._tokenizer.decode([token, token], skip_special_tokens=False)
        return (twice[len(alone) :] if twice.startswith(alone) else alone).encode()


class ByteDetokeniser:
    def __init__(self, token_bytes: Callable[[int], bytes], special: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        if token in self._special:
            return ""
        return self._decoder.decode(self._token_bytes(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokeniser:
    """Decodes `[shown | pending]` and shows what `pending` adds.

    ┌──────── window ────────┐
    │ shown      │ pending   │   text(shown + pending) - text(shown) is new, unless it ends inside a
    └────────────┴───────────┘   character; then the next token joins `pending`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], special: frozenset[int]) -> None:
        self._decode = decode
        self._special = special
        self._window: list[int] = []
        self._shown = 0
        self._shown_text = ""

    def feed(self, token: int) -> str:
        if token in self._special:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        pending = len(self._window) - self._shown
        if text.endswith(REPLACEMENT) and pending <= HELD_TOKENS_MAX:
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._decode(self._window)) if len(self._window) > self._shown else ""

    def _show(self, text: str) -> str:
        news = text[len(self._shown_text) :]
        # What was pending becomes the context of what comes; older tokens no longer matter.
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        self._shown_text = self._decode(self._window)
        return news
