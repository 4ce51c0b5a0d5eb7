"""Loans between workers over the bus: granted, refused, late, and never a reason for an attempt to fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
import pytest

from baton import subjects
from baton.blocks import hash_blocks, root_key
from baton.bus import Delivery, MemoryBus, MemoryNetwork
from baton.clock import SystemClock
from baton.connectors.pool_lending import Loan
from baton.engines.engine import EngineFacts, EngineRequest, Leg
from baton.engines.scripted import ScriptedEngine
from baton.errors import MalformedMessage, Unavailable
from baton.messages.attempts import Busy, Lend, Lent, Sampling
from baton.messages.base import ErrorReport, Refused, pack_tokens
from baton.messages.codec import AnyMessage
from baton.worker.loans import Loans
from baton.worker.rates import Rates
from tests.harness.limits import HANG_S

FACTS = EngineFacts(
    engine="scripted",
    model_digest="digest",
    block_tokens=32,
    kv_blocks=100,
    kv_bytes_per_token=1,
    running_max=8,
    step_tokens_max=512,
    context_tokens_max=100_000,
    pool_agents=("127.0.0.1:1/01", "127.0.0.1:2/02"),
)
REQUEST = EngineRequest(
    request="r",
    attempt=3,
    leg=Leg.WHOLE,
    tokens=list(range(20_000)),
    sampling=Sampling(max_tokens=1),
    cache_salt="salt",
    budget_s=60.0,
)


class Lender(ScriptedEngine):
    """An engine whose pool lends a number of tokens."""

    lent_tokens = 0

    async def lend(self, key: bytes, blocks: bytes, sink_ranks: int) -> int:
        assert (len(key), sink_ranks) == (16, 2)
        return self.lent_tokens


def loans(bus: MemoryBus, facts: EngineFacts = FACTS, engine: Lender | None = None) -> Loans:
    return Loans(
        bus=bus,
        clock=SystemClock(),
        engine=engine or Lender(FACTS),
        facts=facts,
        rates=Rates(facts.step_tokens_max),
        worker="worker",
    )


async def borrow(
    answer: Callable[[Lend], Awaitable[AnyMessage | None]] | None, *, facts: EngineFacts = FACTS, cached_tokens: int = 0
) -> tuple[EngineRequest, list[Lend]]:
    """Return the request after a lender answered; without `answer` there is no lender."""
    network, asked = MemoryNetwork(), list[Lend]()
    borrower, lender = MemoryBus(network), MemoryBus(network)

    async def on_task(delivery: Delivery) -> None:
        assert isinstance(delivery.message, Lend)
        asked.append(delivery.message)
        assert answer is not None
        if (message := await answer(delivery.message)) is not None:
            await delivery.respond(message)

    if answer is not None:
        await lender.subscribe(subjects.task("lender"), on_task)
    try:
        return await loans(borrower, facts).borrow("lender", REQUEST, cached_tokens), asked
    finally:
        await borrower.close()
        await lender.close()


async def test_a_loan_is_asked_for_with_the_prefix_and_ends_when_computing_would_be_faster() -> None:
    async def lend(_: Lend) -> AnyMessage:
        return Lent(worker="lender", tokens=16_000, agents=("a", "b"))

    began_s = SystemClock().now_s()
    request, (asked,) = await borrow(lend)
    assert asked.blocks == hash_blocks(root_key("digest", salt="salt"), pack_tokens(REQUEST.tokens), 32)
    assert asked.sink_ranks == 2
    assert isinstance(request.loan, Loan)
    assert (request.loan.key, request.loan.tokens, request.loan.endpoints) == (asked.key, 16_000, ("a", "b"))
    assert request.loan.lender == "lender"
    compute_s = Rates(512).prefill_s(16_000, 16_000)
    assert began_s <= request.loan.deadline_s - compute_s <= SystemClock().now_s()
    assert replace(request, loan=None) == REQUEST


async def _busy(_: Lend) -> AnyMessage | None:
    return Busy(worker="lender", reason="loan")


async def _refused(_: Lend) -> AnyMessage | None:
    return Refused(error=ErrorReport.of(Unavailable("the worker is draining")))


async def _silent(_: Lend) -> AnyMessage | None:
    return None


async def _too_little(_: Lend) -> AnyMessage | None:
    return Lent(worker="lender", tokens=4_000, agents=("a",))


@pytest.mark.parametrize("answer", [_busy, _refused, _silent, _too_little, None])
async def test_without_a_useful_loan_the_request_runs_as_it_is(
    answer: Callable[[Lend], Awaitable[AnyMessage | None]] | None,
) -> None:
    async with asyncio.timeout(HANG_S):
        request, _ = await borrow(answer, cached_tokens=4_000)
    assert request is REQUEST


async def test_a_worker_without_a_pool_asks_nobody() -> None:
    request, asked = await borrow(_busy, facts=replace(FACTS, pool_agents=()))
    assert request is REQUEST
    assert asked == []


@pytest.mark.parametrize(("held", "pool"), [(640, True), (0, True), (640, False)])
async def test_a_lender_answers_with_what_its_pool_leases(held: int, pool: bool) -> None:
    engine = Lender(FACTS)
    engine.lent_tokens = held
    network = MemoryNetwork()
    bus = MemoryBus(network)
    _, (lend,) = await borrow(_busy)
    facts = FACTS if pool else replace(FACTS, pool_agents=())
    answer = await loans(bus, facts, engine).answer(lend)
    await bus.close()
    if held and pool:
        assert answer == Lent(worker="worker", tokens=640, agents=FACTS.pool_agents)
    else:
        assert isinstance(answer, Busy)


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"key": b"short"}, "16 bytes, not 5"),
        ({"blocks": bytes(40)}, "no whole number of block ids"),
        ({"sink_ranks": -1}, "a borrower of -1 ranks"),
        ({"sink_ranks": 1 << 40}, "a borrower of 1099511627776 ranks"),
    ],
)
async def test_what_no_engine_can_lend_does_not_reach_it(odd: dict[str, object], reason: str) -> None:
    _, (lend,) = await borrow(_busy)
    bus, asked = MemoryBus(MemoryNetwork()), list[bytes]()

    class Asked(Lender):
        async def lend(self, key: bytes, blocks: bytes, sink_ranks: int) -> int:
            asked.append(key)
            return 0

    with pytest.raises(MalformedMessage, match=reason):
        await loans(bus, engine=Asked(FACTS)).answer(msgspec.structs.replace(lend, **odd))
    assert asked == []
    await bus.close()
