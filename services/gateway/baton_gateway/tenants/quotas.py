"""Limits per minute and usage of API keys, over all gateways.

A request is taken from its key's bucket as it arrives. Its tokens are reserved before it is placed, by an estimate, and
settled when its answers have ended: refunds and further charges are written in batches, off the path of answers.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from datetime import UTC, datetime
from itertools import islice
from typing import Final, get_args

from baton.clock import Clock
from baton.errors import InvalidRequest, RateLimited, StoreUnavailable
from baton.telemetry import Reading, catalogue
from baton_gateway.tenants.bucket import cost_us, left, wait_s
from baton_gateway.tenants.keys import Usage
from baton_gateway.tenants.outage import WatchedStore
from baton_gateway.tenants.store import Limit, Settlement
from baton_gateway.tenants.tenant import Access

SETTLE_INTERVAL_S: Final = 0.1
BATCH_KEYS_MAX: Final = 256
UNSETTLED_KEYS_MAX: Final = 10_000
"""Keys with unwritten settlements, while the store is away; those of further keys are lost."""
LABELS_MAX: Final = 100
"""Tenants with metrics of their own; all others are `other`."""

_STATED: Final = ("limit", "remaining", "reset")
OPENAI_LIMIT_HEADERS: Final = tuple(f"x-ratelimit-{what}-{limit}" for limit in get_args(Limit) for what in _STATED)
ANTHROPIC_LIMIT_HEADERS: Final = tuple(
    f"anthropic-ratelimit-{limit}-{what}" for limit in get_args(Limit) for what in _STATED
)

Headers = MutableMapping[str, str]


class Quotas:
    """Limits and usage, as one gateway enforces and counts them."""

    def __init__(
        self,
        *,
        store: WatchedStore | None,
        clock: Clock,
        new_id: Callable[[], str],
        output_tokens_reserved: int,
        open_without_store: bool,
    ) -> None:
        self._store = store
        self._clock = clock
        self.output_tokens_reserved = output_tokens_reserved
        self._open_without_store = open_without_store
        self._unsettled: dict[str, Settlement] = {}
        self._writer = new_id()
        self._batches = 0
        self._batch: tuple[int, dict[str, Settlement]] | None = None
        """Batch that is being written, or whose answer was lost, with its number."""
        self._writing = asyncio.Lock()
        self._refusals = Counter[str]()
        self._unchecked = 0
        self._tokens = Counter[tuple[str, str]]()
        self._labels: set[str] = set()

    async def take_request(self, access: Access, headers: Headers) -> None:
        """Take one request. Raises RateLimited and StoreUnavailable.

        `headers` get those that state the limit, under the names of both APIs.
        """
        if access.rights.requests_per_minute:
            await self._take(access, "requests", access.rights.requests_per_minute, 1, headers)

    def charge(self, access: Access, headers: Headers) -> Charge:
        """Return the tokens of one request; `headers` get those that state the limit."""
        return Charge(self, access, headers)

    async def reserve(self, access: Access, tokens: int, headers: Headers) -> int | None:
        """Take tokens and return their cost; None: limits cannot be checked. Raises RateLimited, StoreUnavailable."""
        return await self._take(access, "tokens", access.rights.tokens_per_minute, tokens, headers)

    async def _take(self, access: Access, limit: Limit, per_minute: int, amount: int, headers: Headers) -> int | None:
        assert self._store is not None, "the settings refuse limits without a store"
        cost = cost_us(amount, per_minute)
        try:
            taken = await self._store.ask(lambda tenants: tenants.take(limit, access.key, cost))
        except StoreUnavailable as error:
            self._unchecked += 1
            if self._open_without_store:
                return None
            raise StoreUnavailable("the limits of API keys cannot be checked now", retry_after_s=1.0) from error
        rest = left(taken, per_minute)
        for what, stated in (("limit", per_minute), ("remaining", rest)):
            headers[f"x-ratelimit-{what}-{limit}"] = headers[f"anthropic-ratelimit-{limit}-{what}"] = str(stated)
        headers[f"x-ratelimit-reset-{limit}"] = f"{math.ceil(taken.full_in_us / 1000) / 1000:g}s"
        full_at = datetime.fromtimestamp(math.ceil(self._clock.wall_s() + taken.full_in_us / 1e6), UTC)
        headers[f"anthropic-ratelimit-{limit}-reset"] = f"{full_at:%Y-%m-%dT%H:%M:%SZ}"
        if not taken.fits:
            self._refusals[limit] += 1
            again_s = wait_s(taken, cost)
            raise RateLimited(
                f"this API key may use {per_minute} {limit} per minute; {rest} are left, and this request takes "
                f"{amount}: try again in {again_s:.1f} s",
                retry_after_s=again_s,
            )
        return cost

    def settle(self, access: Access, usage: Usage, reserved_us: int | None) -> None:
        """Count what a request has used. `reserved_us`: the cost that was taken for its tokens."""
        label = self._label(access.label)
        self._tokens[label, "prompt"] += usage.prompt_tokens
        self._tokens[label, "output"] += usage.output_tokens
        self._tokens[label, "cached"] += usage.cached_tokens
        if not access.key or (access.key not in self._unsettled and len(self._unsettled) >= UNSETTLED_KEYS_MAX):
            return
        change_us = 0
        if reserved_us is not None:
            change_us = cost_us(usage.tokens, access.rights.tokens_per_minute) - reserved_us
        unsettled = self._unsettled.get(access.key, Settlement())
        self._unsettled[access.key] = unsettled + Settlement(usage, change_us)

    def _label(self, label: str) -> str:
        if label not in self._labels and len(self._labels) >= LABELS_MAX:
            return "other"
        self._labels.add(label)
        return label

    async def run(self) -> None:
        """Write settlements, for ever."""
        while True:
            await self._clock.sleep(SETTLE_INTERVAL_S)
            await self._write()

    async def drain(self, timeout_s: float) -> None:
        """Write the rest, if the store serves."""
        try:
            async with self._clock.timeout(timeout_s):
                await self._write()
        except TimeoutError:
            pass

    async def _write(self) -> None:
        # The last write may begin while another one waits for its answer: the later end would drop the next batch.
        async with self._writing:
            await self._write_batches()

    async def _write_batches(self) -> None:
        store = self._store
        while store is not None and (self._batch is not None or self._unsettled):
            if self._batch is None:
                chosen = dict(islice(self._unsettled.items(), BATCH_KEYS_MAX))
                self._unsettled = dict(islice(self._unsettled.items(), BATCH_KEYS_MAX, None))
                self._batches += 1
                self._batch = (self._batches, chosen)
            number, settlements = self._batch
            try:
                await store.ask(
                    lambda tenants, number=number, batch=settlements: tenants.settle(self._writer, number, batch)
                )
            except StoreUnavailable:
                return  # The same batch is tried again: it may have been written.
            self._batch = None

    def readings(self) -> Iterator[Reading]:
        for limit, count in self._refusals.items():
            yield Reading(catalogue.RATE_LIMITED, count, (limit,))
        yield Reading(catalogue.RATE_UNCHECKED, self._unchecked)
        if self._store is not None:
            yield Reading(catalogue.TENANT_STORE_UP, not self._store.is_away)
        for labels, count in self._tokens.items():
            yield Reading(catalogue.TENANT_TOKENS, count, labels)


class Charge:
    """Tokens of one request: reserved once, then settled once."""

    def __init__(self, quotas: Quotas, access: Access, headers: Headers) -> None:
        self._quotas = quotas
        self._access = access
        self._headers = headers
        self._reserved_us: int | None = None

    @property
    def is_limited(self) -> bool:
        return self._access.rights.tokens_per_minute > 0

    async def reserve(self, prompt_tokens: int, outputs_tokens_max: list[int]) -> None:
        """Reserve the prompt and an estimate of each output, which may get longer.

        Raises RateLimited, StoreUnavailable, and InvalidRequest for a prompt that no minute has room for.
        """
        per_minute = self._access.rights.tokens_per_minute
        if prompt_tokens > per_minute:
            raise InvalidRequest(
                f"the prompt has {prompt_tokens} tokens, and this API key may use {per_minute} per minute"
            )
        estimate = prompt_tokens + sum(min(most, self._quotas.output_tokens_reserved) for most in outputs_tokens_max)
        self._reserved_us = await self._quotas.reserve(self._access, min(estimate, per_minute), self._headers)

    def settle(self, usage: Usage) -> None:
        """Count what was used."""
        if self._access.label:
            self._quotas.settle(self._access, usage, self._reserved_us)
