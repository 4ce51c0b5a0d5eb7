"""Loans of KV prefixes between workers, asked for and granted over the bus; the KV moves between the pools' agents.

The borrower asks the lender that its placement names, before its attempt enters the engine. It is never worse off than
without: whatever goes wrong, and whatever takes longer than to compute these tokens, ends the loan and not the attempt.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from baton import subjects
from baton.blocks import BLOCK_TOKENS_DEFAULT, ID_BYTES, hash_blocks, root_key
from baton.bus import Bus
from baton.clock import Clock
from baton.connectors.pool_lending import Loan
from baton.engines.engine import Engine, EngineFacts, EngineRequest
from baton.errors import BatonError, MalformedMessage
from baton.messages.attempts import Busy, Lend, Lent
from baton.messages.base import Context, pack_tokens
from baton.messages.workers import RANKS_MAX
from baton.transfer import KEY_BYTES, lease_key
from baton.worker.rates import Rates

_log = logging.getLogger("baton.worker")

ASK_SHARE: Final = 0.5
"""Share of the time that a loan may take in all within which the lender has to answer."""


class Loans:
    def __init__(
        self, *, bus: Bus, clock: Clock, engine: Engine, facts: EngineFacts, rates: Rates, worker: str
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._engine = engine
        self._facts = facts
        self._rates = rates
        self._worker = worker

    async def answer(self, lend: Lend) -> Lent | Busy:
        """Lend what the pool holds. Raises MalformedMessage for what no engine can lend, and EngineFailed."""
        _check(lend)
        tokens = 0
        if self._facts.pool_agents:
            tokens = await self._engine.lend(lend.key, lend.blocks, lend.sink_ranks)
        if not tokens:
            return Busy(worker=self._worker, reason="loan", detail="the pool holds nothing of it, or lends too much")
        return Lent(worker=self._worker, tokens=tokens, agents=self._facts.pool_agents)

    async def borrow(self, lender: str, request: EngineRequest, cached_tokens: int) -> EngineRequest:
        """Return the request with a loan, or as it is if there is none in time.

        `cached_tokens`: what this engine is expected to have of the prompt already.
        """
        if not lender or not self._facts.pool_agents:
            return request
        began_s, tokens = self._clock.now_s(), request.tokens
        worth_s = self._rates.prefill_s(len(tokens) - cached_tokens, len(tokens))
        key = lease_key(f"{request.request}/loan", request.attempt, tokens)
        root = root_key(self._facts.model_digest, salt=request.cache_salt)
        lend = Lend(
            context=Context(request=request.request, attempt=request.attempt, budget_s=worth_s),
            key=key,
            blocks=hash_blocks(root, pack_tokens(tokens), BLOCK_TOKENS_DEFAULT),
            sink_ranks=len(self._facts.pool_agents),
        )
        try:
            answer = await self._bus.request(subjects.task(lender), lend, timeout_s=worth_s * ASK_SHARE)
        except BatonError as error:
            _log.info("worker %s lends nothing: %s", lender, error)
            return request
        if not isinstance(answer, Lent):
            return request
        # The time that computing would take for what is lent, from the moment it could have begun.
        lent_tokens = min(answer.tokens, len(tokens)) - cached_tokens
        if lent_tokens <= 0:
            return request
        deadline_s = began_s + self._rates.prefill_s(lent_tokens, min(answer.tokens, len(tokens)))
        loan = Loan(key=key, endpoints=answer.agents, tokens=answer.tokens, lender=answer.worker, deadline_s=deadline_s)
        return replace(request, loan=loan)


def _check(lend: Lend) -> None:
    # The engine's scheduler acts on it between two steps of all requests, so what would stop it there ends here.
    if len(lend.key) != KEY_BYTES:
        raise MalformedMessage(f"the key of a loan has {KEY_BYTES} bytes, not {len(lend.key)}")
    if len(lend.blocks) % ID_BYTES:
        raise MalformedMessage(f"{len(lend.blocks)} bytes are no whole number of block ids")
    if not 0 <= lend.sink_ranks <= RANKS_MAX:
        raise MalformedMessage(f"a borrower of {lend.sink_ranks} ranks; there are at most {RANKS_MAX}")
