"""Keyring and quotas of a gateway, by its settings."""

from __future__ import annotations

from baton.node.ports import Ports
from baton.redis import RedisConnection
from baton_gateway.config import Settings, WithoutRedis
from baton_gateway.tenants.keyring import Keyring
from baton_gateway.tenants.outage import WatchedStore
from baton_gateway.tenants.quotas import Quotas
from baton_gateway.tenants.store import RedisTenantStore


def tenancy(settings: Settings, redis: RedisConnection | None, ports: Ports) -> tuple[Keyring, Quotas]:
    """Return who may send requests, and how many."""
    is_open = settings.without_redis is WithoutRedis.OPEN
    store = None
    if redis is not None:
        limits = "are not enforced" if is_open else "cannot be checked, so requests under them are answered 503"
        keys = "that were read before go on to work" if is_open else "are answered 503"
        store = WatchedStore(
            RedisTenantStore(redis, prefix=settings.redis_prefix),
            ports.clock,
            f"meanwhile limits of API keys {limits}, and stored keys {keys} (--without-redis {settings.without_redis})",
        )
    keyring = Keyring(
        settings.api_keys,
        settings.tenants,
        store=store if settings.stored_keys else None,
        clock=ports.clock,
        kept_s=settings.keys_kept_s,
        open_without_store=is_open,
    )
    quotas = Quotas(
        store=store,
        clock=ports.clock,
        new_id=ports.new_id,
        output_tokens_reserved=settings.output_tokens_reserved,
        open_without_store=is_open,
    )
    return keyring, quotas
