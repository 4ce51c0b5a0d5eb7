"""Bound on the characters of one token: a text with more than fit into the context need not be tokenised."""

from __future__ import annotations

import json
from typing import Any, Final, cast

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

NFC_CHARS_MAX: Final = 4
"""Most characters that NFC composes into one."""
_KEEPING_PRE_TOKENIZERS: Final = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})


def chars_per_token_max(tokenizer: Tokenizer) -> int | None:
    """Return the bound; None if the tokenizer drops text, or makes one token of unknown text of any length."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = cast("dict[int, Any]", tokenizer.get_added_tokens_decoder()).values()
    contraction = _contraction(state_of(tokenizer.normalizer))
    pre_tokenizers = parts_of(state_of(tokenizer.pre_tokenizer), "pretokenizers")
    keeps_all = all(
        part["type"] in _KEEPING_PRE_TOKENIZERS and part.get("behavior") != "Removed" for part in pre_tokenizers
    )
    # Such tokens swallow whitespace of any length.
    strips = any(token.lstrip or token.rstrip for token in added)
    if contraction is None or strips or not keeps_all or not _covers_all(tokenizer.model, vocabulary, pre_tokenizers):
        return None
    return contraction * max(map(len, vocabulary))


def _covers_all(model: object, vocabulary: dict[str, int], pre_tokenizers: list[dict[str, Any]]) -> bool:
    """Return whether there is a token for every byte, so that no text is unknown."""
    if not isinstance(model, BPE):
        return False
    if any(part["type"] == "ByteLevel" for part in pre_tokenizers):
        return all(character in vocabulary for character in ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _contraction(normalizer: dict[str, Any] | None) -> int | None:
    """Return the most characters that a normalizer makes into one; None if there is no bound."""
    factor = 1
    for part in parts_of(normalizer, "normalizers"):
        pattern = part.get("pattern", {}).get("String", "")
        if part["type"] == "NFC":
            factor *= NFC_CHARS_MAX
        elif part["type"] != "Prepend" and not (part["type"] == "Replace" and 0 < len(pattern) <= len(part["content"])):
            return None
    return factor


def parts_of(component: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return the parts of a component, those of sequences in it included."""
    if component is None:
        return []
    if component["type"] == "Sequence":
        return [part for inner in component[name] for part in parts_of(inner, name)]
    return [component]


def state_of(component: Any) -> dict[str, Any] | None:
    """Return a component of a tokenizer as in its tokenizer.json."""
    return None if component is None else json.loads(component.__getstate__())
