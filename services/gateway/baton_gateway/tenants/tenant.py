"""Rights of an API key, and the access that a request has by one. Pure."""

from __future__ import annotations

import hashlib
import re
from enum import StrEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from baton.errors import Forbidden, InvalidRequest
from baton.messages.placement import PRIORITIES, PRIORITY_NEW, WEIGHT_MAX, WEIGHT_MIN

MS_MIN: Final = 1.0
MS_MAX: Final = 600_000.0
PRIORITY_MAX: Final = PRIORITIES - 1
TENANT_CHARACTERS: Final = 32
PER_MINUTE_MAX: Final = 1_000_000_000
MODELS_MAX: Final = 256
TENANT_HEADER: Final = "x-baton-tenant"
TENANT_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

Milliseconds = Annotated[float, Meta(ge=MS_MIN, le=MS_MAX)]
Priority = Annotated[int, Meta(ge=PRIORITY_NEW, le=PRIORITY_MAX)]
PerMinute = Annotated[int, Meta(ge=0, le=PER_MINUTE_MAX)]
TenantName = Annotated[str, Meta(pattern=TENANT_NAME)]


class Permission(StrEnum):
    """What a key may do beyond asking for answers."""

    SHARE_PREFIX_CACHE = "share-prefix-cache"
    """Use the prefix cache that all keys with this permission share, instead of its tenant's own."""
    SET_TENANT = "set-tenant"
    """Name the tenant of a request by `x-baton-tenant`, as a proxy for several tenants does."""
    SET_PRIORITY = "set-priority"
    """Claim an earlier class than the key's own by `x-baton-priority`."""
    CHAT_TEMPLATE = "chat-template"
    """Send a chat template with a request."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one tenant or key; what is None is the deployment's default."""

    weight: Annotated[float, Meta(ge=WEIGHT_MIN, le=WEIGHT_MAX)] = 1.0
    """Share of the workers while requests wait, relative to other tenants."""
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    priority: Priority = PRIORITY_NEW
    """Earliest class of its requests; 1 comes first."""
    models: Annotated[tuple[str, ...], Meta(max_length=MODELS_MAX)] = ()
    """Models that it may use; empty: all."""
    requests_per_minute: PerMinute = 0
    """0: no limit."""
    tokens_per_minute: PerMinute = 0
    """Limit of prompt and output tokens together; 0: none."""
    permissions: frozenset[Permission] = frozenset()

    @property
    def is_limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute)


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What a request may do, by the API key that it carries. The default is that of a deployment without keys."""

    tenant: str = ""
    """Owner of the request, by which schedulers share out workers."""
    salt: str = ""
    """Cache salt of the tenant; empty: it shares the prefix cache."""
    rights: Tenant = Tenant()
    key: str = ""
    """Id of the key, under which limits and usage are kept; empty: neither is."""
    label: str = ""
    """Tenant in metrics: the key's own, never one that a header names."""

    def may(self, permission: Permission) -> bool:
        return permission in self.rights.permissions

    def may_use(self, model: str) -> bool:
        return not self.rights.models or model in self.rights.models

    def check_model(self, model: str) -> None:
        """Raise Forbidden if the key has no right to the model, whether or not that exists."""
        if not self.may_use(model):
            raise Forbidden(f"this API key may not use the model `{model[:200]}`", param="model")

    def on_behalf_of(self, tenant: str, salt_key: str) -> Access:
        """Return the access of a request whose header names its tenant. Raises Forbidden and InvalidRequest."""
        if not self.may(Permission.SET_TENANT):
            raise Forbidden(f"this API key may not name a tenant with `{TENANT_HEADER}`", param=TENANT_HEADER)
        if not re.fullmatch(TENANT_NAME, tenant):
            said = f"`{TENANT_HEADER}` must be 1 to 64 letters, digits, dots, dashes or underscores"
            raise InvalidRequest(said, param=TENANT_HEADER)
        salt = tenant_salt(salt_key, tenant) if self.salt else ""
        return msgspec.structs.replace(self, tenant=tenant, salt=salt)


def tenant_of(api_key: str) -> str:
    """Return the tenant of an API key in the settings: a digest."""
    return hashlib.sha256(api_key.encode()).hexdigest()[:TENANT_CHARACTERS]


def tenant_salt(salt_key: str, tenant: str) -> str:
    """Return the cache salt of a tenant, which cannot be guessed without `salt_key`."""
    return _keyed(salt_key, f"tenant {tenant}")


def request_salt(tenant: str, request: str) -> str:
    """Return the cache salt of a request, from its tenant's salt and its own `cache_salt`; each may be empty.

    The salt of another tenant cannot be had this way, as long as salts of tenants are secret.
    """
    return _keyed(tenant, f"request {request}") if tenant and request else tenant or request


def _keyed(key: str, text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16, key=key.encode()).hexdigest()
