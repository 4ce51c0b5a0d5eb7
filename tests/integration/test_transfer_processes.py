"""Transfer agents in different processes: one is killed, stopped, restarted or has no shared memory."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.pool.gpu_agent import DIRECT_BACKENDS
from baton.transfer import AgentOptions, Cause, EventKind, NativeAgent, lease_key
from tests.contract.peer_process import Peer
from tests.contract.transfer_rig import (
    KEY,
    LAYERS,
    OPTIONS,
    SINK_BLOCKS,
    SOURCE_BLOCKS,
    TOKENS,
    Fabric,
    Node,
    wait_until,
)
from tests.harness.limits import HANG_S

WAYS = ("cuda-ipc", "cuda-put", "gpudirect", "direct", "cma", "shm", "verbs", "ucx over tcp", "tcp")
ON_A_GPU = [pytest.param(f"{way} on a GPU", marks=pytest.mark.gpu) for way in ("cuda-ipc", "cuda-put")]
every_way = pytest.mark.parametrize("way", [*WAYS, "ucx over posix,cma", *ON_A_GPU])


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


StartPeer = Callable[..., Peer]


@pytest.fixture
def start_peer(fabric: Fabric) -> Generator[StartPeer]:
    peers: list[Peer] = []

    def start(*arguments: object) -> Peer:
        peers.append(Peer(fabric, *arguments))  # pyright: ignore[reportArgumentType]
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


@pytest.fixture
def node(backend: str, fabric: Fabric) -> Generator[Node]:
    """Return an agent of this process, which gives nothing up."""
    node = make_node(OPTIONS, backend, fabric)
    yield node
    node.close()


@pytest.fixture
def hasty(backend: str, fabric: Fabric) -> Generator[Node]:
    """Return an agent of this process that gives up soon."""
    node = make_node(replace(OPTIONS, lease_ttl_s=0.6, connect_timeout_s=2.0, stall_timeout_s=1.0), backend, fabric)
    yield node
    node.close()


def make_node(options: AgentOptions, backend: str, fabric: Fabric) -> Node:
    agent = NativeAgent(replace(options, backends=backends_of(backend), **fabric))
    return Node(agent, shared=backend == "direct", gpu_library=fabric.get("gpu_library"))


def backends_of(backend: str) -> tuple[str, ...]:
    """Return the backend with a fallback, except for pools in CUDA memory, which have none."""
    return (backend,) if backend in DIRECT_BACKENDS else (backend, "tcp")


def pull(sink: Node, endpoint: str) -> None:
    sink.agent.pull(KEY, endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S)


def segments() -> list[str]:
    """Return the shared-memory segments that this process maps; Linux marks one without a name as deleted."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/baton-" in line]


@every_way
def test_a_pull_from_another_process(node: Node, start_peer: StartPeer, backend: str) -> None:
    peer = start_peer(backend)
    peer.lease(seed=5)
    pull(node, peer.endpoint)
    for layer in range(LAYERS):
        peer.ready(layer)
    done = node.wait_end(KEY)
    assert (done.kind, done.backend) == (EventKind.PULL_DONE, backend)
    assert node.holds(SINK_BLOCKS, seed=5)
    assert segments() or backend != "shm"
    assert all(line.endswith(" (deleted)") for line in segments()), "without a name, a kill leaves nothing behind"


@every_way
def test_a_killed_source_is_noticed(node: Node, start_peer: StartPeer, backend: str) -> None:
    """No time limit ends the pull: the source's kernel says that it is gone."""
    peer = start_peer(backend)
    peer.lease()
    pull(node, peer.endpoint)
    peer.ready(0)
    node.wait(EventKind.PULL_PROGRESS)
    peer.kill()
    failed = node.wait_end(KEY)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.UNREACHABLE)
    assert node.agent.stats().pulls == 0


def test_a_source_that_was_killed_before_is_noticed(node: Node, start_peer: StartPeer, backend: str) -> None:
    peer = start_peer(backend)
    peer.kill()
    pull(node, peer.endpoint)
    assert node.wait_end(KEY).cause is Cause.UNREACHABLE


def test_a_stopped_source_is_noticed(hasty: Node, start_peer: StartPeer, backend: str) -> None:
    peer = start_peer(backend)
    peer.lease()
    pull(hasty, peer.endpoint)
    peer.ready(0)
    hasty.wait(EventKind.PULL_PROGRESS)
    peer.signal(signal.SIGSTOP)
    failed = hasty.wait_end(KEY)
    assert (failed.kind, failed.cause) == (EventKind.PULL_FAILED, Cause.STALLED)


def test_a_stopped_source_cannot_be_reached(hasty: Node, start_peer: StartPeer, backend: str) -> None:
    peer = start_peer(backend)
    peer.signal(signal.SIGSTOP)  # Its kernel still accepts the connection; the handshake never comes.
    pull(hasty, peer.endpoint)
    assert hasty.wait_end(KEY).cause == Cause.UNREACHABLE


def check_that_a_stop_does_no_harm(node: Node, peer: Peer, stop_s: float) -> None:
    peer.lease(seed=2)
    pull(node, peer.endpoint)
    peer.ready(0)
    node.wait(EventKind.PULL_PROGRESS)
    peer.signal(signal.SIGSTOP)
    time.sleep(stop_s)
    peer.signal(signal.SIGCONT)
    for layer in range(1, LAYERS):
        peer.ready(layer)
    assert node.wait_end(KEY).kind == EventKind.PULL_DONE
    assert node.holds(SINK_BLOCKS, seed=2)


def test_a_short_stop_does_no_harm(node: Node, start_peer: StartPeer, backend: str) -> None:
    check_that_a_stop_does_no_harm(node, start_peer(backend), 0.4)


@pytest.mark.parametrize("way", ["tcp"])
def test_leases_outlast_a_stop_of_their_own_process(node: Node, start_peer: StartPeer, backend: str) -> None:
    """The sink kept the lease alive all the time; the source reads of it only once it goes on."""
    check_that_a_stop_does_no_harm(node, start_peer(backend, 0.6), 2.0)


def test_a_source_that_was_given_up_is_told_when_it_is_back(
    start_peer: StartPeer, backend: str, fabric: Fabric
) -> None:
    """The stopped process is the source; its lease ends before its TTL."""
    options = replace(OPTIONS, backends=backends_of(backend), connect_timeout_s=0.3, **fabric)
    sink = Node(NativeAgent(options), gpu_library=fabric.get("gpu_library"))
    peer = start_peer(backend, 30.0)
    peer.lease()
    peer.signal(signal.SIGSTOP)
    pull(sink, peer.endpoint)
    assert sink.wait_end(KEY).cause == Cause.UNREACHABLE
    peer.signal(signal.SIGCONT)
    wait_until(lambda: peer.leases() == 0)
    sink.close()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_the_lease_of_a_dead_sink_expires(
    hasty: Node, start_peer: StartPeer, backend: str, end: signal.Signals
) -> None:
    peer = start_peer(backend)
    hasty.lease(KEY, SOURCE_BLOCKS)
    peer.tell("pull", KEY.hex(), hasty.agent.endpoint, ",".join(map(str, SINK_BLOCKS)))
    hasty.agent.post_ready(KEY, 1, 0, TOKENS)
    wait_until(lambda: hasty.agent.stats().served_bytes > 0)
    peer.signal(end)
    ended = hasty.wait(EventKind.LEASE_ENDED)
    assert ended.cause == Cause.EXPIRED
    assert hasty.agent.stats().leased_blocks == 0


def test_a_sink_that_wakes_after_its_lease_is_gone(hasty: Node, start_peer: StartPeer, backend: str) -> None:
    """The other way round: this process is the source, and a stopped sink must fail once it goes on."""
    peer = start_peer(backend, 0.6)
    peer.lease()
    pull(hasty, peer.endpoint)
    peer.ready(0)
    hasty.wait(EventKind.PULL_PROGRESS)
    peer.signal(signal.SIGSTOP)
    hasty.wait_end(KEY)
    peer.signal(signal.SIGCONT)
    other = lease_key("request", 1)
    peer.tell("lease", other.hex(), ",".join(map(str, SOURCE_BLOCKS)), 4)
    peer.tell("ready", other.hex(), -1, TOKENS)
    hasty.agent.pull(other, peer.endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S)
    assert hasty.wait_end(other).kind == EventKind.PULL_DONE
    assert hasty.holds(SINK_BLOCKS, seed=4)


@pytest.mark.parametrize("way", ["tcp"])
def test_what_does_not_work_is_named(start_peer: StartPeer, caplog: pytest.LogCaptureFixture) -> None:
    sink = Node(NativeAgent(replace(OPTIONS, backends=("direct", "shm", "tcp"))))
    peer = start_peer("direct,shm,tcp", 5.0, 1 << 20)  # Without files as large as a region or a ring.
    peer.lease(seed=1)
    pull(sink, peer.endpoint)
    peer.ready(-1)
    done = sink.wait_end(KEY)
    assert sink.agent.stats().fallbacks == 1
    sink.agent.close()
    assert (done.kind, done.backend) == (EventKind.PULL_DONE, "tcp")
    assert sink.holds(SINK_BLOCKS, seed=1)
    assert done.declined == "direct: the source's pool does not lie in a region; shm: no shared memory: File too large"
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [f"KV comes over tcp: {done.declined}"]


@pytest.mark.parametrize("way", ["shm"])
def test_a_way_that_is_none_for_the_pool_is_not_fallen_back_from(start_peer: StartPeer) -> None:
    """The default backend `direct` needs memory of the agent's own, but engines have theirs."""
    sink = Node(NativeAgent(OPTIONS))
    peer = start_peer(",".join(AgentOptions().backends))
    peer.lease(seed=1)
    pull(sink, peer.endpoint)
    peer.ready(-1)
    done = sink.wait_end(KEY)
    assert sink.agent.stats().fallbacks == 0
    sink.agent.close()
    assert (done.backend, done.declined) == ("shm", "direct: the source's pool does not lie in a region")


@pytest.mark.parametrize("way", ["tcp"])
def test_without_any_common_backend_the_pull_is_refused(start_peer: StartPeer) -> None:
    sink = Node(NativeAgent(replace(OPTIONS, backends=("shm",))))
    peer = start_peer("tcp")
    pull(sink, peer.endpoint)
    failed = sink.wait_end(KEY)
    sink.agent.close()
    assert failed.cause == Cause.REFUSED
    assert "'shm'" in failed.detail and "'tcp'" in failed.detail
