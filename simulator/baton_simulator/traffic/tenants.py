"""Traffic of several tenants: prompts that share nothing, so that caches decide nothing, at random times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, takewhile
from random import Random
from typing import Final

from baton_simulator.capacity import at_load
from baton_simulator.replay import Fleet
from baton_simulator.traffic.skewed import BLOCK_TOKENS, log_uniform
from baton_simulator.traffic.trace import Request, Trace

PROMPT_TOKENS: Final = (512, 8192)
OUTPUT_TOKENS: Final = (16, 512)
"""Both are log-uniform between these."""
SAMPLE: Final = 2000
"""Requests by which a fleet's capacity is found."""


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    weight: float
    load: float
    """Demand, as a share of what the fleet could do."""


def generate(tenants: Sequence[Tenant], fleet: Fleet, duration_s: float, seed: int) -> Trace:
    """Return the requests of all tenants. Those of one do not depend on who else there is."""
    full_per_s = requests_per_s(fleet, seed)
    requests = [
        request
        for tenant in tenants
        for request in _requests(tenant, full_per_s * tenant.load, duration_s, Random(f"{seed} {tenant.name}"))
    ]
    requests.sort(key=lambda request: request.at_s)
    ids = count()
    own = (tuple(next(ids) for _ in range(request.prompt_tokens // BLOCK_TOKENS)) for request in requests)
    return Trace(
        "tenants",
        BLOCK_TOKENS,
        [replace(request, blocks=blocks) for request, blocks in zip(requests, own, strict=True)],
    )


def requests_per_s(fleet: Fleet, seed: int) -> float:
    """Return how many requests per second the fleet could do at best."""
    sample = _requests(Tenant("", 1.0, 1.0), 1.0, SAMPLE, Random(f"{seed} sample"))
    stretched = at_load(Trace("sample", BLOCK_TOKENS, sample), fleet, 1.0).requests
    return len(stretched) / stretched[-1].at_s


def _requests(tenant: Tenant, per_s: float, duration_s: float, random: Random) -> list[Request]:
    times = accumulate(random.expovariate(per_s) for _ in count())
    return [
        Request(
            at_s,
            (),
            log_uniform(PROMPT_TOKENS, random),
            log_uniform(OUTPUT_TOKENS, random),
            tenant=tenant.name,
            weight=tenant.weight,
        )
        for at_s in takewhile(lambda at_s: at_s < duration_s, times)
    ]
