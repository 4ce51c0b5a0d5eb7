"""RDMA over the fake adapters, as far as it is special: proofs, bounds, choice of devices, memory registration."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from fake_library import FakeVerbs
from transfer_rig import KEY, LAYERS, SOURCE_BLOCKS, TOKENS, MakeNode, Node, pull, pull_whole

from baton.errors import ConfigurationError
from baton.transfer import Cause, EventKind, TransferEvent, lease_key

RETRIES_EXCEEDED = 12


@pytest.fixture
def way() -> str:
    return "verbs"


@pytest.fixture
def make(make_node: MakeNode, fake_verbs: FakeVerbs) -> Iterator[MakeNode]:
    """Make nodes that have a second backend."""

    def make(**changes: object) -> Node:
        return make_node(**{"backends": ("verbs", "tcp"), **changes})

    yield make
    fake_verbs.set(hold=0)


def whole_pull(make: MakeNode, **of_sink: object) -> TransferEvent:
    done = pull_whole(make(**of_sink), make())
    assert done.kind == EventKind.PULL_DONE
    return done


# ---------------------------------------------------------------- failures


def test_a_proof_that_fails_leaves_the_next_way(make: MakeNode, fake_verbs: FakeVerbs) -> None:
    fake_verbs.set(fail_nth=1, fail_status=RETRIES_EXCEEDED)
    done = whole_pull(make)
    assert (done.backend, done.declined) == ("tcp", "verbs: a read failed: transport retry counter exceeded")


def test_a_proof_that_does_not_come_leaves_the_next_way(make: MakeNode, fake_verbs: FakeVerbs) -> None:
    fake_verbs.set(hold=1)
    done = whole_pull(make)
    assert (done.backend, done.declined) == ("tcp", "verbs: its proof takes too long")


def test_reading_outside_of_what_the_source_offers_fails(make: MakeNode, fake_verbs: FakeVerbs) -> None:
    """The source's adapter registers less of its pool than the source claims: every read fails, and none hangs."""
    fake_verbs.set(shrink=1)
    source, sink = make(), make()
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source, budget_s=0.5)
    failed = sink.wait_end(KEY)
    assert (failed.kind, failed.cause, failed.bytes) == (EventKind.PULL_FAILED, Cause.DEADLINE, 0)
    assert failed.detail.endswith("after its connection was lost: a read failed: remote access error")
    assert sink.is_poison()


def test_the_end_of_a_cancelled_pull_waits_for_its_reads(make: MakeNode, fake_verbs: FakeVerbs) -> None:
    """An adapter cannot cancel a read, and its connection is usable again once all reads have ended."""
    source, sink = make(), make()
    source.fill(SOURCE_BLOCKS)
    generation = source.lease(KEY, SOURCE_BLOCKS)
    source.agent.post_ready(KEY, generation, 0, TOKENS)
    pull(sink, source)
    sink.wait(EventKind.PULL_PROGRESS)
    fake_verbs.set(delay_ms=200)
    before, began_s = fake_verbs.left_open(), time.monotonic()
    source.agent.post_ready(KEY, generation, -1, TOKENS)
    time.sleep(0.1)  # The reads have begun, and wait.
    sink.agent.cancel_pull(KEY)
    assert sink.wait_end(KEY).cause == Cause.CANCELLED
    assert time.monotonic() - began_s >= 0.2
    assert fake_verbs.left_open() == before, "the connection is used on"


# ---------------------------------------------------------------- devices


def test_connections_take_the_devices_in_turn(make: MakeNode, fake_verbs: FakeVerbs) -> None:
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


def test_a_device_whose_port_is_down_is_passed_over(make: MakeNode, fake_verbs: FakeVerbs) -> None:
    fake_verbs.set(ports_down=0b01)
    assert whole_pull(make).backend == "verbs"
    assert fake_verbs.counts()["reads_0"] == 0


def test_a_port_that_goes_down_later_is_passed_over(make: MakeNode, fake_verbs: FakeVerbs) -> None:
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
    make: MakeNode, fake_verbs: FakeVerbs, control: dict[str, int], options: dict[str, str], why: str
) -> None:
    fake_verbs.set(**control)
    done = whole_pull(make, **options)
    assert done.backend == "tcp"
    assert done.declined.startswith("verbs: ") and why in done.declined


@pytest.mark.parametrize(("devices", "gid"), [("", 3), ("fake_0:1:1", 1), ("fake_1:1:0", 0), ("fake_1", 3)])
def test_the_gid_is_of_routed_roce_unless_it_is_chosen(
    make: MakeNode, fake_verbs: FakeVerbs, devices: str, gid: int
) -> None:
    assert whole_pull(make, verbs_devices=devices).backend == "verbs"
    assert fake_verbs.counts()["sink_gid"] == gid


def test_infiniband_goes_by_local_identifiers(make: MakeNode, fake_verbs: FakeVerbs) -> None:
    fake_verbs.set(infiniband=1)
    assert whole_pull(make).backend == "verbs"


@pytest.mark.parametrize("devices", [":1", "mlx5_0:", "mlx5_0:one", "mlx5_0:0", "mlx5_0:1:256", "a,,b", "a:1:1:1"])
def test_devices_that_make_no_sense_are_refused_at_the_start(make: MakeNode, devices: str) -> None:
    with pytest.raises(ConfigurationError, match="does not name an RDMA device"):
        make(verbs_devices=devices)


# ---------------------------------------------------------------- resources


def test_the_pool_is_registered_once(make: MakeNode, fake_verbs: FakeVerbs) -> None:
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
