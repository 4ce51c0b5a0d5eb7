"""A transfer agent's reactions to wrong arguments, unauthenticated peers, and its own shutdown."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Generator

import pytest
from baton_native import core
from transfer_rig import BLOCK_BYTES, BLOCK_TOKENS, BLOCKS, LAYERS, Node, wait_idle, wait_until

from baton.errors import ConfigurationError, TransferFailed
from baton.transfer import AgentOptions, Cause, EventKind, NativeAgent, TransferAgent, lease_key
from baton.transfer.memory import MemoryFabric
from tests.harness.limits import HANG_S

MakeAgent = Callable[[AgentOptions], TransferAgent]
KEY = lease_key("request", 0)
SINK_BLOCKS = list(range(16, 20))
TOKENS = len(SINK_BLOCKS) * BLOCK_TOKENS


NATIVE_ONLY = pytest.mark.parametrize("make_agent", ["native"], indirect=True)
"""Restricts a test to the agent with sockets."""


@pytest.fixture(params=["native", "memory"])
def make_agent(request: pytest.FixtureRequest) -> MakeAgent:
    return MemoryFabric().agent if request.param == "memory" else NativeAgent


@pytest.fixture
def node(make_agent: MakeAgent) -> Generator[Node]:
    node = Node(make_agent(AgentOptions()))
    yield node
    node.agent.close()


@pytest.fixture
def other(make_agent: MakeAgent) -> Generator[Node]:
    node = Node(make_agent(AgentOptions()))
    yield node
    node.agent.close()


@pytest.mark.parametrize(
    ("first_token", "tokens", "blocks", "budget_s", "words"),
    [
        (1, TOKENS, SINK_BLOCKS, 1.0, "not a multiple of the block size"),
        (0, 0, [], 1.0, "nothing to pull"),
        (0, TOKENS, SINK_BLOCKS[1:], 1.0, "fill 4 blocks, not 3"),
        (0, TOKENS, [0, 1, 2, BLOCKS], 1.0, "outside the pool"),
        (0, TOKENS, [0, 1, 2, -1], 1.0, "a block index"),
        (0, TOKENS, SINK_BLOCKS, 0.0, "budget_s"),
        (0, TOKENS, SINK_BLOCKS, float("nan"), "budget_s"),
        (-16, TOKENS, SINK_BLOCKS, 1.0, "first_token"),
    ],
)
def test_a_pull_that_makes_no_sense(
    node: Node, other: Node, first_token: int, tokens: int, blocks: list[int], budget_s: float, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        node.agent.pull(
            KEY, other.agent.endpoint, first_token=first_token, tokens=tokens, blocks=blocks, budget_s=budget_s
        )
    assert node.agent.stats().pulls == 0


@pytest.mark.parametrize(
    "endpoint", ["", "127.0.0.1:80", "host/0123456789abcdef", "127.0.0.1:0/0123456789abcdef", "a:1/z"]
)
def test_an_endpoint_of_no_agent(node: Node, endpoint: str) -> None:
    with pytest.raises(ValueError, match="not an endpoint"):
        node.agent.pull(KEY, endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=1.0)
    with pytest.raises(ValueError, match="not an endpoint"):
        node.agent.release(KEY, endpoint)


def test_a_key_of_the_wrong_length(node: Node) -> None:
    with pytest.raises(ValueError, match="16 bytes, not 3"):
        node.agent.open_lease(b"abc")


def test_a_key_that_is_pulled_already(node: Node, other: Node) -> None:
    node.agent.pull(KEY, other.agent.endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S)
    with pytest.raises(ValueError, match="already"):
        node.agent.pull(KEY, other.agent.endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S)


def test_a_lease_that_makes_no_sense(node: Node) -> None:
    generation = node.agent.open_lease(KEY)
    with pytest.raises(ValueError, match="open already"):
        node.agent.open_lease(KEY)
    with pytest.raises(ValueError, match="outside the pool"):
        node.agent.extend_lease(KEY, generation, [0, BLOCKS])
    assert node.agent.stats().leased_blocks == 0
    with pytest.raises(ValueError, match="cannot be ready"):
        node.agent.post_ready(KEY, generation, 0, 1)
    with pytest.raises(ValueError, match="layer"):
        node.agent.post_ready(KEY, generation, LAYERS, 0)
    with pytest.raises(ValueError, match="do not fit"):
        node.agent.complete_lease(KEY, generation, 1)
    node.agent.extend_lease(KEY, generation + 1, [0])  # Of another generation: ignored.
    node.agent.post_ready(lease_key("unknown", 0), 1, 0, 5)
    assert node.agent.stats().leased_blocks == 0


def test_a_pool_is_set_once_and_first(node: Node, make_agent: MakeAgent) -> None:
    agent = make_agent(AgentOptions())
    with pytest.raises(ValueError, match="set_pool first"):
        agent.open_lease(KEY)
    with pytest.raises(ValueError, match="set_pool first"):
        agent.pull(KEY, node.agent.endpoint, first_token=0, tokens=1, blocks=[0], budget_s=1.0)
    Node(agent)
    with pytest.raises(ValueError, match="already"):
        Node(agent)
    agent.close()


@NATIVE_ONLY
def test_options_that_make_no_sense(node: Node) -> None:
    with pytest.raises(ConfigurationError, match="no backend 'carrier pigeon'"):
        NativeAgent(AgentOptions(backends=("carrier pigeon",)))
    with pytest.raises(ConfigurationError, match="no port"):
        NativeAgent(AgentOptions(port=70000))
    with pytest.raises(ConfigurationError, match="others reach"):
        NativeAgent(AgentOptions(host="0.0.0.0"))
    port = int(node.agent.endpoint.split(":")[1].split("/")[0])
    with pytest.raises(ConfigurationError, match="in use"):
        NativeAgent(AgentOptions(port=port))


def test_close_ends_everything(node: Node, other: Node) -> None:
    node.lease(KEY, [0, 1, 2, 3])
    other.agent.pull(KEY, node.agent.endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S)
    wait_until(lambda: other.agent.stats().pulls == 1)
    time.sleep(0.1)
    node.agent.close()
    node.agent.close()
    assert node.wait(EventKind.LEASE_ENDED).cause == Cause.CANCELLED
    assert other.wait_end(KEY).kind == EventKind.PULL_FAILED
    with pytest.raises(TransferFailed, match="closed"):
        node.agent.open_lease(KEY)
    other.agent.pull(KEY, node.agent.endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S)
    other.agent.close()
    assert other.wait_end(KEY).cause == Cause.CANCELLED


def frame(kind: int, body: bytes) -> bytes:
    return struct.pack("<IB", len(body) + 1, kind) + body


HELLO = frame(1, struct.pack("<IH32s", 0x4E544142, 1, bytes(32)))


@NATIVE_ONLY
@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 0),
        struct.pack("<I", 0xFFFFFFFF) + bytes(64),
        frame(1, b"short"),
        frame(200, b""),
        frame(15, bytes(20)),
        HELLO + HELLO,
        HELLO + frame(9, bytes(36)),
        HELLO + frame(3, bytes(80)),
    ],
    ids=[
        "http",
        "empty",
        "huge",
        "short hello",
        "unknown type",
        "data",
        "two hellos",
        "ask unproven",
        "garbage identity",
    ],
)
def test_noise_on_the_agents_port_is_cut_off(node: Node, other: Node, noise: bytes) -> None:
    host, port = node.agent.endpoint.split("/")[0].split(":")
    with socket.create_connection((host, int(port)), timeout=HANG_S) as client:
        client.sendall(noise)
        while client.recv(4096):
            pass  # Ends when the agent closes the connection.
    node.offer(KEY, [0, 1, 2, 3])
    other.agent.pull(KEY, node.agent.endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S)
    assert other.wait_end(KEY).kind == EventKind.PULL_DONE


@NATIVE_ONLY
def test_a_source_that_agrees_before_it_is_answered(node: Node, other: Node) -> None:
    options = core.Options()
    options.incarnation = 7
    options.entropy = bytes(32)
    options.backends = ["cma", "tcp"]
    source = core.Core(options)
    source.set_geometry("model", LAYERS, BLOCKS, BLOCK_BYTES, BLOCK_TOKENS)
    token = ctypes.create_string_buffer(32)
    offer = struct.pack("<iQQII", os.getpid(), ctypes.addressof(token), BLOCK_BYTES, BLOCKS, LAYERS) + bytes(8 * LAYERS)
    agreed = b"\x08" + struct.pack("<H3sBH", 3, b"tcp", 1, 0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}/{7:016x}"
        node.agent.pull(KEY, endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S)
        server.settimeout(HANG_S)
        connection, _ = server.accept()
    offered = False
    with connection:
        connection.settimeout(HANG_S)
        events: list[core.Event] = [core.Accepted(1)]
        while events:
            for action in source.step(0.0, events):
                if isinstance(action, core.Send):
                    connection.sendall(action.frame)
                elif isinstance(action, core.OfferBackend):
                    (send,) = source.step(0.0, [core.BackendOffered(1, True, offer, "")])
                    assert isinstance(send, core.Send)
                    connection.sendall(send.frame + struct.pack("<I", len(agreed)) + agreed)
                    offered = True
            header = b"" if offered else connection.recv(4, socket.MSG_WAITALL)
            length = struct.unpack("<I", header)[0] if header else 0
            events = [core.FrameArrived(1, connection.recv(length, socket.MSG_WAITALL))] if length else []
        assert offered
        assert connection.recv(4096) == b"", "the sink goes away"
    node.agent.cancel_pull(KEY)
    assert node.wait_end(KEY).cause == Cause.CANCELLED
    other.offer(KEY, [0, 1, 2, 3])
    node.agent.pull(KEY, other.agent.endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S)
    assert node.wait_end(KEY).kind == EventKind.PULL_DONE


def test_an_agent_sleeps_while_nothing_happens(node: Node, other: Node) -> None:
    node.lease(KEY, [0, 1, 2, 3])
    other.agent.pull(KEY, node.agent.endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S)
    wait_until(lambda: node.agent.stats().pulls + other.agent.stats().pulls == 1)
    wait_idle(0.05)


@NATIVE_ONLY
def test_no_agent_there(other: Node) -> None:
    node = Node(NativeAgent(AgentOptions(connect_timeout_s=0.3)))
    other.agent.close()
    node.agent.pull(KEY, other.agent.endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S)
    failed = node.wait_end(KEY)
    node.agent.close()
    assert (failed.cause, "127.0.0.1" in failed.detail) == (Cause.UNREACHABLE, True)


@NATIVE_ONLY
def test_a_restarted_source_is_not_the_source(node: Node, other: Node) -> None:
    endpoint = other.agent.endpoint
    other.agent.close()
    reborn = Node(NativeAgent(AgentOptions(port=int(endpoint.split(":")[1].split("/")[0]))))
    reborn.offer(KEY, [0, 1, 2, 3])
    node.agent.pull(KEY, endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S)
    failed = node.wait_end(KEY)
    reborn.agent.close()
    assert (failed.cause, "restarted" in failed.detail) == (Cause.UNREACHABLE, True)
    assert node.is_poison()


@NATIVE_ONLY
def test_without_free_descriptors_an_agent_waits(node: Node, other: Node) -> None:
    """New connections are accepted once descriptors are free again; until then nothing spins."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    port = int(node.agent.endpoint.split(":")[1].split("/")[0])
    spare: list[int] = []
    with socket.socket() as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    spare.append(os.dup(0))
            client.connect(("127.0.0.1", port))
            wait_idle(0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in spare:
                os.close(descriptor)
    node.offer(KEY, [1, 2, 3, 4])
    other.agent.pull(KEY, node.agent.endpoint, first_token=0, tokens=TOKENS, blocks=SINK_BLOCKS, budget_s=HANG_S)
    assert other.wait_end(KEY).kind == EventKind.PULL_DONE
