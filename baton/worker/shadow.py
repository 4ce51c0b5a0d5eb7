"""The shadow map: which canonical blocks the engine's prefix cache holds, according to its block events.

Engines name their blocks by opaque hashes, and their block size may be a multiple or a divisor of the
canonical one. A **cover** ties the two together: the canonical blocks that a set of engine blocks
stands for, held while all of its members are.

    engine block 64, canonical 32                engine block 16, canonical 32
    e1 ├────────────────┤                        e1 ├───┤  e2    ├───┤   e2' ├───┤
    covers: {e1} → c1, c2                        covers: {e1, e2} → c1    {e1, e2'} → c1'

Engines store and remove the same hash several times, one for each copy, so members are counted; two
covers may stand for the same canonical block, so these are counted as well. An engine block keeps its
**tail**, the state of the chain of ids after it, as long as a child may come.

The contents of the KV pool are kept beside those of the device. The pool's hashes are its keys, the canonical ids at
the ends of its blocks, so a block of the pool needs no engine block before it: it may follow one of any tier. Events of
the pool's file name each canonical block by its id, and no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from baton.blocks import ID_BYTES, hash_blocks, root_key, split_ids
from baton.engines.engine import EngineBlocksCleared, EngineBlocksRemoved, EngineBlocksStored, EngineEventBatch
from baton.errors import ConfigurationError
from baton.messages.base import TOKEN_BYTES, pack_tokens
from baton.messages.index import BlockEvent, BlocksCleared, BlocksRemoved, BlocksStored, Tier
from baton.messages.workers import Fingerprint


@dataclass(frozen=True, slots=True)
class _Tail:
    """State of the chain of ids after an engine block."""

    root: bytes
    parent: bytes
    """Id of the last canonical block that is full; empty at the root."""
    rest: bytes = b""
    """Packed tokens after that block, fewer than a canonical block."""
    members: tuple[bytes, ...] = ()
    """Hashes of the engine blocks that contain `rest`."""


@dataclass(slots=True, eq=False)
class _Cover:
    parent: bytes
    ids: tuple[bytes, ...]
    members: tuple[bytes, ...]
    missing: int = 0


@dataclass(slots=True, eq=False)
class _EngineBlock:
    tail: _Tail
    copies: int = 0
    covers: list[_Cover] = field(default_factory=list[_Cover])


@dataclass(slots=True)
class _Held:
    parent: bytes
    covers: int = 0


class ShadowMap:
    """Canonical blocks held by one engine. Pure. Not safe for two threads at once."""

    def __init__(self, *, model_digest: str, engine_block_tokens: int, block_tokens: int) -> None:
        longer, shorter = max(engine_block_tokens, block_tokens), min(engine_block_tokens, block_tokens)
        if shorter < 1 or longer % shorter:
            raise ConfigurationError(
                f"the engine's block of {engine_block_tokens} tokens must be a multiple or a divisor of the"
                f" canonical block of {block_tokens} tokens"
            )
        self.block_tokens = block_tokens
        self.engine_block_tokens = engine_block_tokens
        self.ignored_blocks = 0
        """Engine blocks without canonical ids: their parent is unknown or their size differs."""
        self.batches = 0
        self._model_digest = model_digest
        self._contents = {tier: _Contents(tier, engine_block_tokens, block_tokens) for tier in Tier}
        self._device = self._contents[Tier.DEVICE]
        self._sequence = 0

    def __len__(self) -> int:
        """Return the number of blocks on the device."""
        return len(self._device.held)

    @property
    def engine_blocks(self) -> int:
        """Number of engine blocks that the device holds, or that share a cover with a held one."""
        return len(self._device.blocks)

    def fingerprint(self, tier: Tier = Tier.DEVICE) -> Fingerprint:
        """Return the fingerprint of all blocks held on a tier."""
        return self._contents[tier].fingerprint()

    def __contains__(self, block: bytes) -> bool:
        """Return whether the device holds a block."""
        return block in self._device.held

    def apply(self, batch: EngineEventBatch) -> list[BlockEvent]:
        """Apply a batch of engine events; return the changes in order. A lost batch clears the map first."""
        out: list[BlockEvent] = []
        if batch.sequence != self._sequence + 1:
            self._clear(out)
        self._sequence = batch.sequence
        self.batches += 1
        for event in batch.events:
            match event:
                case EngineBlocksStored():
                    self._store(event, out)
                case EngineBlocksRemoved():
                    self._contents[event.tier].remove(event.hashes, out)
                case EngineBlocksCleared(tier=tier):
                    self._clear(out, tier)
        return out

    def _clear(self, out: list[BlockEvent], tier: Tier | None = None) -> None:
        """Clear a tier, or all; where only that one holds anything, all are cleared, as before there were tiers."""
        filled = [each for each, contents in self._contents.items() if contents.held or contents.blocks]
        if tier is None or filled == [tier]:
            cleared, out_tier = filled, None
        else:
            cleared, out_tier = [each for each in filled if each is tier], tier
        if cleared:
            out.append(BlocksCleared(tier=out_tier))
        for each in cleared:
            self._contents[each].clear()

    def _store(self, event: EngineBlocksStored, out: list[BlockEvent]) -> None:
        if event.tier is Tier.FILE:
            self._store_named(event, out)
            return
        tail = self._tail_of(event)
        sizes_agree = len(event.tokens) == len(event.hashes) * event.block_tokens
        if tail is None or event.block_tokens != self.engine_block_tokens or not sizes_agree:
            self.ignored_blocks += len(event.hashes)
            return
        self._contents[event.tier].store(event, tail, out)

    def _store_named(self, event: EngineBlocksStored, out: list[BlockEvent]) -> None:
        parent = event.parent or b""
        known = not parent or any(parent in contents.held for contents in self._contents.values())
        if not known or event.block_tokens != self.block_tokens:
            self.ignored_blocks += len(event.hashes)
            return
        self._contents[event.tier].store_named(parent, event.hashes, out)

    def _tail_of(self, event: EngineBlocksStored) -> _Tail | None:
        if event.parent is None:
            return _Tail(root_key(self._model_digest, salt=event.cache_salt), b"")
        if event.tier is Tier.DEVICE:
            parent = self._device.blocks.get(event.parent)
            return parent.tail if parent else None
        # A match ends at a gap, so what follows one is of no use.
        if not any(event.parent in contents.held for contents in self._contents.values()):
            return None
        return _Tail(root_key(self._model_digest, salt=event.cache_salt), event.parent)

    def runs(self, run_blocks_max: int) -> Iterator[BlocksStored]:
        """Yield the blocks of all tiers as runs of at most `run_blocks_max`, on each tier parents before their
        children."""
        for contents in self._contents.values():
            yield from contents.runs(run_blocks_max)


class _Contents:
    """Contents of one tier."""

    def __init__(self, tier: Tier, engine_block_tokens: int, block_tokens: int) -> None:
        self.blocks: dict[bytes, _EngineBlock] = {}
        self.held: dict[bytes, _Held] = {}
        self._tier = tier
        self._engine_block_tokens = engine_block_tokens
        self._block_tokens = block_tokens
        self._ids_sum = 0

    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of(self._ids_sum, len(self.held))

    def clear(self) -> None:
        self.blocks.clear()
        self.held.clear()
        self._ids_sum = 0

    # ------------------------------------------------------------ stored

    def store(self, event: EngineBlocksStored, tail: _Tail, out: list[BlockEvent]) -> None:
        """Add a run of engine blocks, which follows `tail`."""
        # One call hashes the whole run; each engine block then takes its share of the ids.
        packed = tail.rest + pack_tokens(event.tokens)
        ids = split_ids(hash_blocks(tail.root, packed, self._block_tokens, tail.parent))
        stored = _Runs(self._tier)
        canonical_bytes = self._block_tokens * TOKEN_BYTES
        start_bytes = len(tail.rest)
        done = 0
        for number, engine_hash in enumerate(event.hashes, start=1):
            end_bytes = start_bytes + number * self._engine_block_tokens * TOKEN_BYTES
            own = tuple(ids[done : end_bytes // canonical_bytes])
            done += len(own)
            members = (*tail.members, engine_hash)
            before, parent = tail, tail.parent
            if own:
                tail = _Tail(tail.root, own[-1])
            else:
                tail = _Tail(tail.root, parent, packed[done * canonical_bytes : end_bytes], members)
            block = self.blocks.get(engine_hash)
            if block is None:
                block = self.blocks[engine_hash] = _EngineBlock(tail)
                if own:
                    self._cover(_Cover(parent, own, members), before)
            block.copies += 1
            if block.copies == 1:
                self._member_came(block, stored)
        out.extend(stored.events())

    def store_named(self, parent: bytes, ids: Iterable[bytes], out: list[BlockEvent]) -> None:
        """Add a run of blocks that are named by their canonical ids."""
        stored = _Runs(self._tier)
        for canonical in ids:
            block = self.blocks.get(canonical)
            if block is None:
                block = self.blocks[canonical] = _EngineBlock(_Tail(b"", canonical))
                cover = _Cover(parent, (canonical,), (canonical,), missing=1)
                block.covers.append(cover)
            block.copies += 1
            if block.copies == 1:
                self._member_came(block, stored)
            parent = canonical
        out.extend(stored.events())

    def _cover(self, cover: _Cover, before: _Tail) -> None:
        """Tie a new cover to its members; `before` is the tail that its last member follows.

        That member comes next, so it counts as missing. Earlier members may have been removed and
        forgotten; they are entered again, as missing.
        """
        for number, member in enumerate(cover.members, start=1):
            block = self.blocks.get(member)
            if block is None:
                rest = before.rest[: number * self._engine_block_tokens * TOKEN_BYTES]
                block = _EngineBlock(_Tail(before.root, before.parent, rest, cover.members[:number]))
                self.blocks[member] = block
            block.covers.append(cover)
            cover.missing += 1 if block.copies == 0 else 0

    def _member_came(self, block: _EngineBlock, stored: _Runs) -> None:
        for cover in block.covers:
            cover.missing -= 1
            if cover.missing:
                continue
            parent = cover.parent
            for canonical in cover.ids:
                held = self.held.get(canonical)
                if held is None:
                    held = self.held[canonical] = _Held(parent)
                    self._ids_sum += int.from_bytes(canonical, "little")
                    stored.add(parent, canonical)
                held.covers += 1
                parent = canonical

    # ------------------------------------------------------------ removed

    def remove(self, hashes: Iterable[bytes], out: list[BlockEvent]) -> None:
        gone: list[bytes] = []
        for engine_hash in hashes:
            block = self.blocks.get(engine_hash)
            # Engines also remove blocks that were ignored when stored: nothing to do.
            if block is None or block.copies == 0:
                continue
            block.copies -= 1
            if block.copies == 0:
                self._member_went(block, gone)
                self._prune(engine_hash, block)
        if gone:
            out.append(BlocksRemoved(blocks=b"".join(gone), tier=self._tier))

    def _member_went(self, block: _EngineBlock, gone: list[bytes]) -> None:
        for cover in block.covers:
            cover.missing += 1
            if cover.missing > 1:
                continue
            for canonical in cover.ids:
                held = self.held[canonical]
                held.covers -= 1
                if held.covers == 0:
                    del self.held[canonical]
                    self._ids_sum -= int.from_bytes(canonical, "little")
                    gone.append(canonical)

    def _prune(self, engine_hash: bytes, block: _EngineBlock) -> None:
        """Forget covers without a remaining member, and engine blocks that no cover names any more.

        A removed block stays known while a cover with a remaining member names it, since the engine
        may store it again without its neighbours.
        """
        dead = [cover for cover in block.covers if cover.missing == len(cover.members)]
        for cover in dead:
            for member in cover.members:
                other = self.blocks[member]
                other.covers.remove(cover)
                if other is not block and other.copies == 0 and not other.covers:
                    del self.blocks[member]
        if not block.covers:
            del self.blocks[engine_hash]

    # ------------------------------------------------------------ reading

    def runs(self, run_blocks_max: int) -> Iterator[BlocksStored]:
        """Yield all blocks as runs of at most `run_blocks_max`, parents before their children."""
        children: dict[bytes, list[bytes]] = {}
        for canonical, held in self.held.items():
            children.setdefault(held.parent, []).append(canonical)
        # A block whose parent was evicted starts a run, like a block at the root.
        starts = [canonical for canonical, held in self.held.items() if held.parent not in self.held]
        while starts:
            run = [starts.pop()]
            while len(run) < run_blocks_max and (following := children.get(run[-1])):
                run.append(following[0])
                starts.extend(following[1:])
            if len(run) == run_blocks_max:
                starts.extend(children.get(run[-1], ()))
            yield BlocksStored(parent=self.held[run[0]].parent, blocks=b"".join(run), tier=self._tier)


class _Runs:
    """Newly held blocks, grouped into runs in which each block is the child of the one before."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._links: list[tuple[bytes, bytes]] = []

    def add(self, parent: bytes, block: bytes) -> None:
        self._links.append((parent, block))

    def events(self) -> list[BlockEvent]:
        if not self._links:
            return []
        starts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(self._links)) if b[0] != a[1]), len(self._links)]
        return [
            BlocksStored(
                parent=self._links[start][0],
                blocks=b"".join(block for _, block in self._links[start:end]),
                tier=self._tier,
            )
            for start, end in pairwise(starts)
        ]


def count_ids(event: BlockEvent) -> int:
    """Return how many block ids an event names."""
    return 0 if isinstance(event, BlocksCleared) else len(event.blocks) // ID_BYTES
