"""API keys, salts, limits and usage of tenants, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import msgspec
import pytest
from baton_gateway.config import Settings
from baton_gateway.tenants import bucket
from baton_gateway.tenants.command import create, find, revoke, rights_of
from baton_gateway.tenants.keyring import Keyring, static_salt
from baton_gateway.tenants.keys import Usage, digest_of, key_id
from baton_gateway.tenants.outage import RETRY_S, WatchedStore
from baton_gateway.tenants.quotas import LABELS_MAX, SETTLE_INTERVAL_S, Quotas
from baton_gateway.tenants.store import KeyReport, Limit, MemoryTenantStore, Settlement
from baton_gateway.tenants.tenant import (
    TENANT_HEADER,
    Access,
    Permission,
    Tenant,
    request_salt,
    tenant_of,
    tenant_salt,
)

from baton import config
from baton.clock import ManualClock
from baton.errors import (
    ConfigurationError,
    Forbidden,
    InvalidRequest,
    RateLimited,
    StoreUnavailable,
    Unauthenticated,
)
from baton.telemetry import catalogue

# ---------------------------------------------------------------- salts


def test_salts_are_apart_by_tenant_and_by_request() -> None:
    salts = {
        request_salt(tenant, request)
        for tenant in ("", tenant_salt("secret", "a"), tenant_salt("secret", "b"), tenant_salt("other", "a"))
        for request in ("", "x", "y")
    }
    assert len(salts) == 12
    assert request_salt("", "x") == "x", "as without keys"


def test_no_request_reaches_the_salt_of_another_tenant_by_its_name() -> None:
    victim = request_salt(tenant_salt("secret", "victim"), "")
    assert victim not in {
        request_salt(tenant_salt("secret", "thief"), name) for name in ("victim", "tenant victim", victim)
    }


def test_a_key_in_the_settings_has_a_salt_that_its_tenant_does_not_tell() -> None:
    assert static_salt("one") not in (tenant_of("one"), static_salt("two"))
    assert digest_of("one").hex().find(static_salt("one")) == -1


# ---------------------------------------------------------------- keys


class Failing(MemoryTenantStore):
    """A store that can be away."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(lambda: round(clock.now_s() * 1e6))
        self.away = False
        self.lost_answer = False
        self.questions = 0
        self.settle_s: Iterator[float] = iter(())
        """Time that each settlement takes, while there is one left."""
        self._clock = clock

    def _check(self) -> None:
        self.questions += 1
        if self.away:
            raise StoreUnavailable("Redis does not serve")

    async def find(self, key: str) -> Any:
        self._check()
        return await super().find(key)

    async def take(self, limit: Limit, key: str, cost: int) -> bucket.Taken:
        self._check()
        return await super().take(limit, key, cost)

    async def settle(self, writer: str, number: int, settlements: Mapping[str, Settlement]) -> None:
        self._check()
        if (wait_s := next(self.settle_s, 0.0)) > 0:
            await self._clock.sleep(wait_s)
        await super().settle(writer, number, settlements)
        if self.lost_answer:
            raise StoreUnavailable("no answer in time")


class World:
    def __init__(self, *, is_open: bool = True, api_keys: tuple[str, ...] = ()) -> None:
        self.clock = ManualClock(start_s=1000.0)
        self.store = Failing(self.clock)
        self.watched = WatchedStore(self.store, self.clock, "limits are not enforced")
        ids = iter(range(10**9))
        self.keyring = Keyring(
            api_keys, {}, store=self.watched, clock=self.clock, kept_s=5.0, open_without_store=is_open
        )
        self.quotas = Quotas(
            store=self.watched,
            clock=self.clock,
            new_id=lambda: f"{next(ids):032x}",
            output_tokens_reserved=100,
            open_without_store=is_open,
        )

    async def new_key(self, tenant: str = "acme", **rights: Any) -> str:
        key, _ = await create(self.store, tenant=tenant, rights=Tenant(**rights))
        return key

    async def identify(self, key: str, **headers: str) -> Access:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.keyring.identify({"authorization": f"Bearer {key}", **named})

    async def report(self, key: str) -> KeyReport:
        return next(each for each in await self.store.report() if each.record.id == key_id(digest_of(key)))

    def readings(self) -> dict[tuple[str, tuple[str, ...]], float]:
        return {(reading.row.name, reading.labels): reading.value for reading in self.quotas.readings()}


async def test_a_key_is_known_by_its_digest_only() -> None:
    world = World()
    key = await world.new_key(weight=2.0)
    access = await world.identify(key)
    assert (access.tenant, access.label, access.rights.weight) == ("acme", "acme", 2.0)
    assert access == await world.keyring.identify({"x-api-key": key}), "as Anthropic's clients send it"
    stored = repr(await world.store.report())
    assert key not in stored
    assert key.removeprefix("sk-baton-") not in stored
    for wrong in (key[:-1], key + "0", key.upper(), "", "sk-baton-"):
        with pytest.raises(Unauthenticated):
            await world.identify(wrong)
    with pytest.raises(Unauthenticated, match="`Authorization: Bearer KEY` or `x-api-key: KEY`"):
        await world.keyring.identify({})


async def test_an_id_alone_opens_nothing() -> None:
    world = World()
    key = await world.new_key()
    record = (await world.report(key)).record
    other = digest_of("other")
    await world.store.put(msgspec.structs.replace(record, digest=record.digest[:8] + other[8:]))
    with pytest.raises(Unauthenticated):
        await world.identify(key)


async def test_a_revoked_key_is_refused_once_its_record_is_read_again() -> None:
    world = World()
    key = await world.new_key()
    await world.identify(key)
    revoked = await revoke(world.store, key_id(digest_of(key)))
    assert await revoke(world.store, revoked.id) == revoked, "a second time changes nothing"
    await world.clock.advance(4.9)
    await world.identify(key)
    await world.clock.advance(0.2)
    with pytest.raises(Unauthenticated):
        await world.identify(key)
    with pytest.raises(InvalidRequest, match="no API key"):
        await find(world.store, "unknown")


async def test_records_are_read_once_in_a_while_and_unknown_keys_are_not_kept() -> None:
    world = World()
    key = await world.new_key()
    for _ in range(100):
        await world.identify(key)
    assert world.store.questions == 1
    with pytest.raises(Unauthenticated):
        await world.identify("sk-baton-new")
    record = (await world.report(key)).record
    await world.store.put(msgspec.structs.replace(record, digest=digest_of("sk-baton-new")))
    await world.identify("sk-baton-new")


@pytest.mark.parametrize("is_open", [True, False])
async def test_without_the_store_known_keys_work_if_that_is_wanted_and_no_others(is_open: bool) -> None:
    world = World(is_open=is_open)
    key, unread = await world.new_key(), await world.new_key()
    await world.identify(key)
    world.store.away = True
    await world.identify(key)
    await world.clock.advance(6.0)
    for _ in range(3):
        if is_open:
            assert (await world.identify(key)).tenant == "acme"
        else:
            with pytest.raises(StoreUnavailable):
                await world.identify(key)
        with pytest.raises(StoreUnavailable) as caught:
            await world.identify(unread)
        assert caught.value.retry_after_s == 1.0
    assert world.store.questions == 2, "it is asked again after a second only"
    world.store.away = False
    await world.clock.advance(RETRY_S)
    assert (await world.identify(unread)).tenant == "acme"


async def test_keys_in_the_settings_go_on_beside_stored_ones() -> None:
    world = World(api_keys=("one",))
    world.store.away = True
    access = await world.identify("one")
    assert (access.tenant, access.key, access.salt) == (tenant_of("one"), "", static_salt("one"))
    assert tenant_of("one") not in access.label


async def test_a_header_names_the_tenant_by_permission_only() -> None:
    world = World()
    proxy = await world.new_key("proxy", permissions=frozenset({Permission.SET_TENANT}))
    first, again = await world.identify(proxy, x_baton_tenant="a"), await world.identify(proxy, x_baton_tenant="a")
    other, own = await world.identify(proxy, x_baton_tenant="b"), await world.identify(proxy)
    assert first == again
    assert len({first.salt, other.salt, own.salt}) == 3
    assert [first.tenant, other.tenant, own.tenant] == ["a", "b", "proxy"]
    assert first.label == "proxy", "clients' names are no labels"
    direct = await world.identify(await world.new_key("a"))
    assert direct.salt == first.salt, "it is the same tenant"
    with pytest.raises(Forbidden, match=TENANT_HEADER):
        await world.identify(await world.new_key(), x_baton_tenant="a")
    for malformed in ("", "a b", "ä", "x" * 65, "-a"):
        with pytest.raises(InvalidRequest, match=TENANT_HEADER):
            await world.identify(proxy, x_baton_tenant=malformed)


async def test_tenants_share_the_prefix_cache_by_permission() -> None:
    world = World()
    share = frozenset({Permission.SHARE_PREFIX_CACHE})
    one, two = await world.new_key("one", permissions=share), await world.new_key("two", permissions=share)
    assert (await world.identify(one)).salt == (await world.identify(two)).salt == ""
    assert (await world.identify(await world.new_key("one"))).salt


async def test_without_keys_every_request_has_the_same_access() -> None:
    keyring = Keyring((), {}, store=None, clock=ManualClock(), kept_s=5.0, open_without_store=True)
    access = await keyring.identify({"authorization": "Bearer any", TENANT_HEADER: "ignored"})
    assert (access.tenant, access.salt, access.key, access.rights) == ("", "", "", Tenant())
    assert access.may_use("any")


def test_models_of_a_key_are_a_list() -> None:
    access = Access(rights=Tenant(models=("a", "b")))
    access.check_model("a")
    with pytest.raises(Forbidden, match="`c`") as caught:
        access.check_model("c")
    assert caught.value.param == "model"


# ---------------------------------------------------------------- limits


async def test_requests_are_limited_and_the_headers_say_how() -> None:
    world = World()
    access = await world.identify(await world.new_key(requests_per_minute=2))
    headers: dict[str, str] = {}
    await world.quotas.take_request(access, headers)
    assert headers == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "30s",
        "anthropic-ratelimit-requests-limit": "2",
        "anthropic-ratelimit-requests-remaining": "1",
        "anthropic-ratelimit-requests-reset": headers["anthropic-ratelimit-requests-reset"],
    }
    reset_at = datetime.strptime(headers["anthropic-ratelimit-requests-reset"], "%Y-%m-%dT%H:%M:%S%z")
    assert 30.0 <= reset_at.timestamp() - world.clock.wall_s() < 31.0
    await world.quotas.take_request(access, headers)
    with pytest.raises(RateLimited, match=r"2 requests per minute; 0 are left") as caught:
        await world.quotas.take_request(access, headers)
    assert caught.value.retry_after_s == 30.0
    await world.clock.advance(30.0)
    await world.quotas.take_request(access, headers)
    assert world.readings()[catalogue.RATE_LIMITED.name, ("requests",)] == 1


async def test_tokens_are_reserved_then_settled_by_use() -> None:
    world = World()
    key = await world.new_key(tokens_per_minute=600)
    access, headers = await world.identify(key), dict[str, str]()
    charge = world.quotas.charge(access, headers)
    await charge.reserve(200, [5000, 50])
    assert headers["x-ratelimit-remaining-tokens"] == "250", "an answer reserves 100 tokens at most"
    charge.settle(Usage(requests=1, prompt_tokens=200, output_tokens=20, cached_tokens=64))
    await world.quotas.drain(1.0)
    assert (await world.report(key)).usage == Usage(requests=1, prompt_tokens=200, output_tokens=20, cached_tokens=64)
    with pytest.raises(RateLimited) as caught:
        await world.quotas.charge(access, headers).reserve(381, [])
    assert headers["x-ratelimit-remaining-tokens"] == "380"
    assert caught.value.retry_after_s == pytest.approx(0.1)
    longer = world.quotas.charge(access, headers)
    await longer.reserve(280, [100])
    longer.settle(Usage(requests=1, prompt_tokens=280, output_tokens=700))
    await world.quotas.drain(1.0)
    with pytest.raises(RateLimited) as caught:
        await world.quotas.charge(access, headers).reserve(1, [])
    assert caught.value.retry_after_s == pytest.approx(60.1), "it is 600 in debt"
    assert (headers["x-ratelimit-remaining-tokens"], headers["x-ratelimit-reset-tokens"]) == ("0", "120s")


async def test_a_prompt_that_no_minute_has_room_for_is_not_worth_another_try() -> None:
    world = World()
    access = await world.identify(await world.new_key(tokens_per_minute=100))
    with pytest.raises(InvalidRequest, match="the prompt has 101 tokens, and this API key may use 100 per minute"):
        await world.quotas.charge(access, {}).reserve(101, [1])
    await world.quotas.charge(access, {}).reserve(100, [1000])


@pytest.mark.parametrize("is_open", [True, False])
async def test_without_the_store_limits_degrade_as_wanted_and_recover(
    is_open: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(is_open=is_open)
    key = await world.new_key(requests_per_minute=1, tokens_per_minute=1000)
    access, headers = await world.identify(key), dict[str, str]()
    world.store.away = True
    for _ in range(5):
        charge = world.quotas.charge(access, headers)
        if is_open:
            await world.quotas.take_request(access, headers)
            await charge.reserve(10, [10])
        else:
            with pytest.raises(StoreUnavailable) as caught:
                await world.quotas.take_request(access, headers)
            assert caught.value.retry_after_s == 1.0
    assert headers == {}, "nothing is known of the limits"
    charge = world.quotas.charge(access, headers)
    charge.settle(Usage(requests=1, prompt_tokens=10, output_tokens=5))
    await world.quotas.drain(1.0)
    readings = world.readings()
    assert readings[catalogue.TENANT_STORE_UP.name, ()] == 0
    assert readings[catalogue.RATE_UNCHECKED.name, ()] == (10 if is_open else 5)
    assert [record.getMessage() for record in caplog.records] == ["Redis does not serve; limits are not enforced"]
    world.store.away = False
    await world.clock.advance(RETRY_S)
    await world.quotas.take_request(access, headers)
    with pytest.raises(RateLimited):
        await world.quotas.take_request(access, headers)
    await world.quotas.drain(1.0)
    assert (await world.report(key)).usage.tokens == 15, "use is counted once the store is back"
    assert world.readings()[catalogue.TENANT_STORE_UP.name, ()] == 1
    assert len(caplog.records) == 2


async def test_use_is_counted_once_although_an_answer_was_lost() -> None:
    world = World()
    key = await world.new_key()
    access = await world.identify(key)
    world.store.lost_answer = True
    world.quotas.charge(access, {}).settle(Usage(requests=1, prompt_tokens=3))
    await world.quotas.drain(1.0)
    world.store.lost_answer = False
    world.quotas.charge(access, {}).settle(Usage(requests=1, prompt_tokens=4))
    await world.clock.advance(RETRY_S)
    await world.quotas.drain(1.0)
    assert (await world.report(key)).usage == Usage(requests=2, prompt_tokens=7)


async def test_use_is_counted_although_the_last_write_begins_during_another_one() -> None:
    world = World()
    key = await world.new_key()
    access = await world.identify(key)
    world.quotas.charge(access, {}).settle(Usage(requests=1, prompt_tokens=3))
    world.store.settle_s = iter((1.0, 2.0, 10.0))
    running = asyncio.create_task(world.quotas.run())
    await world.clock.advance(SETTLE_INTERVAL_S)
    world.quotas.charge(access, {}).settle(Usage(requests=1, prompt_tokens=4))
    draining = asyncio.create_task(world.quotas.drain(60.0))
    while not draining.done():
        await world.clock.advance(0.1)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (await world.report(key)).usage == Usage(requests=2, prompt_tokens=7)


async def test_metrics_have_few_tenants_and_no_key() -> None:
    world = World()
    keys = [await world.new_key(f"tenant-{number}") for number in range(LABELS_MAX + 5)]
    for key in keys:
        world.quotas.charge(await world.identify(key), {}).settle(Usage(requests=1, prompt_tokens=2))
    tokens = {labels: value for (name, labels), value in world.readings().items() if name.startswith("baton_tenant_t")}
    assert tokens["other", "prompt"] == 10
    assert len({tenant for tenant, _ in tokens}) == LABELS_MAX + 1
    assert not any(key in str(tokens) or key_id(digest_of(key)) in str(tokens) for key in keys)


# ---------------------------------------------------------------- settings and flags


def test_the_flags_of_a_key_become_its_rights() -> None:
    flags = {"models": "a, b", "allow": "set-tenant,chat-template", "tokens_per_minute": "100", "weight": "2.5"}
    assert rights_of(flags) == Tenant(
        models=("a", "b"),
        permissions=frozenset({Permission.SET_TENANT, Permission.CHAT_TEMPLATE}),
        tokens_per_minute=100,
        weight=2.5,
    )
    for wrong in ({"allow": "fly"}, {"weight": "0"}, {"tokens_per_minute": "-1"}, {"priority": "8"}):
        with pytest.raises(InvalidRequest):
            rights_of(wrong)
    with pytest.raises(InvalidRequest, match=r"'fly'.*choose permissions from share-prefix-cache, set-tenant, "):
        rights_of({"allow": "fly"})
    for name, flag in (("requests_per_minute", "--requests-per-minute"), ("tokens_per_minute", "--tokens-per-minute")):
        with pytest.raises(InvalidRequest, match=f"{flag} is 0, .*: leave the flag out for no limit"):
            rights_of({name: "0"})


@pytest.mark.parametrize("tenant", ["", "a b", "ü", "x" * 65])
async def test_the_name_of_a_tenant_is_plain(tenant: str) -> None:
    with pytest.raises(InvalidRequest, match="tenant's name"):
        await create(World().store, tenant=tenant, rights=Tenant())


def load(*flags: str) -> Settings:
    return config.load(Settings, service="gateway", argv=flags, environ={})


def test_stored_keys_need_redis_and_close_a_gateway() -> None:
    assert load("--host", "0.0.0.0", "--stored-keys").stored_keys
    with pytest.raises(ConfigurationError, match="redis_url"):
        load("--stored-keys", "--redis-url", "")
    limited = f'{{"{tenant_of("one")}": {{"tokens_per_minute": 5, "permissions": ["set-priority"]}}}}'
    assert load("--api-keys", "one", "--tenants", limited).tenants[tenant_of("one")].tokens_per_minute == 5
    with pytest.raises(ConfigurationError, match="redis_url"):
        load("--api-keys", "one", "--tenants", limited, "--redis-url", "")
