"""Bytes of memory that tenants share. Pure."""

from __future__ import annotations

from collections import Counter


class ByteShares:
    """A bounded number of bytes, of which each tenant gets a share.

    A tenant's first body needs room only. With the next ones it may hold as much as stays free: alone half of all, one
    of two tenants a third. So a tenant that comes later finds room. Requests without a tenant share the whole.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held_bytes = Counter[str]()
        self.held_bytes = 0
        """Bytes that all tenants hold together."""

    def fits(self, tenant: str, more_bytes: int, *, of_bytes: int = 0) -> bool:
        """Return whether a tenant may take more bytes, for a body that holds `of_bytes` already."""
        free_bytes = self._bytes_max - self.held_bytes - more_bytes
        others_bytes = self._held_bytes[tenant] - of_bytes
        if not (tenant and others_bytes):
            return free_bytes >= 0
        return self._held_bytes[tenant] + more_bytes <= free_bytes

    def take(self, tenant: str, more_bytes: int) -> None:
        """Count bytes as the tenant's; negative ones are given back."""
        self.held_bytes += more_bytes
        self._held_bytes[tenant] += more_bytes
        if not self._held_bytes[tenant]:
            del self._held_bytes[tenant]
