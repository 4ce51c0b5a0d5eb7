"""Source side of a `StagedAgent`: leases of the cache's blocks, which peers read in slots.

A lease has a reader for each rank of the peer that reads these blocks. They are copied once, for all readers; the agent
below has a lease of the slots for each. Calls come for each reader: the first one to say something new is followed.

Where peers may also read the cache itself, a lease takes slots only once a peer has asked for them (`on_ask`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from baton.pool.staged_flows import Flow, Staging
from baton.transfer import Cause, EventKind, TransferAgent, TransferEvent
from baton.transfer.device import Copy

ALL_LAYERS: Final = -1


@dataclass(slots=True)
class Reader:
    generation: int
    """Generation of its lease of the slots."""
    blocks: int = 0
    """Blocks that its lease was extended by."""
    leased: int = 0
    """Slots that its peer was told of."""


@dataclass(slots=True, eq=False, kw_only=True)
class StagedLease(Flow):
    ready: list[int]
    """Tokens in the cache, by layer."""
    copied: list[int]
    """Tokens whose copies were started, by layer."""
    posted: list[int]
    """Tokens in the slots, by layer."""
    readers: dict[bytes, Reader] = field(default_factory=dict[bytes, Reader])
    asked: int = 0
    """Slots asked for."""
    on_ask: bool = False
    """Whether it asks for slots only once a peer has asked for it."""
    tokens: int = 0
    """Length of the whole lease; 0: not known yet."""
    is_staged: bool = False
    """Whether the copies of all of it were started."""

    def copied_blocks(self, block_tokens: int) -> dict[int, int]:
        """Return the cells of blocks that are full and whose copies were started, in all layers."""
        full = min(self.copied) // block_tokens
        return dict(zip(self.blocks[:full], self.slots, strict=False))


class StagedLeases:
    """See the module's docstring. Not thread-safe: the agent's lock is held in every call."""

    def __init__(
        self,
        agent: TransferAgent,
        staging: Staging,
        stream: Callable[[], int | None],
        ends: Callable[[StagedLease], None],
        *,
        on_ask: bool,
    ) -> None:
        """`ends` is told of a lease that is about to give its slots back, with all that it has copied.

        `on_ask`: nothing is staged before a peer asks for it, see `asked`.
        """
        self._agent = agent
        self._staging = staging
        self._stream = stream
        self._ends = ends
        self._on_ask = on_ask
        self._leases: dict[bytes, StagedLease] = {}
        self._by_reader: dict[bytes, StagedLease] = {}

    def get(self, key: bytes) -> StagedLease | None:
        """Return the lease that is open under a key."""
        return self._leases.get(key)

    def open(self, reader: bytes, generation: int, key: bytes, slots: int) -> None:
        """Add a reader, whose lease of slots has this generation, to the lease `key`, which may be new."""
        lease = self._leases.get(key)
        if lease is not None and reader not in lease.readers:
            self._by_reader[reader] = lease
            lease.readers[reader] = Reader(generation)
            self._lease_slots(lease)
            for layer, tokens in enumerate(lease.posted):
                if tokens:
                    self._agent.post_ready(reader, generation, layer, tokens)
            return
        lease = self._new(key)
        self._leases[key] = self._by_reader[reader] = lease
        lease.readers[reader] = Reader(generation)
        self._ask(lease, slots)

    def _new(self, key: bytes) -> StagedLease:
        none = [0] * self._staging.layers
        lease = StagedLease(
            key,
            [],
            granted=lambda: self._granted(lease),
            failed=lambda: self._failed(lease),
            ready=none,
            copied=list(none),
            posted=list(none),
            on_ask=self._on_ask,
        )
        return lease

    def asked(self, reader: bytes) -> None:
        """Note that a peer asks for the lease's slots."""
        lease = self._by_reader.get(reader)
        if lease is not None and lease.on_ask:
            lease.on_ask = False
            if lease.asked:
                try:
                    self._staging.ask(lease, lease.asked)
                except ValueError as error:
                    lease.failure = str(error)
                    self._failed(lease)

    def extend(self, reader: bytes, generation: int, blocks: Sequence[int]) -> None:
        self._staging.check_blocks(blocks)
        if lease := self._current(reader, generation):
            told = lease.readers[reader].blocks
            lease.readers[reader].blocks += len(blocks)
            lease.blocks.extend(blocks[len(lease.blocks) - told :])
            self._ask(lease, len(lease.blocks) - lease.asked)
            self._lease_slots(lease)

    def post_ready(self, reader: bytes, generation: int, layer: int, tokens: int) -> None:
        if lease := self._current(reader, generation):
            if not ALL_LAYERS <= layer < self._staging.layers:
                raise ValueError(f"there is no layer {layer}")
            if not 0 <= tokens <= len(lease.blocks) * self._staging.block_tokens:
                raise ValueError(f"{tokens} tokens cannot be ready in {len(lease.blocks)} blocks")
            for each in range(self._staging.layers) if layer == ALL_LAYERS else (layer,):
                lease.ready[each] = max(lease.ready[each], tokens)
            lease.after = self._stream()
            self._copy_ready(lease)

    def complete(self, reader: bytes, generation: int, tokens: int) -> None:
        if lease := self._current(reader, generation):
            if self._staging.blocks_of(tokens) > len(lease.blocks):
                raise ValueError(f"{tokens} tokens do not fit into {len(lease.blocks)} blocks")
            lease.tokens = tokens
            self._lease_slots(lease)
            self._copy_ready(lease)

    def reads(self, reader: bytes) -> bool:
        return reader in self._by_reader

    def leave(self, key: bytes, *last: TransferEvent) -> None:
        """Take away a reader whose lease of the slots has ended. The last one ends the lease."""
        if (lease := self._by_reader.pop(key, None)) is None:
            return
        if lease.readers.pop(key).generation > 1 and last:
            # It may have been opened again before its end was known here, and its slots are about to be given back.
            self._agent.revoke_lease(key, final=True)
        if lease.readers:
            for event in last:
                self._staging.tell(event)
        else:
            self._end(lease, last)

    def _current(self, reader: bytes, generation: int) -> StagedLease | None:
        lease = self._by_reader.get(reader)
        return lease if lease is not None and lease.readers[reader].generation == generation else None

    def _ask(self, lease: StagedLease, slots: int) -> None:
        if slots > 0:
            lease.asked += slots
            if not lease.on_ask:
                self._staging.ask(lease, slots)

    def _granted(self, lease: StagedLease) -> None:
        self._lease_slots(lease)
        self._copy_ready(lease)

    def _lease_slots(self, lease: StagedLease) -> None:
        """Tell the peers of the slots for the lease's blocks, as far as there are any, and of its length."""
        end = min(len(lease.slots), len(lease.blocks))
        for key, reader in lease.readers.items():
            if end > reader.leased:
                self._agent.extend_lease(key, reader.generation, lease.slots[reader.leased : end])
                reader.leased = end
            if lease.tokens and end == len(lease.blocks):
                self._agent.complete_lease(key, reader.generation, lease.tokens)

    def _copy_ready(self, lease: StagedLease) -> None:
        """Copy what is in the cache and was not copied yet, once there are slots for all blocks so far."""
        if len(lease.slots) < len(lease.blocks) or lease.over:
            return
        copies: list[Copy] = []
        posts: list[tuple[int, int]] = []
        for layer, tokens in enumerate(lease.ready):
            # What follows in a block that is not full is written beside a copy of it.
            whole = tokens if 0 < lease.tokens <= tokens else tokens - tokens % self._staging.block_tokens
            if whole > lease.copied[layer]:
                blocks = slice(lease.copied[layer] // self._staging.block_tokens, self._staging.blocks_of(whole))
                copies += self._staging.copies(lease, blocks, layer, layer + 1, to_device=False)
                lease.copied[layer] = whole
                posts.append((layer, whole))
        is_staged = 0 < lease.tokens <= min(lease.copied) and not lease.is_staged
        lease.is_staged |= is_staged
        if posts or is_staged:
            self._staging.submit(lease, copies, partial(self._post, lease, posts, is_staged=is_staged))

    def _post(self, lease: StagedLease, posts: list[tuple[int, int]], *, is_staged: bool) -> None:
        for layer, tokens in posts:
            lease.posted[layer] = tokens
        if len(posts) == self._staging.layers and len({tokens for _, tokens in posts}) == 1:
            posts = [(ALL_LAYERS, posts[0][1])]
        for key, reader in lease.readers.items():
            for layer, tokens in posts:
                self._agent.post_ready(key, reader.generation, layer, tokens)
        if is_staged:
            # Any reader's key says it: the blocks are free for all of them.
            key = next(iter(lease.readers))
            self._staging.tell(TransferEvent(kind=EventKind.LEASE_STAGED, key=key, tokens=lease.tokens))

    def _failed(self, lease: StagedLease) -> None:
        """End a lease of which a copy failed."""
        ends: list[TransferEvent] = []
        for key in lease.readers:
            self._agent.revoke_lease(key, final=True)
            del self._by_reader[key]
            ends.append(TransferEvent(kind=EventKind.LEASE_ENDED, key=key, cause=Cause.COPY, detail=lease.failure))
        self._end(lease, ends)

    def _end(self, lease: StagedLease, last: Sequence[TransferEvent]) -> None:
        del self._leases[lease.key]
        if not lease.failure:
            self._ends(lease)
        self._staging.end(lease, *last)
