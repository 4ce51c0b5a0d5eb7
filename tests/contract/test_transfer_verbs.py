"""RDMA over the fake adapters: what goes wrong there, what a fence is for, which device is taken, what is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from fake_library import FakeVerbs
from test_transfer_processes import Peer
from transfer_rig import (
    BLOCK_TOKENS,
    KEY,
    LAYERS,
    OPTIONS,
    SINK_BLOCKS,
    SOURCE_BLOCKS,
    TOKENS,
    Node,
    pull,
    wait_until,
)

from baton.transfer import Cause, EventKind, NativeAgent, TransferEvent, lease_key

LOCAL_PROTECTION, REMOTE_ACCESS, RETRIES_EXCEEDED = 4, 10, 12
Make = Callable[..., Node]


@pytest.fixture
def make(fake_verbs: FakeVerbs) -> Iterator[Make]:
    nodes: list[Node] = []

    def make(**changes: object) -> Node:
        given = {"backends": ("verbs", "tcp"), "verbs_library": fake_verbs.library, **changes}
        nodes.append(Node(NativeAgent(replace(OPTIONS, **given))))  # pyright: ignore[reportArgumentType]
        return nodes[-1]

    yield make
    fake_verbs.set(hold=0)
    for node in nodes:
        node.agent.close()


def whole_pull(make: Make, **of_sink: object) -> TransferEvent:
    source, sink = make(), make(**of_sink)
    source.offer(KEY, SOURCE_BLOCKS, seed=3)
    pull(sink, source)
    done = sink.wait_end(KEY)
    assert done.kind == EventKind.PULL_DONE
    assert sink.holds(SINK_BLOCKS, seed=3) and sink.gaps_are_untouched()
    return done


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("nth", [2, 9, 30])
@pytest.mark.parametrize("status", [LOCAL_PROTECTION, REMOTE_ACCESS, RETRIES_EXCEEDED])
def test_a_read_that_fails_is_made_again_on_a_new_connection(
    make: Make, fake_verbs: FakeVerbs, nth: int, status: int
) -> None:
    fake_verbs.set(fail_nth=nth, fail_status=status)
    assert whole_pull(make).backend == "verbs"


@pytest.mark.parametrize("nth", [2, 9, 30])
def test_a_read_that_is_refused_is_made_again_on_a_new_connection(make: Make, fake_verbs: FakeVerbs, nth: int) -> None:
    fake_verbs.set(fail_post=nth)
    assert whole_pull(make).backend == "verbs"


def test_a_proof_that_fails_leaves_the_next_way(make: Make, fake_verbs: FakeVerbs) -> None:
    fake_verbs.set(fail_nth=1, fail_status=RETRIES_EXCEEDED)
    done = whole_pull(make)
    assert (done.backend, done.declined) == ("tcp", "verbs: a read failed: transport retry counter exceeded")


def test_a_proof_that_does_not_come_leaves_the_next_way(make: Make, fake_verbs: FakeVerbs) -> None:
    fake_verbs.set(hold=1)
    done = whole_pull(make)
    assert (done.backend, done.declined) == ("tcp", "verbs: its proof takes too long")


def test_reading_outside_of_what_the_source_offers_fails(make: Make, fake_verbs: FakeVerbs) -> None:
    """The source's adapter knows less of its pool than the source says: no read gets anything, and none hangs."""
    fake_verbs.set(shrink=1)
    source, sink = make(), make()
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source, budget_s=0.5)
    failed = sink.wait_end(KEY, 3.0)
    assert (failed.kind, failed.cause, failed.bytes) == (EventKind.PULL_FAILED, Cause.DEADLINE, 0)
    assert failed.detail.endswith("after its connection was lost: a read failed: remote access error")
    assert sink.is_poison()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_ends_under_a_read(make: Make, fake_verbs: FakeVerbs, end: signal.Signals) -> None:
    sink = make(connect_timeout_s=0.3, stall_timeout_s=0.3, backends=("verbs",))
    peer = Peer({"verbs_library": fake_verbs.library}, "verbs")
    try:
        peer.lease()
        sink.agent.pull(KEY, peer.endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=10.0)
        peer.ready(0)
        sink.wait(EventKind.PULL_PROGRESS)
        fake_verbs.set(delay_ms=250)
        peer.ready(-1)
        posted = fake_verbs.counts()["operations"]
        time.sleep(0.1)
        assert fake_verbs.counts()["operations"] == posted, "the reads are under way"
        peer.signal(end)
        failed = sink.wait_end(KEY, 3.0)
        # A stopped process is read, as its adapter goes on; but it says nothing about what was read.
        assert failed.cause == (Cause.UNREACHABLE if end == signal.SIGKILL else Cause.STALLED)
    finally:
        peer.close()


# ---------------------------------------------------------------- the fence


def test_a_cancelled_pull_ends_when_its_reads_have(make: Make, fake_verbs: FakeVerbs) -> None:
    """An adapter cannot take a read back: the end of the pull waits for it, and nothing is written afterwards."""
    source, sink = make(), make()
    other = lease_key("request", 1)
    source.offer(other, [1])
    sink.agent.pull(other, source.agent.endpoint, first_token=0, tokens=BLOCK_TOKENS, blocks=[1], budget_s=5.0)
    assert sink.wait_end(other).kind == EventKind.PULL_DONE
    fake_verbs.set(delay_ms=200)
    source.offer(KEY, SOURCE_BLOCKS)
    before, began_s = fake_verbs.counts()["qps"], time.monotonic()
    pull(sink, source)
    wait_until(lambda: source.agent.stats().leases == 1)
    time.sleep(0.1)  # Grants are answered by reads, which now wait.
    sink.agent.cancel_pull(KEY)
    assert sink.wait_end(KEY, 3.0).cause == Cause.CANCELLED
    assert time.monotonic() - began_s >= 0.2
    sink.poison()
    time.sleep(0.3)
    assert sink.is_poison()
    assert fake_verbs.counts()["qps"] == before, "the connection is used on"


@pytest.mark.parametrize("end", ["cancel", "stall", "close"])
def test_reads_that_never_end_are_ended_by_force(make: Make, fake_verbs: FakeVerbs, end: str) -> None:
    source, sink = make(), make(stall_timeout_s=0.3)
    source.fill(SOURCE_BLOCKS)
    generation = source.lease(KEY, SOURCE_BLOCKS)
    source.agent.post_ready(KEY, generation, 0, TOKENS)
    pull(sink, source)
    sink.wait(EventKind.PULL_PROGRESS)
    fake_verbs.set(hold=1)
    source.agent.post_ready(KEY, generation, -1, TOKENS)
    time.sleep(0.1)
    if end == "cancel":
        sink.agent.cancel_pull(KEY)
    elif end == "close":
        sink.agent.close()
    failed = sink.wait_end(KEY, 3.0)
    assert failed.cause == (Cause.STALLED if end == "stall" else Cause.CANCELLED)
    sink.poison()
    fake_verbs.set(hold=0)
    time.sleep(0.1)
    assert sink.is_poison(), "a late read was written into blocks that were given back"


def test_a_restart_is_not_overtaken_by_old_reads(make: Make, fake_verbs: FakeVerbs) -> None:
    source, sink = make(), make()
    fake_verbs.set(delay_ms=60)
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    for seed in range(1, 4):
        time.sleep(0.09)
        source.agent.revoke_lease(KEY, final=False)
        source.fill(SOURCE_BLOCKS, seed=200)
        source.offer(KEY, SOURCE_BLOCKS, seed=seed)
    assert sink.wait_end(KEY).kind == EventKind.PULL_DONE
    assert any(sink.holds(SINK_BLOCKS, seed=seed) for seed in range(4))


# ---------------------------------------------------------------- devices


def test_connections_take_the_devices_in_turn(make: Make, fake_verbs: FakeVerbs) -> None:
    source = make()
    reads: list[tuple[int, int]] = []
    for number in range(3):
        key = lease_key("request", number)
        source.offer(key, SOURCE_BLOCKS)
        sink = make()
        before = fake_verbs.counts()
        pull(sink, source, key)
        assert sink.wait_end(key).backend == "verbs"
        after = fake_verbs.counts()
        reads.append((after["reads_0"] - before["reads_0"], after["reads_1"] - before["reads_1"]))
    assert [bool(first) for first, _ in reads] == [True, False, True]
    assert [bool(second) for _, second in reads] == [False, True, False]


def test_a_device_whose_port_is_down_is_passed_over(make: Make, fake_verbs: FakeVerbs) -> None:
    fake_verbs.set(ports_down=0b01)
    assert whole_pull(make).backend == "verbs"
    assert fake_verbs.counts()["reads_0"] == 0


def test_a_port_that_goes_down_later_is_passed_over(make: Make, fake_verbs: FakeVerbs) -> None:
    source = make()
    for number, down in enumerate((0b00, 0b10, 0b10)):
        key = lease_key("request", number)
        fake_verbs.set(ports_down=down)
        source.offer(key, SOURCE_BLOCKS)
        sink = make()
        pull(sink, source, key)
        assert sink.wait_end(key).backend == "verbs"
    assert fake_verbs.counts()["reads_1"] == 0


@pytest.mark.parametrize(
    ("control", "options", "why"),
    [
        ({"devices_missing": 2}, {}, "this host has no RDMA device"),
        ({"ports_down": 0b11}, {}, "fake_0:1: the port is down, fake_1:1: the port is down"),
        ({}, {"verbs_devices": "mlx5_7"}, "there is no device mlx5_7"),
        ({}, {"verbs_devices": "fake_0:2"}, "fake_0:2: it has no such port"),
        ({}, {"verbs_devices": "fake_0:1:2"}, "it has no such GID"),
        ({}, {"verbs_library": "/nowhere/libibverbs.so.1"}, "/nowhere/libibverbs.so.1: cannot open"),
    ],
)
def test_what_is_missing_is_named(
    make: Make, fake_verbs: FakeVerbs, control: dict[str, int], options: dict[str, str], why: str
) -> None:
    fake_verbs.set(**control)
    done = whole_pull(make, **options)
    assert done.backend == "tcp"
    assert done.declined.startswith("verbs: ") and why in done.declined


@pytest.mark.parametrize(("devices", "gid"), [("", 3), ("fake_0:1:1", 1), ("fake_1:1:0", 0), ("fake_1", 3)])
def test_the_gid_is_of_routed_roce_unless_it_is_chosen(
    make: Make, fake_verbs: FakeVerbs, devices: str, gid: int
) -> None:
    assert whole_pull(make, verbs_devices=devices).backend == "verbs"
    assert fake_verbs.counts()["sink_gid"] == gid


def test_infiniband_goes_by_local_identifiers(make: Make, fake_verbs: FakeVerbs) -> None:
    fake_verbs.set(infiniband=1)
    assert whole_pull(make).backend == "verbs"


@pytest.mark.parametrize("devices", [":1", "mlx5_0:", "mlx5_0:one", "mlx5_0:0", "mlx5_0:1:256", "a,,b", "a:1:1:1"])
def test_devices_that_make_no_sense_are_refused_at_the_start(make: Make, devices: str) -> None:
    with pytest.raises(ValueError, match="does not name an RDMA device"):
        make(verbs_devices=devices)


# ---------------------------------------------------------------- what it costs


def test_the_pool_is_registered_once(make: Make, fake_verbs: FakeVerbs) -> None:
    source, sink = make(), make()
    open_after: list[dict[str, int]] = []
    for number in range(3):
        key = lease_key("request", number)
        source.offer(key, SOURCE_BLOCKS)
        pull(sink, source, key)
        assert sink.wait_end(key).kind == EventKind.PULL_DONE
        open_after.append(fake_verbs.left_open())
    assert open_after[0] == open_after[1] == open_after[2]
    # Of two agents and two devices each: the layers, and one proof for each end of the connection.
    assert open_after[0]["mrs"] == 2 * 2 * LAYERS + 2


def test_an_idle_connection_costs_nothing(make: Make) -> None:
    whole_pull(make)
    before_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before_s < 0.01


def test_the_fake_counts_what_is_open(make: Make, fake_verbs: FakeVerbs) -> None:
    """Else nothing would be left open in any test."""
    whole_pull(make)
    assert set(fake_verbs.left_open()) == set(FakeVerbs.open)
