"""The store of responses in Redis.

    PREFIX:1:response:TENANT/ID   hash    head, output, running, owner, previous, background, keeps_events, count
    PREFIX:1:input:TENANT/ID      list    the request's own items
    PREFIX:1:events:TENANT/ID     stream  0-N: the events up to number N-1, from the entry before it on, one a line
    PREFIX:1:index:TENANT         zset    response → the time at which it expires
    PREFIX:1:sizes:TENANT         hash    response → bytes; '' → the sum of them
    PREFIX:1:owner:GATEWAY        string  its lease, which expires
    PREFIX:1:cancel:GATEWAY       set     TENANT/ID of the responses that it is asked to cancel

The 1 is the version of this format. Every change is one script, so Redis itself refuses what comes too late: the write
of an owner after its response has ended, or the end by another gateway while the owner renews its lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast

from baton.clock import Clock
from baton.redis import RedisConnection
from baton_gateway.responses.store import LEASE_S, EventPage, Key, NewRecord, Record, Turn

VERSION: Final = 1
PAGE_ENTRIES: Final = 64
"""Entries of a stream that are read at a time."""
CANCEL_S: Final = 60
"""Expiry of cancellations that an owner does not read."""

_ROOM: Final = """
local function charge(id, bytes)
  redis.call('HINCRBY', KEYS[5], id, bytes)
  redis.call('HINCRBY', KEYS[5], '', bytes)
end
local function forget(id)
  local bytes = redis.call('HGET', KEYS[5], id)
  if bytes then
    redis.call('HDEL', KEYS[5], id)
    redis.call('HINCRBY', KEYS[5], '', -bytes)
  end
  redis.call('ZREM', KEYS[4], id)
end
local function keep(id, now, ttl)
  for at = 1, 3 do redis.call('EXPIRE', KEYS[at], ttl) end
  redis.call('ZADD', KEYS[4], now + ttl, id)
  redis.call('EXPIRE', KEYS[4], ttl)
  redis.call('EXPIRE', KEYS[5], ttl)
end
"""
"""Keys of all scripts: response, input, events, index, sizes, lease of the owner."""

_CREATE: Final = (
    _ROOM
    + """
local id, now, ttl, bytes, bytes_max, roots, lease = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
if redis.call('EXISTS', KEYS[1]) == 1 then return end
redis.call('HSET', KEYS[1], 'head', ARGV[8], 'output', '[]', 'running', '1', 'count', '0', 'owner', ARGV[9],
  'previous', ARGV[10], 'background', ARGV[11], 'keeps_events', ARGV[12])
for at = 13, #ARGV do redis.call('RPUSH', KEYS[2], ARGV[at]) end
redis.call('SET', KEYS[6], '1', 'PX', lease)
charge(id, bytes)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', now)) do forget(gone) end
keep(id, now, ttl)
while tonumber(redis.call('HGET', KEYS[5], '')) > tonumber(bytes_max) do
  local oldest = redis.call('ZRANGE', KEYS[4], 0, 0)[1]
  if not oldest or oldest == id then break end
  forget(oldest)
  for kind in string.gmatch(roots, '%S+') do redis.call('UNLINK', kind .. oldest) end
end
"""
)

_APPEND: Final = (
    _ROOM
    + """
local id, now, ttl, first, count, text, head, output, only_lost = unpack(ARGV)
local running, had = unpack(redis.call('HMGET', KEYS[1], 'running', 'count'))
if running ~= '1' then return 0 end
had, first, count = tonumber(had), tonumber(first), tonumber(count)
if only_lost == '1' and (had ~= first or redis.call('EXISTS', KEYS[6]) == 1) then return 0 end
if had < first + count then
  redis.call('XADD', KEYS[3], '0-' .. (first + count), 'events', text)
  redis.call('HSET', KEYS[1], 'count', first + count)
  charge(id, #text)
end
if head ~= '' then redis.call('HSET', KEYS[1], 'head', head) end
if output ~= '' then
  redis.call('HSET', KEYS[1], 'output', output, 'running', '0')
  charge(id, #output)
end
keep(id, now, ttl)
return 1
"""
)

_READ: Final = """
local fields = redis.call('HMGET', KEYS[1], 'owner', 'running', 'background', 'keeps_events', 'head', 'output', 'count')
if not fields[1] then return nil end
fields[8] = redis.call('EXISTS', KEYS[2] .. fields[1])
return fields
"""

_TURN: Final = (
    _ROOM
    + """
local fields = redis.call('HMGET', KEYS[1], 'previous', 'running', 'output')
if not fields[1] then return nil end
keep(ARGV[1], ARGV[2], ARGV[3])
fields[4] = redis.call('LRANGE', KEYS[2], 0, -1)
return fields
"""
)

_EVENTS: Final = """
local fields = redis.call('HMGET', KEYS[1], 'owner', 'running')
if not fields[1] then return nil end
return {fields[2], redis.call('EXISTS', KEYS[3] .. fields[1]),
  redis.call('XRANGE', KEYS[2], '0-' .. (ARGV[1] + 1), '+', 'COUNT', ARGV[2])}
"""

_DELETE: Final = (
    _ROOM
    + """
local found = redis.call('EXISTS', KEYS[1])
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
forget(ARGV[1])
return found
"""
)

_RENEW: Final = """
if redis.call('PEXPIRE', KEYS[1], ARGV[1]) == 0 then redis.call('SET', KEYS[1], '1', 'PX', ARGV[1]) end
for at = 2, #ARGV do redis.call('SREM', KEYS[2], ARGV[at]) end
return redis.call('SMEMBERS', KEYS[2])
"""
"""A Redis that is full sets nothing, but goes on with what there is."""

_KINDS: Final = ("response", "input", "events")
_AWAY: Final = "the store of responses cannot be reached"


class RedisStore:
    def __init__(
        self,
        connection: RedisConnection,
        *,
        clock: Clock,
        prefix: str,
        ttl_s: float,
        bytes_max: int,
        lease_s: float = LEASE_S,
    ) -> None:
        """`bytes_max`: bound on one tenant's responses together."""
        self._redis = connection.client
        self._answer = connection.answer
        self._clock = clock
        self._root = f"{prefix}:{VERSION}:"
        self._lease_ms = round(lease_s * 1000)
        self._ttl_s = max(1, round(ttl_s))
        self._bytes_max = bytes_max

    async def create(self, key: Key, record: NewRecord) -> None:
        roots = " ".join(f"{self._root}{kind}:{key.tenant}/" for kind in _KINDS)
        await self._run(
            _CREATE, self._keys(key, record.owner), key.response, self._now_s(), self._ttl_s, record.size_bytes,
            self._bytes_max, roots, self._lease_ms, record.head, record.owner, record.previous,
            int(record.background), int(record.keeps_events), *record.items,
        )  # fmt: skip

    async def append(self, key: Key, first: int, events: Sequence[bytes], head: bytes) -> bool:
        return await self._append(key, first, events, head, b"")

    async def finish(self, key: Key, first: int, events: Sequence[bytes], head: bytes, output: bytes) -> bool:
        return await self._append(key, first, events, head, output)

    async def lose(self, key: Key, first: int, events: Sequence[bytes], head: bytes) -> bool:
        record = await self.read(key)
        return record is not None and await self._append(key, first, events, head, record.output, owner=record.owner)

    async def read(self, key: Key) -> Record | None:
        found = await self._run(_READ, [self._key("response", key), f"{self._root}owner:"])
        if found is None:
            return None
        owner, running, background, keeps_events, head, output, count, held = cast("list[Any]", found)
        return Record(
            owner=owner.decode(),
            owner_lost=not held,
            running=running == b"1",
            background=background == b"1",
            keeps_events=keeps_events == b"1",
            head=head,
            output=output,
            events=int(count),
        )

    async def items(self, key: Key) -> list[bytes] | None:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.exists(self._key("response", key))
        pipeline.lrange(self._key("input", key), 0, -1)  # pyright: ignore[reportUnusedCoroutine]
        exists, items = await self._answer(pipeline.execute(), said=_AWAY)
        return items if exists else None

    async def turn(self, key: Key) -> Turn | None:
        found = await self._run(_TURN, self._keys(key), key.response, self._now_s(), self._ttl_s)
        if found is None:
            return None
        previous, running, output, items = cast("list[Any]", found)
        return Turn(previous=previous.decode(), running=running == b"1", items=tuple(items), output=output)

    async def events(self, key: Key, first: int) -> EventPage | None:
        keys = [self._key("response", key), self._key("events", key), f"{self._root}owner:"]
        found = await self._run(_EVENTS, keys, first, PAGE_ENTRIES)
        if found is None:
            return None
        running, held, entries = cast("tuple[bytes, int, list[Any]]", tuple(found))
        events: list[bytes] = []
        for name, (_, text) in entries:
            lines, end = text.split(b"\n"), int(name.partition(b"-")[2])
            # The first entry may begin before the event that is asked for.
            events += lines[max(0, first - (end - len(lines))) :]
        # A page that is full may not be the last, whatever the response's state.
        more = len(entries) == PAGE_ENTRIES
        return EventPage(events=tuple(events), running=running == b"1" or more, owner_lost=not held and not more)

    async def delete(self, key: Key) -> bool:
        return bool(await self._run(_DELETE, self._keys(key), key.response))

    async def ask_cancel(self, key: Key, owner: str) -> None:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.sadd(f"{self._root}cancel:{owner}", _name(key))
        pipeline.expire(f"{self._root}cancel:{owner}", CANCEL_S)
        await self._answer(pipeline.execute(), said=_AWAY)

    async def renew(self, owner: str, cancelled: Sequence[Key] = ()) -> list[Key]:
        keys = [f"{self._root}owner:{owner}", f"{self._root}cancel:{owner}"]
        names = cast("list[bytes]", await self._run(_RENEW, keys, self._lease_ms, *map(_name, cancelled)))
        return [Key(*name.decode().rsplit("/", 1)) for name in names]

    async def _append(
        self, key: Key, first: int, events: Sequence[bytes], head: bytes, output: bytes, *, owner: str | None = None
    ) -> bool:
        """Store events, and the end with an `output`; `owner`: only if it is lost."""
        arguments = (first, len(events), b"\n".join(events), head, output, int(owner is not None))
        keys = self._keys(key, owner or "")
        return bool(await self._run(_APPEND, keys, key.response, self._now_s(), self._ttl_s, *arguments))

    async def _run(self, script: str, keys: Sequence[str], *arguments: str | bytes | float) -> Any:
        return await self._answer(self._redis.eval(script, len(keys), *keys, *arguments), said=_AWAY)

    def _keys(self, key: Key, owner: str = "") -> list[str]:
        of_tenant = [f"{self._root}{kind}:{key.tenant}" for kind in ("index", "sizes")]
        return [*(self._key(kind, key) for kind in _KINDS), *of_tenant, f"{self._root}owner:{owner}"]

    def _key(self, kind: str, key: Key) -> str:
        return f"{self._root}{kind}:{key.tenant}/{key.response}"

    def _now_s(self) -> float:
        return self._clock.wall_s()


def _name(key: Key) -> str:
    return f"{key.tenant}/{key.response}"
