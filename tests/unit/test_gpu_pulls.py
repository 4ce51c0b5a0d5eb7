"""The sink side of a `GpuAgent`, step by step: what its thread does late must not undo what was cancelled."""

from __future__ import annotations

from typing import Any, cast

import pytest

from baton.pool.gpu_offers import Way
from baton.pool.gpu_pulls import Pull, Pulls, join_endpoint
from baton.transfer import Cause, EventKind, TransferEvent

HOST = "here"
KEY = b"k" * 16
SOURCE = join_endpoint("staged:1", HOST, "direct:1", far=False)


class RecordingAgent:
    """Keeps the names of the calls to it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pull(self, key: bytes, endpoint: str, **options: object) -> None:
        self.calls.append("pull")

    def cancel_pull(self, key: bytes) -> None:
        self.calls.append("cancel")


@pytest.mark.parametrize("late", ["start", "fail"])
def test_a_pull_that_is_cancelled_before_the_stream_ends_neither_starts_nor_ends_twice(late: str) -> None:
    """Its blocks may be another request's by then: a pull that started would overwrite them."""
    direct, staged, told = RecordingAgent(), RecordingAgent(), list[TransferEvent]()
    pulls = Pulls(cast("Any", direct), cast("Any", staged), HOST, told.append, lambda: 0.0, far=False)
    pull = Pull(endpoint=SOURCE, first_token=0, tokens=16, blocks=[1], deadline_s=60.0, whole=None)
    assert pulls.begin(KEY, pull)
    pulls.cancel(KEY)
    if late == "start":
        pulls.start(KEY, pull)
    else:
        pulls.fail(KEY, pull, Cause.COPY, "the device failed")
    assert (direct.calls, staged.calls, told) == ([], ["pull", "cancel"], [])
    end = TransferEvent(kind=EventKind.PULL_FAILED, key=KEY, cause=Cause.CANCELLED, detail="")
    pulls.take(Way.STAGED, end)
    assert told == [end] and not len(pulls)
