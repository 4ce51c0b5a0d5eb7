"""The index's durable form in Redis: the only file that knows Redis.

    PREFIX:1:state            hash    stream_sequence, fence
    PREFIX:1:workers          hash    worker → WorkerState
    PREFIX:1:blocks:WORKER    hash    slot (see `durable.py`) → the block before it
    PREFIX:1:aside:FENCE:WORKER   the same, while a whole worker is being written; it expires
    PREFIX:1:cold:INSTANCE    hash    name → a cold branch of one index; block → the name of its branch

The last key belongs to one index, is of no use to others, and expires after that index ends. The 1 is the version of
this format: another version uses keys of its own, so indexes of both run side by side while they are being replaced.

A batch is one MULTI, so what is read is a state that the index once had. Each writer claims the database with its
fence before it writes; a batch watches that fence, so Redis itself refuses the batch of a writer that was replaced,
however late it arrives. A missing fence shows that the database was emptied: single changes are never written on top
of that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Final, Protocol, cast

import msgspec
from redis.asyncio.client import Pipeline, Redis
from redis.typing import EncodableT, FieldT

from baton.clock import Clock
from baton.errors import StoreUnavailable
from baton.redis import RedisConnection
from baton_kvindex.durable import Batch, SavedWorker, WorkerChange, WorkerState, is_slot, runs_of, slots
from baton_kvindex.index import ID_BYTES, Run, split_ids
from baton_kvindex.packing import EvictedBranch

VERSION: Final = 1
"""Version of the format; raised when an older index would misread it."""
ASIDE_S: Final = 60
"""Expiry of a whole worker that is being written."""
ASIDE_RENEWALS: Final = 4
"""Renewals of it in that time, until the last worker of its batch is written."""
PAGE_BLOCKS: Final = 1000
"""Blocks in one command: few enough that packing them never holds up an answer."""

CLAIM: Final = """
local present = redis.call('HGET', KEYS[1], 'fence')
if present and (#present > #ARGV[1] or (#present == #ARGV[1] and present > ARGV[1])) then return present end
redis.call('HSET', KEYS[1], 'fence', ARGV[1])
return ARGV[1]
"""
"""Claims the database. Fences have more digits than Lua's numbers hold, so they are compared as text."""

FIND: Final = """
local found, seen = {}, {}
for _, id in ipairs(ARGV) do
  local name = redis.call('HGET', KEYS[1], id)
  if name and not seen[name] then
    seen[name] = true
    local packed = redis.call('HGET', KEYS[1], name)
    if packed then
      found[#found + 1] = name
      found[#found + 1] = packed
    end
  end
end
return found
"""

DROP: Final = """
for _, name in ipairs(ARGV) do
  local packed = redis.call('HGET', KEYS[1], name)
  if packed then
    redis.call('HDEL', KEYS[1], name)
    for at = 5, struct.unpack('<I4', packed) * 16, 16 do
      local id = string.sub(packed, at, at + 15)
      if redis.call('HGET', KEYS[1], id) == name then redis.call('HDEL', KEYS[1], id) end
    end
  end
end
"""
"""Deletes branches. A packed branch begins with the number of its blocks and their ids; some of these may belong to
a later branch by now."""

COLD_S: Final = 120
"""Expiry of an index's cold branches, from its last `keep` on."""

_encode_state = msgspec.msgpack.Encoder().encode
_decode_state = msgspec.msgpack.Decoder(WorkerState).decode


class StoreEmptied(StoreUnavailable):
    """The database lost what was written, so single changes must not be written."""

    code = "store_emptied"


class StoreFenced(StoreUnavailable):
    """Another writer with a higher fence has claimed the database."""

    code = "store_fenced"


class Store(Protocol):
    async def load(self, take: Callable[[str, SavedWorker], Awaitable[None]]) -> int:
        """Pass each worker that was written to `take`, one at a time; return the newest event that they contain.

        Raises StoreUnavailable.
        """
        ...

    async def claim(self, fence: int) -> Mapping[str, WorkerState]:
        """Refuse writes with a lower fence from now on; return the workers that are written.

        Raises StoreUnavailable and StoreFenced.
        """
        ...

    async def write(self, batch: Batch, fence: int) -> None:
        """Write a whole batch or nothing.

        Raises StoreUnavailable, also where the batch may have been written, StoreEmptied and StoreFenced.
        """
        ...

    def cold(self, instance: str) -> ColdStore:
        """Return the store for one index's cold branches."""
        ...

    async def close(self) -> None: ...


class ColdStore(Protocol):
    """Store for one index's cold branches. Each call but `close` raises StoreUnavailable."""

    async def put(self, branches: Sequence[EvictedBranch]) -> None: ...

    async def find(self, blocks: bytes) -> Mapping[bytes, bytes]:
        """Return the packed branches that have one of the blocks, by name."""
        ...

    async def drop(self, names: Sequence[bytes]) -> None: ...

    async def keep(self) -> bool:
        """Renew the expiry; return False if nothing is stored."""
        ...

    async def close(self) -> None:
        """Delete all branches if the database can be reached."""
        ...


class RedisStore:
    def __init__(self, url: str, *, clock: Clock, prefix: str, timeout_s: float, aside_s: int = ASIDE_S) -> None:
        self._clock = clock
        self._aside_s = aside_s
        self._connection = connection = RedisConnection(url, clock=clock, timeout_s=timeout_s)
        self._redis = connection.client
        self._answer = connection.answer
        root = f"{prefix}:{VERSION}"
        self._state = f"{root}:state"
        self._workers = f"{root}:workers"
        self._blocks = f"{root}:blocks:"
        self._aside = f"{root}:aside:"
        self._cold = f"{root}:cold:"

    async def load(self, take: Callable[[str, SavedWorker], Awaitable[None]]) -> int:
        # The sequences first: later events are applied again, which does no harm.
        written = await self._answer(self._redis.hget(self._state, "stream_sequence"))
        states = await self._answer(self._redis.hgetall(self._workers))
        for name, packed in cast("dict[bytes, bytes]", states).items():
            worker = name.decode(errors="replace")
            entry = _saved_worker(packed, await self._read_blocks(worker))
            if entry is not None:
                await take(worker, entry)
        return int(written) if written is not None and written.isdigit() else 0

    async def claim(self, fence: int) -> Mapping[str, WorkerState]:
        present = await self._answer(self._redis.eval(CLAIM, 1, self._state, str(fence)))
        if int(present) != fence:
            raise StoreFenced(f"the fence is {int(present)}, which is above {fence}")
        states = await self._answer(self._redis.hgetall(self._workers))
        read = ((name, _read_state(packed)) for name, packed in cast("dict[bytes, bytes]", states).items())
        return {name.decode(errors="replace"): state for name, state in read if state is not None}

    async def write(self, batch: Batch, fence: int) -> None:
        await self._write_aside(
            {
                f"{self._aside}{fence}:{worker}": change.runs
                for worker, change in batch.workers.items()
                if change is not None and change.runs is not None
            }
        )
        pipeline = self._redis.pipeline(transaction=True)
        try:
            if await self._watch_fence(pipeline, fence) != fence:
                raise StoreEmptied("Redis is empty, or went back to an earlier state")
            pipeline.multi()
            for worker, change in batch.workers.items():
                self._queue(pipeline, worker, change, f"{self._aside}{fence}:{worker}")
            pipeline.hset(self._state, "stream_sequence", batch.stream_sequence)
            await self._answer(pipeline.execute())
        finally:
            # The pipeline's own context would wait for the answer to UNWATCH without a deadline.
            with suppress(StoreUnavailable):
                await self._answer(pipeline.reset())

    def cold(self, instance: str) -> ColdStore:
        return _RedisColdStore(self._connection, self._cold + instance)

    async def close(self) -> None:
        await self._connection.close()

    async def _watch_fence(self, pipeline: Pipeline, fence: int) -> int | None:
        """Return the fence in Redis; if it changes from now on, the pipeline fails. Raises StoreFenced."""
        await self._answer(pipeline.watch(self._state))
        found = await self._answer(pipeline.hget(self._state, "fence"))
        present = int(found) if found is not None and found.isdigit() else None
        if present is not None and present > fence:
            raise StoreFenced(f"the fence is {present}, which is above {fence}")
        return present

    def _queue(self, pipeline: Pipeline, worker: str, change: WorkerChange | None, aside: str) -> None:
        blocks_key = self._blocks + worker
        if change is None:
            pipeline.delete(blocks_key)
            pipeline.hdel(self._workers, worker)
            return
        if change.runs is not None:
            if any(run.blocks for run in change.runs):
                pipeline.rename(aside, blocks_key)
                pipeline.persist(blocks_key)
            else:
                pipeline.delete(blocks_key)
        if change.removed:
            pipeline.hdel(blocks_key, *change.removed)
        for page in _pages(change.stored.items()):
            pipeline.hset(blocks_key, mapping=page)
        pipeline.hset(self._workers, worker, _encode_state(change.state))

    async def _write_aside(self, workers: Mapping[str, Iterable[Run]]) -> None:
        """Write whole workers beside their present form, in pages; the batch then moves them into place."""
        written, renewed_s = list[str](), self._clock.now_s()
        for aside, runs in workers.items():
            await self._answer(self._redis.delete(aside))
            for page in _pages(pair for run in runs for pair in slots(run.parent, run.blocks, run.tier)):
                await self._answer(_hset_for(self._redis, aside, page, self._aside_s))
                if self._clock.now_s() - renewed_s >= self._aside_s / ASIDE_RENEWALS:
                    # A batch of many workers takes longer than the first of them would be kept.
                    renewed_s = self._clock.now_s()
                    pipeline = self._redis.pipeline(transaction=False)
                    for each in written:
                        pipeline.expire(each, self._aside_s)
                    await self._answer(pipeline.execute())
            written.append(aside)

    async def _read_blocks(self, worker: str) -> dict[bytes, bytes]:
        parents: dict[bytes, bytes] = {}
        cursor = 0
        while True:
            scan = self._redis.hscan(self._blocks + worker, cursor, count=PAGE_BLOCKS)
            cursor, page = await self._answer(scan)
            parents.update(cast("dict[bytes, bytes]", page))
            if not cursor:
                return parents


class _RedisColdStore:
    def __init__(self, connection: RedisConnection, key: str) -> None:
        self._redis = connection.client
        self._answer = connection.answer
        self._key = key

    async def put(self, branches: Sequence[EvictedBranch]) -> None:
        names = ((block, each.name) for each in branches for block in split_ids(each.blocks))
        for page in _pages(chain(((each.name, each.packed()) for each in branches), names)):
            await self._answer(_hset_for(self._redis, self._key, page, COLD_S))

    async def find(self, blocks: bytes) -> Mapping[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        for at in range(0, len(blocks), PAGE_BLOCKS * ID_BYTES):
            ids = split_ids(blocks[at : at + PAGE_BLOCKS * ID_BYTES])
            rows = cast("list[bytes]", await self._answer(self._redis.eval(FIND, 1, self._key, *ids)))
            found |= zip(rows[::2], rows[1::2], strict=True)
        return found

    async def drop(self, names: Sequence[bytes]) -> None:
        await self._answer(self._redis.eval(DROP, 1, self._key, *names))

    async def keep(self) -> bool:
        return bool(await self._answer(self._redis.expire(self._key, COLD_S)))

    async def close(self) -> None:
        with suppress(StoreUnavailable):
            await self._answer(self._redis.unlink(self._key))


def _hset_for(redis: Redis, key: str, page: dict[FieldT, EncodableT], expiry_s: int) -> Awaitable[object]:
    """Write a page and its key's expiry at once: an index that ended between the two would leave the key for ever."""
    pipeline = redis.pipeline(transaction=True)
    pipeline.hset(key, mapping=page)
    pipeline.expire(key, expiry_s)
    return pipeline.execute()


def _saved_worker(packed: bytes, parents: Mapping[bytes, bytes]) -> SavedWorker | None:
    """Return a worker as it was written, or None if that is damaged: a resync then restores it."""
    state = _read_state(packed)
    if state is None or any(not is_slot(slot) or len(parent) not in (0, ID_BYTES) for slot, parent in parents.items()):
        return None
    return SavedWorker(state, runs_of(parents))


def _read_state(packed: bytes) -> WorkerState | None:
    try:
        return _decode_state(packed)
    except msgspec.DecodeError:
        return None


def _pages(pairs: Iterable[tuple[bytes, bytes]]) -> Iterable[dict[FieldT, EncodableT]]:
    rest = iter(pairs)
    while page := dict[FieldT, EncodableT](islice(rest, PAGE_BLOCKS)):
        yield page
