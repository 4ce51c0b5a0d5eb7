"""Who sends a request: checks its API key, against the settings and the stored records."""

from __future__ import annotations

import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from baton.clock import Clock
from baton.errors import StoreUnavailable, Unauthenticated
from baton_gateway.tenants.keys import KeyRecord, digest_of, key_id
from baton_gateway.tenants.outage import WatchedStore
from baton_gateway.tenants.tenant import TENANT_HEADER, Access, Permission, Tenant, tenant_of

CACHED_MAX: Final = 10_000
"""Records kept in memory; the least recently used make room."""
STATIC_LABEL: Final = "settings"
"""Tenant in metrics of all keys in the settings, whose digests would help to guess them."""
OPEN: Final = Access()


class Keyring:
    """The API keys of a deployment. A revoked key is refused once `kept_s` have passed."""

    def __init__(
        self,
        api_keys: tuple[str, ...],
        tenants: Mapping[str, Tenant],
        *,
        store: WatchedStore | None,
        clock: Clock,
        kept_s: float,
        open_without_store: bool,
    ) -> None:
        """`open_without_store`: records that were read before go on to hold while the store is away."""
        self._static = [(digest_of(key), static_access(key, tenants.get(tenant_of(key), Tenant()))) for key in api_keys]
        self._store = store
        self._clock = clock
        self._kept_s = kept_s
        self._open_without_store = open_without_store
        self._kept: OrderedDict[str, tuple[KeyRecord, float]] = OrderedDict()
        """Records by id, and until when each holds."""

    async def identify(self, headers: Mapping[str, str]) -> Access:
        """Return the access of a request with these headers.

        Raises Unauthenticated, StoreUnavailable if its key cannot be checked, and, if they name a tenant, Forbidden
        and InvalidRequest.
        """
        if not self._static and self._store is None:
            return OPEN
        presented = _presented(headers)
        digest = digest_of(presented)
        # All keys are compared, so that the time does not depend on which one matches.
        matches = [access for known, access in self._static if hmac.compare_digest(digest, known)]
        if matches:
            access, salt_key = matches[0], static_salt(presented)
        elif self._store is not None and (record := await self._find(self._store, digest)) is not None:
            access, salt_key = record.access, record.salt_key
        else:
            raise Unauthenticated("the API key is not known to this server, or was revoked")
        named = headers.get(TENANT_HEADER)
        return access if named is None else access.on_behalf_of(named, salt_key)

    async def _find(self, store: WatchedStore, digest: bytes) -> KeyRecord | None:
        """Return the record that admits the key with this digest."""
        name = key_id(digest)
        record, until_s = self._kept.get(name, (None, 0.0))
        if record is None or self._clock.now_s() >= until_s:
            try:
                record = await store.ask(lambda tenants: tenants.find(name))
            except StoreUnavailable as error:
                if record is None or not self._open_without_store:
                    raise StoreUnavailable("API keys cannot be checked now", retry_after_s=1.0) from error
            else:
                self._keep(name, record)
        return record if record is not None and record.admits(digest) else None

    def _keep(self, name: str, record: KeyRecord | None) -> None:
        # Unknown keys are not kept: anyone can send any number of them.
        self._kept.pop(name, None)
        if record is not None:
            self._kept[name] = (record, self._clock.now_s() + self._kept_s)
            if len(self._kept) > CACHED_MAX:
                self._kept.popitem(last=False)


def static_access(key: str, rights: Tenant) -> Access:
    """Return the access of a key in the settings. It is its own tenant."""
    shares = Permission.SHARE_PREFIX_CACHE in rights.permissions
    return Access(
        tenant=tenant_of(key),
        salt="" if shares else static_salt(key),
        rights=rights,
        # Limits are kept in the store; usage of these keys is not, as they have no record there.
        key=key_id(digest_of(key)) if rights.is_limited else "",
        label=STATIC_LABEL,
    )


def static_salt(key: str) -> str:
    """Return the cache salt of a key in the settings. Its digest, which is no secret, does not tell it."""
    return hashlib.sha256(b"cache salt " + key.encode()).hexdigest()[:32]


def _presented(headers: Mapping[str, str]) -> str:
    """Return the API key of a request, as OpenAI's or Anthropic's clients send it. Raises Unauthenticated."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    if key := headers.get("x-api-key", "").strip():
        return key
    raise Unauthenticated("this server asks for an API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")
