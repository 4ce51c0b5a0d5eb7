"""Book of the KV blocks that attempts hold on one worker, with the prefixes that they share counted once. Pure.

An attempt shares a leading part of its prompt with others, and holds the rest alone:

    attempt 1   [A B C D|. . .]     in the book: A B C D once, and 3 + 2 blocks of one attempt each
    attempt 2   [A B C D|. .]

Only a prefix whose KV exists is shared, since two prompts under computation fill blocks of their own; and once the
engine says how much of a prompt it had, no more counts as shared than that.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from baton.blocks import BLOCK_TOKENS_MAX, hash_blocks, root_key, split_ids
from baton.messages.base import pack_tokens

_MEMORY: Final = 1 - 1 / 64
"""Weight of earlier prompts against the newest one in `shared_share`."""


@dataclass(slots=True, eq=False)
class Holding:
    """Blocks of one attempt, prompt and output."""

    blocks: int
    ids: Sequence[Hashable] = ()
    """Names of the leading parts of its prompt, each with all before it."""
    shared: int = 0
    """Number of these that are in the book by name."""


class KvBook:
    """The book; each id stands for `blocks_per_id` blocks."""

    def __init__(self, blocks_per_id: int = 1) -> None:
        self._blocks_per_id = blocks_per_id
        self._holders: dict[Hashable, int] = {}
        """Id → number of attempts that hold it."""
        self._private = 0
        self._cached = self._cached_and_shared = 0.0
        """Ids of recent prompts that the engine had, and those of them that running attempts held."""

    @property
    def used(self) -> int:
        return len(self._holders) * self._blocks_per_id + self._private

    @property
    def shared_share(self) -> float:
        """Share of what recent prompts found in the cache that running attempts held, so that it took no room."""
        return self._cached_and_shared / self._cached if self._cached else 0.0

    def lacking(self, holding: Holding) -> int:
        """Return how many more blocks are used once an attempt takes what it needs."""
        return holding.blocks - self._held(holding) * self._blocks_per_id

    def take(self, holding: Holding) -> None:
        holding.shared = self._held(holding)
        for each in holding.ids[: holding.shared]:
            self._holders[each] += 1
        self._private += holding.blocks - holding.shared * self._blocks_per_id

    def settle(self, holding: Holding, cached: int) -> None:
        """Let others share a prompt whose KV exists now, and of which the engine had the first `cached` ids before."""
        self._give_up(holding, min(cached, holding.shared))
        self._cached = self._cached * _MEMORY + cached
        self._cached_and_shared = self._cached_and_shared * _MEMORY + holding.shared
        for each in holding.ids[holding.shared :]:
            if each in self._holders:
                # It was computed twice, and has two copies.
                break
            self._holders[each] = 1
            holding.shared += 1
            self._private -= self._blocks_per_id

    def release(self, holding: Holding) -> None:
        self._give_up(holding, 0)
        self._private -= holding.blocks

    def _give_up(self, holding: Holding, first: int) -> None:
        """Hold the shared ids from the first of these on alone."""
        for each in holding.ids[first : holding.shared]:
            if self._holders[each] == 1:
                del self._holders[each]
            else:
                self._holders[each] -= 1
        self._private += (holding.shared - first) * self._blocks_per_id
        holding.shared = first

    def _held(self, holding: Holding) -> int:
        """Return how many of the leading ids are in the book."""
        return len(list(takewhile(self._holders.__contains__, holding.ids)))


SHARED_TOKENS: Final = BLOCK_TOKENS_MAX
"""Tokens of one id: coarse, since the longest prompts have a thousand such parts, and many may be held."""


def prefix_ids(model_digest: str, salt: str, tokens: Sequence[int], block_tokens: int) -> Sequence[Hashable]:
    """Return the ids of a prompt that attempts may share; none where the engine's blocks do not divide them."""
    if SHARED_TOKENS % block_tokens:
        return ()
    # The last token is always computed, so the block that it fills is not shared.
    return split_ids(hash_blocks(root_key(model_digest, salt=salt), pack_tokens(tokens[:-1]), SHARED_TOKENS))
