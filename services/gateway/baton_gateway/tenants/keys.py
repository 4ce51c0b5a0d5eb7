"""API keys that are made at run time, and their records. Pure.

key     sk-baton-, then 64 hexadecimal digits       shown once, kept nowhere
digest  SHA-256 of the key                          a fast hash is enough, as nobody can guess a random key
id      the digest's first 16 hexadecimal digits    names the key for operators
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

import msgspec

from baton_gateway.tenants.tenant import Access, Permission, Tenant, TenantName, tenant_salt

KEY_PREFIX: Final = "sk-baton-"
ID_CHARACTERS: Final = 16


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of an API key."""

    digest: bytes
    tenant: TenantName
    rights: Tenant
    created_s: float
    """Seconds since 1970."""
    revoked_s: float | None = None
    salt_key: str
    """Secret from which all tenants' salts are made; the same in all records of a deployment."""

    @property
    def id(self) -> str:
        return key_id(self.digest)

    def admits(self, digest: bytes) -> bool:
        """Tell whether the key with this digest is the record's and has not been revoked."""
        return hmac.compare_digest(digest, self.digest) and self.revoked_s is None

    @property
    def salt(self) -> str:
        shares = Permission.SHARE_PREFIX_CACHE in self.rights.permissions
        return "" if shares else tenant_salt(self.salt_key, self.tenant)

    @property
    def access(self) -> Access:
        return Access(tenant=self.tenant, salt=self.salt, rights=self.rights, key=self.id, label=self.tenant)


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a key has used, and in how many requests."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Part of `prompt_tokens` that was cached."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
        )

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def key_id(digest: bytes) -> str:
    return digest.hex()[:ID_CHARACTERS]
