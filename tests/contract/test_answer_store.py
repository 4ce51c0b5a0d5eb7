"""The store of answers to requests with an idempotency key: one suite over memory and a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from uuid import uuid4

import pytest
from baton_gateway.idempotency_store import AnswerStore, Claimed, MemoryAnswers, RedisAnswers, Running

from baton.clock import SystemClock
from tests.contract.conftest import Connect

Make = Callable[..., AnswerStore]


@pytest.fixture(params=["memory", "redis"])
def make(request: pytest.FixtureRequest) -> Make:
    """Return what makes stores; those in Redis have keys that no other test uses."""
    connect: Connect | None = request.getfixturevalue("redis") if request.param == "redis" else None

    def make(*, ttl_s: float = 60.0, lease_s: float = 60.0) -> AnswerStore:
        clock = SystemClock()
        if connect is None:
            return MemoryAnswers(clock, ttl_s=ttl_s, lease_s=lease_s)
        return RedisAnswers(connect(), prefix=f"test:{uuid4().hex}", ttl_s=ttl_s, lease_s=lease_s)

    return make


async def test_the_first_claims_and_others_get_its_answer(make: Make) -> None:
    store = make()
    assert await store.claim("k", "digest", "1") == Claimed()
    assert await store.claim("k", "digest", "2") == Running()
    assert await store.claim("k", "other", "2") is None
    assert await store.claim("l", "other", "2") == Claimed()
    await store.keep("k", "2", b"not the claim's")
    assert await store.claim("k", "digest", "2") == Running()
    await store.keep("k", "1", b"answer")
    assert await store.claim("k", "digest", "2") == b"answer"
    assert await store.claim("k", "other", "2") is None
    await store.release("k", "1")
    await store.keep("k", "1", b"another")
    assert await store.claim("k", "digest", "1") == b"answer", "an answer does not change"


async def test_a_claim_that_is_repeated_changes_nothing(make: Make) -> None:
    store = make()
    for _ in range(2):
        assert await store.claim("k", "digest", "1") == Claimed()
        assert await store.claim("k", "other", "1") is None
        assert await store.claim("k", "digest", "2") == Running()


async def test_a_released_name_is_free(make: Make) -> None:
    store = make()
    assert await store.claim("k", "digest", "1") == Claimed()
    await store.release("k", "2")
    assert await store.claim("k", "digest", "2") == Running()
    await store.release("k", "1")
    assert await store.claim("k", "other", "2") == Claimed()
    await store.keep("k", "1", b"too late")
    assert await store.claim("k", "other", "1") == Running()


async def test_claims_and_answers_expire(make: Make) -> None:
    store = make(ttl_s=0.2, lease_s=0.1)
    assert await store.claim("k", "digest", "1") == Claimed()
    while await store.claim("k", "digest", "2") == Running():  # noqa: ASYNC110 - time has to pass.
        await asyncio.sleep(0.01)
    await store.renew("k", "1")
    await store.keep("k", "1", b"too late")
    assert not isinstance(await store.claim("k", "digest", "1"), bytes)
    while not isinstance(await store.claim("k", "digest", "3"), bytes):
        await store.keep("k", "3", b"answer")
    while isinstance(await store.claim("k", "digest", "4"), bytes):  # noqa: ASYNC110 - as above.
        await asyncio.sleep(0.01)
