"""The connection to Redis: what its errors say."""

from __future__ import annotations

from uuid import uuid4

import pytest

from baton.errors import StoreUnavailable
from tests.contract.conftest import Connect


async def test_the_error_of_a_pipeline_has_the_reason_and_none_of_its_data(
    redis: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    connection, key = redis(), f"test:{uuid4().hex}"
    await connection.answer(connection.client.set(key, "a text"))
    for said in ("", "the store cannot be reached"):
        pipeline = connection.client.pipeline(transaction=True)
        pipeline.hset(key, "field", "a prompt")  # pyright: ignore[reportUnusedCoroutine]
        with pytest.raises(StoreUnavailable) as raised:
            await connection.answer(pipeline.execute(), said=said)
        reason = caplog.messages[0] if said else str(raised.value)
        assert reason == ("Redis does not serve: WRONGTYPE Operation against a key holding the wrong kind of value")
