"""Objectives of a request and its rank among others, from its headers, its tenant's settings and the defaults. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from baton.errors import InvalidRequest
from baton.messages.placement import PRIORITY_NEW
from baton_gateway.tenants.tenant import MS_MAX, MS_MIN, PRIORITY_MAX, Permission, Tenant

TTFT_HEADER: Final = "x-baton-ttft-ms"
TPOT_HEADER: Final = "x-baton-tpot-ms"
PRIORITY_HEADER: Final = "x-baton-priority"
NUMBER: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Objectives of one request, and its rank among others."""

    ttft_s: float
    tpot_s: float
    admits_by_ttft: bool = False
    """Whether the request is refused if its TTFT objective cannot be met."""
    admits_by_tpot: bool = False
    priority: int = PRIORITY_NEW
    weight: float = 1.0


def objectives_of(headers: Mapping[str, str], tenant: Tenant, default: Objectives) -> Objectives:
    """Return a request's objectives. Headers come before the tenant's settings, these before the defaults.

    A request claims an earlier class than its tenant's by permission only. Raises InvalidRequest that names the header.
    """
    ttft_ms = _number(headers, TTFT_HEADER, MS_MIN, MS_MAX) or tenant.ttft_ms
    tpot_ms = _number(headers, TPOT_HEADER, MS_MIN, MS_MAX) or tenant.tpot_ms
    priority = _number(headers, PRIORITY_HEADER, PRIORITY_NEW, PRIORITY_MAX)
    if priority is not None and priority != int(priority):
        raise _malformed(PRIORITY_HEADER, PRIORITY_NEW, PRIORITY_MAX)
    earliest = PRIORITY_NEW if priority and Permission.SET_PRIORITY in tenant.permissions else tenant.priority
    return Objectives(
        ttft_s=default.ttft_s if ttft_ms is None else ttft_ms / 1000,
        tpot_s=default.tpot_s if tpot_ms is None else tpot_ms / 1000,
        admits_by_ttft=ttft_ms is not None or default.admits_by_ttft,
        admits_by_tpot=tpot_ms is not None or default.admits_by_tpot,
        priority=max(int(priority or 0), earliest),
        weight=tenant.weight,
    )


def _number(headers: Mapping[str, str], header: str, least: float, most: float) -> float | None:
    if (text := headers.get(header)) is None:
        return None
    if not NUMBER.fullmatch(text) or not least <= float(text) <= most:
        raise _malformed(header, least, most)
    return float(text)


def _malformed(header: str, least: float, most: float) -> InvalidRequest:
    kind = "whole number" if header == PRIORITY_HEADER else "number of milliseconds"
    return InvalidRequest(f"`{header}` must be a {kind} from {least:g} to {most:.0f}", param=header)
