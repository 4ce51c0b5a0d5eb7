"""Objectives of a request and its rank among others, from its headers, its tenant's settings and the defaults. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from baton.errors import InvalidRequest
from baton.messages.placement import PRIORITIES, PRIORITY_NEW, WEIGHT_MAX, WEIGHT_MIN

TTFT_HEADER: Final = "x-baton-ttft-ms"
TPOT_HEADER: Final = "x-baton-tpot-ms"
PRIORITY_HEADER: Final = "x-baton-priority"
MS_MIN: Final = 1.0
MS_MAX: Final = 600_000.0
PRIORITY_MAX: Final = PRIORITIES - 1
TENANT_CHARACTERS: Final = 32
NUMBER: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")

Milliseconds = Annotated[float, Meta(ge=MS_MIN, le=MS_MAX)]
Priority = Annotated[int, Meta(ge=PRIORITY_NEW, le=PRIORITY_MAX)]


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one tenant; what is None is the deployment's default."""

    weight: Annotated[float, Meta(ge=WEIGHT_MIN, le=WEIGHT_MAX)] = 1.0
    """Share of the workers while requests wait, relative to other tenants."""
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    priority: Priority = PRIORITY_NEW
    """Earliest class of its requests; 1 comes first."""


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


def tenant_of(api_key: str) -> str:
    """Return the tenant of an API key: a digest."""
    return hashlib.sha256(api_key.encode()).hexdigest()[:TENANT_CHARACTERS]


def objectives_of(headers: Mapping[str, str], tenant: Tenant, default: Objectives) -> Objectives:
    """Return a request's objectives. Headers come before the tenant's settings, these before the defaults.

    A request cannot claim an earlier class than its tenant's. Raises InvalidRequest that names the header.
    """
    ttft_ms = _number(headers, TTFT_HEADER, MS_MIN, MS_MAX) or tenant.ttft_ms
    tpot_ms = _number(headers, TPOT_HEADER, MS_MIN, MS_MAX) or tenant.tpot_ms
    priority = _number(headers, PRIORITY_HEADER, PRIORITY_NEW, PRIORITY_MAX)
    if priority is not None and priority != int(priority):
        raise _malformed(PRIORITY_HEADER, PRIORITY_NEW, PRIORITY_MAX)
    return Objectives(
        ttft_s=default.ttft_s if ttft_ms is None else ttft_ms / 1000,
        tpot_s=default.tpot_s if tpot_ms is None else tpot_ms / 1000,
        admits_by_ttft=ttft_ms is not None or default.admits_by_ttft,
        admits_by_tpot=tpot_ms is not None or default.admits_by_tpot,
        priority=max(int(priority or 0), tenant.priority),
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
