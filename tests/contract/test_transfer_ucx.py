"""UCX's own behaviour: reported transports, a source that stops during a read, and resources left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_library import NATIVE, compiler
from peer_process import Peer
from transfer_rig import KEY, OPTIONS, SINK_BLOCKS, SOURCE_BLOCKS, TOKENS, Node, pull, wait_idle
from ucx_library import ucx_library

from baton.transfer import EventKind, NativeAgent, TransferEvent
from tests.harness.limits import HANG_S

Make = Callable[..., Node]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("UCX_TLS", "tcp")
    nodes: list[Node] = []

    def make(**changes: object) -> Node:
        given = {"backends": ("ucx", "tcp"), "ucx_library": ucx_library(), **changes}
        nodes.append(Node(NativeAgent(replace(OPTIONS, **given))))  # pyright: ignore[reportArgumentType]
        return nodes[-1]

    yield make
    for node in nodes:
        node.agent.close()


def whole_pull(make: Make, **of_sink: object) -> TransferEvent:
    source, sink = make(), make(**of_sink)
    source.offer(KEY, SOURCE_BLOCKS, seed=3)
    pull(sink, source)
    done = sink.wait_end(KEY)
    assert done.kind == EventKind.PULL_DONE
    assert sink.agent.stats().fallbacks == (done.backend != "ucx"), "what is said of the preferred way is no fallback"
    assert sink.holds(SINK_BLOCKS, seed=3) and sink.gaps_are_untouched()
    return done


def test_our_declarations_are_those_of_the_library() -> None:
    """Sizes, offsets and values are compared when `abi_test.cpp` is compiled with the original header."""
    headers = Path(ucx_library()).parents[1] / "include"
    if not (headers / "ucp").is_dir():
        pytest.skip("UCX is installed without its headers: `make environment-ucx` installs them, given PyPI")
    arguments = ["-std=c++20", "-fsyntax-only", "-w", f"-I{NATIVE}", f"-I{headers}"]
    subprocess.run([*compiler(), *arguments, str(NATIVE / "tests" / "abi_test.cpp")], check=True)


def test_tcp_is_never_taken_silently(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    done = whole_pull(make)
    assert done.backend == "ucx"
    assert done.declined.startswith("ucx: goes over tcp/")
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [f"KV comes over ucx: {done.declined}"]


def test_shared_memory_is_said_and_no_warning(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_TLS", "posix,cma")
    assert "posix" in whole_pull(make).declined
    assert not caplog.records


def test_between_processes_of_a_host_it_reads_through_the_kernel(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("UCX_TLS")
    monkeypatch.setenv("UCX_RNDV_THRESH", "8k")  # Is of messages, and would keep it to TCP.
    assert whole_pull(make).declined == "ucx: goes over cma/memory"
    assert not caplog.records


def test_without_the_library_the_next_way_is_taken(make: Make) -> None:
    done = whole_pull(make, ucx_library="/nowhere/libucp.so.0")
    assert done.backend == "tcp"
    assert done.declined.startswith("ucx: /nowhere/libucp.so.0: cannot open")


def test_a_library_that_is_another_is_not_taken(make: Make) -> None:
    done = whole_pull(make, ucx_library="libm.so.6")
    assert (done.backend, done.declined) == ("tcp", "ucx: the library has no ucp_get_version")


def test_agents_that_share_no_transport_take_the_next_way(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make()  # UCX reads its variables when an agent takes its pool.
    monkeypatch.setenv("UCX_TLS", "posix,cma")
    sink = make()
    source.offer(KEY, SOURCE_BLOCKS)
    sink.agent.pull(KEY, source.agent.endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S)
    done = sink.wait_end(KEY)
    assert (done.backend, done.declined) == ("tcp", "ucx: UCX has no way to the source: Destination is unreachable")


@pytest.mark.parametrize("after_ms", [0.0, 2.0])
def test_a_source_that_stops_under_a_read_writes_nothing_later(make: Make, after_ms: float) -> None:
    sink = make(stall_timeout_s=0.3)
    peer = Peer({"ucx_library": ucx_library()}, "ucx")
    try:
        peer.lease(seed=1)
        sink.agent.pull(KEY, peer.endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S)
        peer.ready(0)
        sink.wait(EventKind.PULL_PROGRESS)
        peer.ready(-1)
        time.sleep(after_ms / 1000)
        peer.signal(signal.SIGSTOP)
        if sink.wait_end(KEY).kind == EventKind.PULL_DONE:
            return  # It was faster.
        sink.poison()
        peer.signal(signal.SIGCONT)
        time.sleep(0.2)
        assert sink.is_poison()
    finally:
        peer.close()


def test_nothing_is_left_and_idleness_costs_nothing(make: Make) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    whole_pull(make)  # UCX itself keeps something from its first use on.
    before = open_files()
    source, sink = make(), make()
    source.offer(KEY, SOURCE_BLOCKS)
    pull(sink, source)
    assert sink.wait_end(KEY).backend == "ucx"
    wait_idle(0.02)
    source.agent.close()
    sink.agent.close()
    assert open_files() <= before + 2 * 3, "an agent keeps three until it is destroyed"
