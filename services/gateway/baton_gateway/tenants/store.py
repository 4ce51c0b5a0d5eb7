"""What gateways share about API keys: records, buckets of their limits, usage.

In Redis, under PREFIX:tenants:1 (the 1 is the version of this format):

    :keys              hash      id of a key → its record
    :salt_key          string    secret of all tenants' salts, made with the first key
    :bucket:LIMIT:ID   string    instant at which the bucket is full, µs of Redis's clock; expires then
    :usage:ID          hash      requests, prompt_tokens, output_tokens, cached_tokens, last_used_s
    :settled:WRITER    string    number of the last batch of settlements that a gateway wrote; expires
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, Protocol, cast

import msgspec

from baton.redis import RedisConnection
from baton_gateway.tenants import bucket
from baton_gateway.tenants.bucket import Taken
from baton_gateway.tenants.keys import KeyRecord, Usage

log = logging.getLogger(__name__)

VERSION: Final = 1
SETTLED_KEPT_S: Final = 7 * 86400
"""Time for which a gateway's last batch is known to be written. A gateway that lost the answer tries again until Redis
serves it, so this bounds the outage after which the batch counts twice."""

Limit = Literal["requests", "tokens"]

TAKE: Final = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local full_at = math.max(tonumber(redis.call('GET', KEYS[1]) or 0), now)
local cost, fits = tonumber(ARGV[1]), 0
if full_at + cost <= now + tonumber(ARGV[2]) then
  fits, full_at = 1, full_at + cost
  if full_at > now then
    redis.call('SET', KEYS[1], string.format('%.0f', full_at), 'PX', math.ceil((full_at - now) / 1000))
  end
end
return {fits, full_at - now}
"""
"""Script that does what `bucket.take` does. A double holds microseconds since 1970 exactly."""

SETTLE: Final = """
if tonumber(redis.call('GET', KEYS[1]) or 0) >= tonumber(ARGV[2]) then return end
redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[1])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
for i = 2, #KEYS, 2 do
  local at = (i - 2) / 2 * 5 + 3
  for field, name in ipairs({'requests', 'prompt_tokens', 'output_tokens', 'cached_tokens'}) do
    redis.call('HINCRBY', KEYS[i], name, ARGV[at + field - 1])
  end
  redis.call('HSET', KEYS[i], 'last_used_s', time[1])
  local change = tonumber(ARGV[at + 4])
  if change ~= 0 then
    local full_at = math.max(tonumber(redis.call('GET', KEYS[i + 1]) or 0), now) + change
    if full_at > now then
      redis.call('SET', KEYS[i + 1], string.format('%.0f', full_at), 'PX', math.ceil((full_at - now) / 1000))
    else
      redis.call('DEL', KEYS[i + 1])
    end
  end
end
"""
"""Adds to usage and settles buckets, as `bucket.settle`, unless this batch was written before."""


class Settlement(msgspec.Struct, frozen=True):
    """What a key has used since the last batch, and by how much that differs from what was taken for it."""

    usage: Usage = Usage()
    change_us: int = 0

    def __add__(self, other: Settlement) -> Settlement:
        return Settlement(self.usage + other.usage, self.change_us + other.change_us)


class KeyReport(msgspec.Struct, frozen=True, kw_only=True):
    """A key and its use."""

    record: KeyRecord
    usage: Usage
    last_used_s: float | None
    """Seconds since 1970, by Redis's clock; None: never."""


class TenantStore(Protocol):
    """Each call raises StoreUnavailable."""

    async def salt_key(self, candidate: str) -> str:
        """Return the deployment's `KeyRecord.salt_key`; that is `candidate` if there is none yet."""
        ...

    async def put(self, record: KeyRecord) -> None:
        """Add or replace a record."""
        ...

    async def find(self, key: str) -> KeyRecord | None:
        """Return the record of the key with this id."""
        ...

    async def report(self) -> list[KeyReport]:
        """Return all keys, oldest first."""
        ...

    async def take(self, limit: Limit, key: str, cost: int) -> Taken:
        """Take a cost from a key's bucket, if it fits.

        A call that the client of Redis repeats, as the connection broke before the answer, may take it twice: it is
        back within the minute, and to remember each request would cost Redis half as much again.
        """
        ...

    async def settle(self, writer: str, number: int, settlements: Mapping[str, Settlement]) -> None:
        """Write settlements by key, all or none.

        A writer numbers its batches from 1 on and writes one after the other; one that is written already is not
        written again.
        """
        ...


class MemoryTenantStore:
    """Store of one process, on a clock of the caller's in microseconds."""

    def __init__(self, now_us: Callable[[], int]) -> None:
        self._now_us = now_us
        self._salt_key = ""
        self._records: dict[str, KeyRecord] = {}
        self._full_at_us: dict[tuple[Limit, str], int] = {}
        self._usage: dict[str, tuple[Usage, float]] = {}
        self._settled: dict[str, int] = {}

    async def salt_key(self, candidate: str) -> str:
        self._salt_key = self._salt_key or candidate
        return self._salt_key

    async def put(self, record: KeyRecord) -> None:
        self._records[record.id] = record

    async def find(self, key: str) -> KeyRecord | None:
        return self._records.get(key)

    async def report(self) -> list[KeyReport]:
        return _sorted(
            KeyReport(record=record, usage=usage, last_used_s=last_used_s)
            for record in self._records.values()
            for usage, last_used_s in [self._usage.get(record.id, (Usage(), None))]
        )

    async def take(self, limit: Limit, key: str, cost: int) -> Taken:
        full_at_us, taken = bucket.take(self._full_at_us.get((limit, key), 0), self._now_us(), cost)
        self._full_at_us[limit, key] = full_at_us
        return taken

    async def settle(self, writer: str, number: int, settlements: Mapping[str, Settlement]) -> None:
        if self._settled.get(writer, 0) >= number:
            return
        self._settled[writer] = number
        for key, settlement in settlements.items():
            usage, _ = self._usage.get(key, (Usage(), None))
            self._usage[key] = (usage + settlement.usage, self._now_us() // 1_000_000)
            if settlement.change_us:
                full_at_us = self._full_at_us.get(("tokens", key), 0)
                self._full_at_us["tokens", key] = bucket.settle(full_at_us, self._now_us(), settlement.change_us)


class RedisTenantStore:
    def __init__(self, redis: RedisConnection, *, prefix: str) -> None:
        self._client = redis.client
        self._answer = redis.answer
        self._root = f"{prefix}:tenants:{VERSION}"

    async def salt_key(self, candidate: str) -> str:
        await self._answer(self._client.set(f"{self._root}:salt_key", candidate, nx=True))
        found = cast("bytes | None", await self._answer(self._client.get(f"{self._root}:salt_key")))
        return found.decode() if found is not None else candidate

    async def put(self, record: KeyRecord) -> None:
        await self._answer(self._client.hset(f"{self._root}:keys", record.id, _encode(record)))

    async def find(self, key: str) -> KeyRecord | None:
        packed = cast("bytes | None", await self._answer(self._client.hget(f"{self._root}:keys", key)))
        return None if packed is None else _decode(key, packed)

    async def report(self) -> list[KeyReport]:
        rows = cast("dict[bytes, bytes]", await self._answer(self._client.hgetall(f"{self._root}:keys")))
        read = (_decode(key.decode(), packed) for key, packed in rows.items())
        records = [record for record in read if record is not None]
        pipeline = self._client.pipeline(transaction=False)
        for record in records:
            pipeline.hgetall(f"{self._root}:usage:{record.id}")
        used = cast("list[dict[bytes, bytes]]", await self._answer(pipeline.execute()))
        return _sorted(_report_of(record, fields) for record, fields in zip(records, used, strict=True))

    async def take(self, limit: Limit, key: str, cost: int) -> Taken:
        name = f"{self._root}:bucket:{limit}:{key}"
        fits, full_in_us = await self._answer(self._client.eval(TAKE, 1, name, str(cost), str(bucket.MINUTE_US)))
        return Taken(bool(fits), int(full_in_us))

    async def settle(self, writer: str, number: int, settlements: Mapping[str, Settlement]) -> None:
        names, figures = [f"{self._root}:settled:{writer}"], [SETTLED_KEPT_S, number]
        for key, settlement in settlements.items():
            names += [f"{self._root}:usage:{key}", f"{self._root}:bucket:tokens:{key}"]
            figures += [*msgspec.structs.astuple(settlement.usage), settlement.change_us]
        await self._answer(self._client.eval(SETTLE, len(names), *names, *map(str, figures)))


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_record: Final = msgspec.msgpack.Decoder(KeyRecord).decode


def _decode(key: str, packed: bytes) -> KeyRecord | None:
    try:
        return _decode_record(packed)
    except msgspec.DecodeError as error:
        # A record of a newer version may restrict the key in a way that is unknown here.
        log.error("the record of the API key %s cannot be read, so the key is refused: %s", key, error)
        return None


def _report_of(record: KeyRecord, fields: Mapping[bytes, bytes]) -> KeyReport:
    usage = Usage(**{name: int(fields.get(name.encode(), 0)) for name in Usage.__struct_fields__})
    last_used = fields.get(b"last_used_s")
    return KeyReport(record=record, usage=usage, last_used_s=None if last_used is None else float(last_used))


def _sorted(reports: Iterable[KeyReport]) -> list[KeyReport]:
    return sorted(reports, key=lambda report: (report.record.created_s, report.record.id))
