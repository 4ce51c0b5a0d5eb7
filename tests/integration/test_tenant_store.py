"""One suite for the stores of API keys: in memory and in a real Redis."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest
from baton_gateway.tenants.bucket import MINUTE_US, cost_us, left
from baton_gateway.tenants.keys import KeyRecord, Usage, digest_of
from baton_gateway.tenants.store import (
    SETTLED_KEPT_S,
    MemoryTenantStore,
    RedisTenantStore,
    Settlement,
    TenantStore,
)
from baton_gateway.tenants.tenant import Permission, Tenant

from baton.clock import SystemClock
from baton.errors import StoreUnavailable
from baton.redis import RedisConnection
from tests.harness.limits import HANG_S
from tests.harness.servers import start_redis

RIGHTS = Tenant(models=("a",), tokens_per_minute=100, weight=2.5, permissions=frozenset(Permission))


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[RedisConnection]:
    connection = RedisConnection(redis_url, clock=SystemClock(), timeout_s=10.0)
    yield connection
    await connection.close()


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest, redis: RedisConnection) -> TenantStore:
    if request.param == "memory":
        return MemoryTenantStore(lambda: time.time_ns() // 1000)
    return RedisTenantStore(redis, prefix=uuid.uuid4().hex)


def record(key: str = "key", *, created_s: float = 1.0) -> KeyRecord:
    return KeyRecord(digest=digest_of(key), tenant="acme", rights=RIGHTS, created_s=created_s, salt_key="secret")


async def test_a_record_is_found_by_its_id_as_it_was_written(store: TenantStore) -> None:
    assert await store.find(record().id) is None
    await store.put(record())
    assert await store.find(record().id) == record()
    revoked = msgspec.structs.replace(record(), revoked_s=5.0)
    await store.put(revoked)
    assert await store.find(record().id) == revoked


async def test_all_keys_are_reported_oldest_first_with_their_use(store: TenantStore) -> None:
    assert await store.report() == []
    for number in (2, 1, 3):
        await store.put(record(f"key {number}", created_s=number))
    used = record("key 1").id
    await store.settle(
        "gateway", 1, {used: Settlement(Usage(requests=1, prompt_tokens=5, output_tokens=7, cached_tokens=2))}
    )
    reports = await store.report()
    assert [report.record.created_s for report in reports] == [1, 2, 3]
    assert reports[0].usage == Usage(requests=1, prompt_tokens=5, output_tokens=7, cached_tokens=2)
    assert reports[0].last_used_s == pytest.approx(time.time(), abs=30)
    assert (reports[1].usage, reports[1].last_used_s) == (Usage(), None)


async def test_the_salt_key_is_made_once(store: TenantStore) -> None:
    made = await asyncio.gather(*(store.salt_key(f"candidate {number}") for number in range(10)))
    assert len(set(made)) == 1
    assert made[0].startswith("candidate")


async def test_a_bucket_holds_one_minute_of_its_limit(store: TenantStore) -> None:
    per_minute = 60
    first = await store.take("requests", "key", cost_us(40, per_minute))
    assert (first.fits, left(first, per_minute)) == (True, 20)
    refused = await store.take("requests", "key", cost_us(30, per_minute))
    assert not refused.fits
    assert 20 <= left(refused, per_minute) < 30, "what is refused is not taken"
    assert (await store.take("requests", "key", cost_us(20, per_minute))).fits
    assert (await store.take("tokens", "key", MINUTE_US)).fits, "limits of a key are apart"
    assert (await store.take("requests", "other", MINUTE_US)).fits, "keys are apart"


async def test_a_bucket_refills(store: TenantStore) -> None:
    assert (await store.take("requests", "key", MINUTE_US)).fits
    missing = await store.take("requests", "key", 200_000)
    assert not missing.fits
    async with asyncio.timeout(HANG_S):
        while not (await store.take("requests", "key", 200_000)).fits:  # noqa: ASYNC110 - time passes in Redis.
            await asyncio.sleep(0.02)


async def test_many_at_once_get_no_more_than_the_limit(store: TenantStore) -> None:
    cost = MINUTE_US // 10
    before_s = time.monotonic()
    taken = await asyncio.gather(*(store.take("requests", "key", cost) for _ in range(100)))
    refilled = int((time.monotonic() - before_s) / 6)
    assert 10 <= sum(each.fits for each in taken) <= 10 + refilled


async def test_settlements_move_the_bucket_and_a_batch_counts_once(store: TenantStore) -> None:
    await store.take("tokens", "key", 40_000_000)
    refund = Settlement(Usage(requests=1, output_tokens=3), -30_000_000)
    await store.put(record())
    for _ in range(3):
        await store.settle("gateway", 1, {"key": refund, record().id: refund})
    after = await store.take("tokens", "key", 0)
    assert 0 < after.full_in_us <= 10_000_000
    assert (await store.report())[0].usage == Usage(requests=1, output_tokens=3)
    await store.settle("gateway", 2, {"key": Settlement(Usage(), 100_000_000), record().id: refund})
    indebted = await store.take("tokens", "key", 0)
    assert not indebted.fits
    assert 80_000_000 < indebted.full_in_us <= 110_000_000
    assert (await store.report())[0].usage == Usage(requests=2, output_tokens=6)
    await store.settle("gateway", 3, {"key": Settlement(Usage(), -(10**9))})
    assert (await store.take("tokens", "key", MINUTE_US)).fits, "a full bucket stays full"


async def test_a_batch_that_arrives_late_does_not_count_again(store: TenantStore) -> None:
    used = record().id
    await store.put(record())
    for writer, number in (("one", 1), ("one", 2), ("one", 1), ("two", 1), ("two", 1)):
        await store.settle(writer, number, {used: Settlement(Usage(requests=1))})
    assert (await store.report())[0].usage.requests == 3


async def test_redis_keeps_no_key_and_forgets_full_buckets(redis: RedisConnection) -> None:
    prefix = uuid.uuid4().hex
    store = RedisTenantStore(redis, prefix=prefix)
    await store.put(record("sk-baton-secret"))
    await store.take("tokens", "key", MINUTE_US)
    for number in (1, 2):
        await store.settle("gateway", number, {"key": Settlement(Usage(requests=1))})
    names = cast("list[bytes]", await cast("Any", redis.client).keys(f"{prefix}*"))
    expiries = {name.removeprefix(f"{prefix}:tenants:1:".encode()): await redis.client.pttl(name) for name in names}
    assert 0 < expiries.pop(b"bucket:tokens:key") <= 60_000
    assert 86_400_000 < expiries.pop(b"settled:gateway") <= SETTLED_KEPT_S * 1000, "one key, longer than outages"
    assert expiries == {b"keys": -1, b"usage:key": -1}
    assert "sk-baton-secret" not in repr(await redis.client.hgetall(f"{prefix}:tenants:1:keys"))


async def test_a_record_of_a_newer_version_admits_nobody(
    redis: RedisConnection, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = uuid.uuid4().hex
    store = RedisTenantStore(redis, prefix=prefix)
    newer = {**msgspec.to_builtins(record()), "rights": {"tokens_per_day": 5}}
    await redis.client.hset(f"{prefix}:tenants:1:keys", record().id, msgspec.msgpack.encode(newer))
    assert await store.find(record().id) is None
    assert await store.report() == []
    assert "cannot be read" in caplog.text


async def test_redis_away_is_one_error() -> None:
    with start_redis() as server:
        connection = RedisConnection(server.url, clock=SystemClock(), timeout_s=10.0)
        store = RedisTenantStore(connection, prefix="p")
        await store.put(record())
        server.kill()
        for command in (
            store.find("x"), store.report(), store.take("tokens", "x", 1), store.settle("b", 1, {}),
            store.salt_key("c"), store.put(record()),
        ):  # fmt: skip
            with pytest.raises(StoreUnavailable):
                await command
        server.start()
        assert await store.find(record().id) == record(), "it connects again by itself"
        await connection.close()
