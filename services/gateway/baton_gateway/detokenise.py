"""Incremental detokenisation: token ids to text as they arrive, never splitting a character.

A character may span several tokens, so text is held back until its last byte has come. Where the tokenizer
maps each token to bytes (byte-level BPE: GPT-2, Llama 3, Qwen), an incremental UTF-8 decoder is exact and takes
constant time per token. For any other tokenizer, its decoder decodes a short window of tokens without and with the
new one, and the difference is the new text. The window begins with the end of the prompt: decoders such as
SentencePiece's strip the space before the first word of a text, and an output does not begin a text.
"""

from __future__ import annotations

import json
from array import array
from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, Protocol, cast

import msgspec
from tokenizers import Tokenizer

REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
HELD_TOKENS_MAX: Final = 8
"""Bound on tokens held back: a character has at most four bytes, so more tokens are no character and are shown."""
CONTEXT_TOKENS: Final = 8
"""Prompt tokens at the beginning of a window."""
PROMPT_TOKENS: Final = 64
"""Tokens at the end of a prompt from which the context is taken; special tokens are skipped."""
SILENT_TOKENS_MAX: Final = 64
"""Tokens without text that a window keeps, so that the next token is not decoded as the beginning of a text."""


class Detokeniser(Protocol):
    def feed(self, token: int) -> str:
        """Return the text that this token completes; may be empty."""
        ...

    def feed_json(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the texts that the tokens complete, as JSON strings, without empty ones."""
        ...

    def flush(self) -> str:
        """Return the rest at the end of the output: a replacement for an unfinished character."""
        ...


@cache
def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's mapping of 256 printable characters to bytes, inverted (source: openai/gpt-2 encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    mapping = {chr(byte): byte for byte in printable}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in set(printable)):
        mapping[chr(256 + offset)] = byte
    return mapping


class Spellings(msgspec.Struct, frozen=True, kw_only=True):
    """A tokenizer's mapping from ids to text as plain data: quick to load, where the tokenizer itself takes seconds."""

    pieces: bytes
    """All pieces in UTF-8, one after the other, by token id."""
    ends: bytes
    """End offset of each piece: uint32 in the machine's byte order. An unused id has an empty piece."""
    special: frozenset[int]
    decoder: str
    """The tokenizer's decoder, as JSON."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Spellings:
        ids = tokenizer.get_vocab(with_added_tokens=True)
        pieces = [b""] * (max(ids.values(), default=-1) + 1)
        for piece, token in ids.items():
            pieces[token] = piece.encode()
        ends = array("I", [0]) * len(pieces)
        end = 0
        for token, piece in enumerate(pieces):
            end += len(piece)
            ends[token] = end
        added = cast("dict[int, Any]", tokenizer.get_added_tokens_decoder())
        decoder: Any = tokenizer.decoder
        return cls(
            pieces=b"".join(pieces),
            ends=ends.tobytes(),
            special=frozenset(token for token, entry in added.items() if entry.special),
            decoder="null" if decoder is None else decoder.__getstate__().decode(),
        )


class Vocabulary:
    """Text and bytes of single tokens, and detokenisers over them. One per tokenizer, shared by all requests."""

    def __init__(self, spellings: Spellings) -> None:
        self._pieces = spellings.pieces
        self._ends = array("I", spellings.ends)
        self._special = spellings.special
        self._decoder = _decoder(spellings.decoder)
        decoder: dict[str, object] | None = json.loads(spellings.decoder)
        self._is_byte_level = decoder is not None and decoder.get("type") == "ByteLevel"
        self._bytes = BytesByToken(self._look_up)
        self._json = JsonByToken(self._bytes)

    def detokeniser(
        self, *, skip_special: bool = True, prompt: Sequence[int] = (), marks: frozenset[int] = frozenset()
    ) -> Detokeniser:
        """Return a detokeniser for the output after `prompt`, of which the last `PROMPT_TOKENS` are enough.

        `marks`: special tokens that are never skipped.
        """
        shown = marks if skip_special else self._special
        special = self._special - shown if shown else self._special
        if self._is_byte_level:
            return ByteDetokeniser(self._bytes, self._json, special)
        return WindowDetokeniser(self._decode, special, self._context(prompt, special))

    def special(self) -> dict[int, str]:
        """Return the spellings of the special tokens."""
        return {token: self._piece(token) for token in self._special}

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that this token adds; empty for an id the tokenizer does not know."""
        return self._bytes[token]

    def _piece(self, token: int) -> str:
        if token >= len(self._ends):
            return ""
        return self._pieces[self._ends[token - 1] if token else 0 : self._ends[token]].decode()

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._decoder([piece for token in tokens if (piece := self._piece(token))])

    def _context(self, prompt: Sequence[int], special: frozenset[int]) -> list[int]:
        """Return the end of the prompt, from the beginning of a character."""
        shown = [token for token in prompt[-PROMPT_TOKENS:] if token not in special][-CONTEXT_TOKENS:]
        first = next((at for at, token in enumerate(shown) if not _continues(self.token_bytes(token))), len(shown))
        return shown[first:]

    def _look_up(self, token: int) -> bytes:
        piece = self._piece(token)
        if self._is_byte_level:
            byte_of = _byte_of_character()
            if all(character in byte_of for character in piece):
                return bytes(byte_of[character] for character in piece)
            return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        # Decoders strip the space before a first word; after another token they keep it.
        alone, twice = self._decode([token]), self._decode([token, token])
        return (twice[len(alone) :] if twice.startswith(alone) else alone).encode()


class BytesByToken(dict[int, bytes]):
    """Bytes of the tokens looked up so far. Reading it calls no Python for a token that is known."""

    def __init__(self, look_up: Callable[[int], bytes]) -> None:
        super().__init__()
        self._look_up = look_up

    def __missing__(self, token: int) -> bytes:
        spelled = self._look_up(token)
        if spelled:  # Ids that the tokenizer does not know have no bound.
            self[token] = spelled
        return spelled


class JsonByToken(dict[int, bytes]):
    """JSON strings of the tokens looked up so far; empty for those whose bytes end inside a character."""

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token: int) -> bytes:
        spelled = self._token_bytes[token]
        text, decoded_bytes = utf_8_decode(spelled, "replace")
        shown = msgspec.json.encode(text) if text and decoded_bytes == len(spelled) else b""
        if spelled:  # As in `BytesByToken`.
            self[token] = shown
        return shown


_EMPTY: Final[dict[str, object]] = {"type": "BPE", "vocab": {}, "merges": []}


def _decoder(description: str) -> Callable[[list[str]], str]:
    """Return the function that `Tokenizer.decode` calls with the pieces."""
    empty: dict[str, object] = {"version": "1.0", "added_tokens": [], "model": _EMPTY}
    decoder: Any = Tokenizer.from_str(json.dumps({**empty, "decoder": json.loads(description)})).decoder
    return " ".join if decoder is None else cast("Callable[[list[str]], str]", decoder.decode)


def _continues(spelled: bytes) -> bool:
    """Return whether these bytes begin inside a UTF-8 character."""
    return bool(spelled) and 0x80 <= spelled[0] < 0xC0


class ByteDetokeniser:
    """Decodes UTF-8, and holds the bytes of a character that is not complete."""

    def __init__(self, token_bytes: Mapping[int, bytes], json: Mapping[int, bytes], special: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._json = json
        self._special = special
        self._held = b""

    def feed(self, token: int) -> str:
        if token in self._special:
            return ""
        spelled = self._held + self._token_bytes[token]
        text, decoded_bytes = utf_8_decode(spelled, "replace")
        self._held = spelled[decoded_bytes:]
        return text

    def feed_json(self, tokens: Sequence[int]) -> list[bytes]:
        texts: list[bytes] = []
        for token in tokens:
            if not self._held and token not in self._special and (known := self._json[token]):
                texts.append(known)
            elif text := self.feed(token):
                texts.append(msgspec.json.encode(text))
        return texts

    def flush(self) -> str:
        held, self._held = self._held, b""
        return held.decode(errors="replace")


class WindowDetokeniser:
    """Decodes `[shown | pending]` and shows what `pending` adds.

    ┌──────── window ────────┐
    │ shown      │ pending   │   text(shown + pending) - text(shown) is new, unless it ends inside a
    └────────────┴───────────┘   character; then the next token joins `pending`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], special: frozenset[int], context: Sequence[int]) -> None:
        """Start a window. `context`: tokens whose text is already shown."""
        self._decode = decode
        self._special = special
        self._window = list(context)
        self._shown = len(self._window)
        self._shown_text = decode(self._window)

    def feed(self, token: int) -> str:
        if token in self._special:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        pending = len(self._window) - self._shown
        if text.endswith(REPLACEMENT) and pending <= HELD_TOKENS_MAX:
            return ""
        return self._show(text)

    def feed_json(self, tokens: Sequence[int]) -> list[bytes]:
        return [msgspec.json.encode(text) for text in map(self.feed, tokens) if text]

    def flush(self) -> str:
        return self._show(self._decode(self._window)) if len(self._window) > self._shown else ""

    def _show(self, text: str) -> str:
        news = text[len(self._shown_text) :]
        # Pending tokens become the context of the next ones; older tokens matter only while the pending have no text.
        recent = self._window[self._shown :]
        recent_text = self._decode(recent)
        if recent_text or len(self._window) > SILENT_TOKENS_MAX:
            self._window, text = recent, recent_text
        self._shown, self._shown_text = len(self._window), text
        return news
