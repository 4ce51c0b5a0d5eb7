"""Backends of adapters and of GPUs over fakes: work that fails, never ends, or ends after its pull.

Tests of only one of them are in `test_transfer_verbs.py` and `test_transfer_cuda.py`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from fake_library import FakeLibrary
from peer_process import Peer
from transfer_rig import (
    KEY,
    LAYERS,
    SINK_BLOCKS,
    SOURCE_BLOCKS,
    TOKENS,
    Fabric,
    MakeNode,
    begin,
    pull,
    pull_whole,
    wait_idle,
    wait_until,
)

from baton.transfer import Cause, EventKind
from tests.harness.limits import HANG_S

LOCAL_PROTECTION, REMOTE_ACCESS, RETRIES_EXCEEDED = 4, 10, 12
WAYS = ("verbs", "cuda-ipc", "cuda-put", "gpudirect")
OTHERS = {"engines", "pinned", "unflushed"}
"""Counts of what no pull opens or leaves; test_device_copies.py and test_transfer_gpudirect.py have their control."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def fake(request: pytest.FixtureRequest, way: str, make_node: MakeNode) -> Iterator[FakeLibrary]:
    """Provide the fake hardware; delays end before the nodes are closed."""
    fake: FakeLibrary = request.getfixturevalue("fake_gpu" if way.startswith("cuda") else "fake_verbs")
    yield fake
    fake.set(hold=0)


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        *(
            (way, {"fail_nth": nth, "fail_status": status})
            for way in ("verbs", "gpudirect")
            for nth in (2, 9, 30)
            for status in (LOCAL_PROTECTION, REMOTE_ACCESS, RETRIES_EXCEEDED)
        ),
        *((way, {"fail_post": nth}) for way in ("verbs", "gpudirect") for nth in (2, 9, 30)),
        *((way, {"fail_launch": nth}) for way in ("cuda-ipc", "cuda-put") for nth in (1, 2, 3)),
        *((way, {"fail_run": nth}) for way in ("cuda-ipc", "cuda-put") for nth in (1, 2, 3)),
    ],
    indirect=["way"],
)
def test_what_fails_is_done_again_on_a_new_connection(
    make_node: MakeNode, fake: FakeLibrary, fault: dict[str, int]
) -> None:
    source, sink = make_node(), make_node()
    generation = begin(source, sink)  # A way that fails while the sides try it is none that they take.
    fake.set(**fault)
    for layer in range(1, LAYERS):  # One after the other, so that there is work enough for the fault to strike.
        source.agent.post_ready(KEY, generation, layer, TOKENS)
        sink.wait(EventKind.PULL_PROGRESS, layers=layer + 1)
    assert sink.wait_end(KEY).kind == EventKind.PULL_DONE
    assert sink.holds(SINK_BLOCKS) and sink.gaps_are_untouched()
    assert sink.agent.stats().lanes_retired == 1


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_ends_under_a_read(
    make_node: MakeNode, fake: FakeLibrary, backend: str, fabric: Fabric, end: signal.Signals
) -> None:
    sink = make_node(connect_timeout_s=1.0, stall_timeout_s=1.0 if end == signal.SIGSTOP else HANG_S)
    peer = Peer(fabric, backend)
    try:
        peer.lease()
        sink.agent.pull(KEY, peer.endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S)
        peer.ready(0)
        sink.wait(EventKind.PULL_PROGRESS)
        fake.set(delay_ms=2000)
        done = fake.counts()
        peer.ready(-1)
        time.sleep(0.1)
        assert fake.counts() == done, "the work is under way"
        peer.signal(end)
        failed = sink.wait_end(KEY)
        # A stopped process is read, as its adapter goes on; but it says nothing about what was read.
        assert failed.cause == (Cause.UNREACHABLE if end == signal.SIGKILL else Cause.STALLED)
    finally:
        peer.close()


# ---------------------------------------------------------------- the fence


def test_nothing_is_written_after_the_end_of_a_cancelled_pull(make_node: MakeNode, fake: FakeLibrary) -> None:
    source, sink = make_node(), make_node()
    generation = begin(source, sink)
    fake.set(delay_ms=200)
    source.agent.post_ready(KEY, generation, -1, TOKENS)
    time.sleep(0.1)  # The work has begun, and waits.
    sink.agent.cancel_pull(KEY)
    assert sink.wait_end(KEY).cause == Cause.CANCELLED
    sink.poison()
    time.sleep(0.3)
    assert sink.is_poison(), "a late chunk was written into blocks that were given back"


@pytest.mark.parametrize("end", ["cancel", "stall", "close"])
def test_work_that_never_ends_is_ended_by_force(make_node: MakeNode, fake: FakeLibrary, end: str) -> None:
    source, sink = make_node(), make_node(stall_timeout_s=1.0 if end == "stall" else HANG_S)
    generation = begin(source, sink)
    fake.set(hold=1)
    source.agent.post_ready(KEY, generation, -1, TOKENS)
    time.sleep(0.1)
    if end == "cancel":
        sink.agent.cancel_pull(KEY)
    elif end == "close":
        sink.agent.close()
    failed = sink.wait_end(KEY)
    assert failed.cause == (Cause.STALLED if end == "stall" else Cause.CANCELLED)
    sink.poison()
    fake.set(hold=0)
    time.sleep(0.1)
    assert sink.is_poison(), "a late chunk was written into blocks that were given back"


def test_a_restart_is_not_overtaken_by_old_work(make_node: MakeNode, fake: FakeLibrary) -> None:
    source, sink = make_node(), make_node()
    fake.set(delay_ms=60)
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    for seed in range(1, 4):
        time.sleep(0.09)
        source.agent.revoke_lease(KEY, final=False)
        source.fill(SOURCE_BLOCKS, seed=200)
        source.offer(KEY, SOURCE_BLOCKS, seed=seed)
    assert sink.wait_end(KEY).kind == EventKind.PULL_DONE
    assert any(sink.holds(SINK_BLOCKS, seed=seed) for seed in range(4))


# ---------------------------------------------------------------- what it costs


def test_an_idle_connection_costs_nothing(make_node: MakeNode, fake: FakeLibrary) -> None:
    source, sink = make_node(), make_node()
    assert pull_whole(sink, source).kind == EventKind.PULL_DONE
    wait_until(lambda: source.agent.stats().leases == 0)
    wait_idle(0.02)


def test_the_stand_in_counts_what_is_open(make_node: MakeNode, fake: FakeLibrary) -> None:
    """The control of the tests that look for resources left open."""
    pull_whole(make_node(), make_node())
    assert set(fake.left_open()) == set(fake.open) - OTHERS
