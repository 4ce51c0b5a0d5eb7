"""A pull over several addresses of its source: balance, and rails that die, hang, lie or are far."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from transfer_proxy import Proxy
from transfer_rig import BLOCK_TOKENS, KEY, LAYERS, OPTIONS, RAILS, Node, assert_nothing_left, wait_until

from baton.errors import ConfigurationError
from baton.transfer import AgentOptions, Cause, EventKind, NativeAgent, RailShare, TransferEvent, lease_key
from tests.harness.limits import HANG_S

BLOCK_BYTES = 520 << 10
"""Makes a chunk one block, so that a pull has enough chunks to spread."""
MIDDLE = BLOCK_BYTES * 5 // 2
"""Delay of a chunk, so that one is outstanding when a rail breaks."""
BLOCKS = list(range(16))
MANY = list(range(40))
TOKENS = len(BLOCKS) * BLOCK_TOKENS
WARMING = b"the first to try"
BYTES = LAYERS * len(BLOCKS) * BLOCK_BYTES
IMPATIENT: dict[str, Any] = {"lease_ttl_s": 2.5, "connect_timeout_s": 2.5, "stall_timeout_s": 5.0}

MakeAgent = Callable[..., Node]
MakeProxy = Callable[..., Proxy]


@pytest.fixture
def make_agent() -> Iterator[MakeAgent]:
    nodes: list[Node] = []

    def make(blocks: int = len(BLOCKS) + 1, **changes: Any) -> Node:
        options: AgentOptions = replace(OPTIONS, backends=("tcp",), **changes)
        nodes.append(Node(NativeAgent(options), block_bytes=BLOCK_BYTES, blocks=blocks))
        return nodes[-1]

    yield make
    for node in nodes:
        node.agent.close()


@pytest.fixture
def source(make_agent: MakeAgent) -> Node:
    return make_agent(rails=RAILS)


@pytest.fixture
def make_proxy() -> Iterator[MakeProxy]:
    proxies: list[Proxy] = []

    def make(address: str, *, hangs: bool = False) -> Proxy:
        proxies.append(Proxy(address, hangs=hangs))
        return proxies[-1]

    yield make
    for proxy in proxies:
        proxy.close()


def rails_of(node: Node) -> list[str]:
    return node.agent.endpoint.partition("/")[0].split(",")


def endpoint(node: Node, rails: list[str]) -> str:
    """Return the agent's endpoint with other addresses in it."""
    return ",".join(rails) + "/" + node.agent.endpoint.partition("/")[2]


def pull(sink: Node, source: str, key: bytes = KEY, blocks: list[int] = BLOCKS) -> TransferEvent:
    tokens = len(blocks) * BLOCK_TOKENS
    sink.agent.pull(key, source, first_token=0, tokens=tokens, blocks=blocks, budget_s=20.0)
    return sink.wait_end(key)


def carried(done: TransferEvent) -> dict[str, RailShare]:
    return {share.rail: share for share in done.rails}


def use_every_rail(source: Node, sink: Node, rails: list[str]) -> None:
    """Pull until each rail has carried a part, then drop the events."""
    used: set[str] = set()
    while len(used) < len(rails):
        source.offer_as_is(WARMING, MANY)
        done = pull(sink, endpoint(source, rails), WARMING, MANY)
        source.wait(EventKind.LEASE_RELEASED)
        # On a busy machine a rail may seem so slow that some pulls do without it.
        used |= carried(done).keys()
    sink.poison()


def pull_until(proxy: Proxy, source: Node, sink: Node, address: str) -> tuple[TransferEvent, int]:
    """Pull until the proxy breaks: on a busy machine a rail may seem so slow that pulls do without it for a second.

    Return the end of the last pull, and what the proxy had passed before.
    """
    give_up_at_s = time.monotonic() + 20.0
    for attempt in itertools.takewhile(lambda _: time.monotonic() < give_up_at_s, itertools.count()):
        before_bytes, key = proxy.passed_bytes, lease_key("request", attempt)
        source.offer(key, BLOCKS)
        done = pull(sink, address, key)
        if proxy.broke.is_set():
            return done, before_bytes
        source.wait(EventKind.LEASE_RELEASED)
        sink.poison()
        time.sleep(0.05)
    raise AssertionError("the rail that breaks is not used")


def assert_arrived(done: TransferEvent, source: Node, sink: Node, blocks: list[int] = BLOCKS) -> None:
    size = LAYERS * len(blocks) * BLOCK_BYTES
    assert (done.kind, done.bytes) == (EventKind.PULL_DONE, size), done
    assert sum(share.bytes for share in done.rails) == size
    assert sink.holds(blocks)
    assert sink.gaps_are_untouched()
    source.wait(EventKind.LEASE_RELEASED)
    assert_nothing_left(source, sink)


def test_equal_rails_carry_equal_bytes(make_agent: MakeAgent) -> None:
    source, sink = make_agent(len(MANY), rails=RAILS), make_agent(len(MANY))
    source.offer(first := KEY[::-1], MANY)  # While it runs the rails are connected.
    before = carried(pull(sink, source.agent.endpoint, first, MANY))
    source.wait(EventKind.LEASE_RELEASED)
    sink.poison()
    source.offer(KEY, MANY)
    done = pull(sink, source.agent.endpoint, blocks=MANY)
    assert_arrived(done, source, sink, MANY)
    assert sorted(carried(done)) == sorted(rails_of(source))
    for share in done.rails:
        assert share.bytes == pytest.approx(done.bytes / len(RAILS), rel=0.1), done.rails
        assert (share.chunks, share.retired) == (share.bytes // BLOCK_BYTES, 0)
    assert isinstance(sink.agent, NativeAgent)
    assert {share.rail: share.bytes for share in sink.agent.rails()} == {
        share.rail: share.bytes + (before[share.rail].bytes if share.rail in before else 0) for share in done.rails
    }
    assert all(share.bytes_per_s > 0 for share in sink.agent.rails())


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("broken", [0, 2])
def test_a_rail_dies_in_the_middle(make_agent: MakeAgent, make_proxy: MakeProxy, broken: int, hangs: bool) -> None:
    """Rail 0 connects first, so it carries asks and answers."""
    source, sink = make_agent(len(MANY), rails=RAILS, **IMPATIENT), make_agent(len(MANY), **IMPATIENT)
    rails = rails_of(source)
    proxy = make_proxy(rails[broken], hangs=hangs)
    rails[broken] = proxy.address
    use_every_rail(source, sink, rails)
    proxy.break_after(MIDDLE)
    done, before_bytes = pull_until(proxy, source, sink, endpoint(source, rails))
    assert_arrived(done, source, sink)
    lost = carried(done).pop(proxy.address)
    assert lost.retired == 1
    assert lost.bytes < proxy.passed_bytes - before_bytes, "what was cut in the middle came another way"
    assert not any(share.retired for share in done.rails if share.rail != proxy.address)
    assert sink.agent.stats().lanes_retired == 1
    sink.poison()
    proxy.mend()  # What was on the way arrives at a closed connection.
    wait_until(lambda: sink.agent.stats().pulls == 0)
    source.offer(KEY[::-1], BLOCKS, seed=5)
    sink.agent.pull(
        KEY[::-1], endpoint(source, rails), first_token=0, tokens=BLOCK_TOKENS, blocks=[16], budget_s=HANG_S
    )
    assert sink.wait_end(KEY[::-1]).kind == EventKind.PULL_DONE
    sink.poison()
    assert sink.is_poison()


@pytest.mark.parametrize(("hangs", "cause"), [(False, Cause.UNREACHABLE), (True, Cause.STALLED)])
def test_all_rails_die(make_agent: MakeAgent, make_proxy: MakeProxy, hangs: bool, cause: Cause) -> None:
    source, sink = make_agent(len(MANY), rails=RAILS, **IMPATIENT), make_agent(len(MANY), **IMPATIENT)
    proxies = [make_proxy(rail, hangs=hangs) for rail in rails_of(source)]
    rails = [proxy.address for proxy in proxies]
    use_every_rail(source, sink, rails)
    for proxy in proxies:
        proxy.break_after(MIDDLE)
    source.offer(KEY, BLOCKS)
    failed = pull(sink, endpoint(source, rails))
    assert failed.kind == EventKind.PULL_FAILED
    # While one rail still goes, the source can say that it has heard nothing for too long.
    assert failed.cause in ({cause, Cause.EXPIRED} if hangs else {cause}), failed
    assert sink.agent.stats().pulls == 0
    sink.poison()
    for proxy in proxies:
        proxy.mend()
    assert source.wait(EventKind.LEASE_ENDED).cause in {Cause.EXPIRED, cause}
    assert sink.is_poison()


@pytest.mark.parametrize("rail", range(len(RAILS)))
def test_a_sink_without_the_secret_reads_nothing_at_any_rail(make_agent: MakeAgent, source: Node, rail: int) -> None:
    other = make_agent(secret="other")
    source.offer(KEY, BLOCKS)
    failed = pull(other, endpoint(source, rails_of(source)[rail:]))
    assert (failed.cause, "secret" in failed.detail) == (Cause.REFUSED, True)
    assert other.is_poison()
    assert source.agent.stats().served_bytes == 0


@pytest.mark.parametrize("secret", ["other", "shared"])
@pytest.mark.parametrize("rail", [0, 3])
def test_another_agent_behind_a_rail_writes_nothing(
    make_agent: MakeAgent, source: Node, rail: int, secret: str
) -> None:
    """The same holds for another incarnation of the source, which knows the secret but has other leases."""
    sink, other = make_agent(), make_agent(rails=("127.0.0.6:0",), secret=secret)
    other.offer(KEY, BLOCKS, seed=7)
    source.offer(KEY, BLOCKS)
    rails = rails_of(source)
    rails[rail] = rails_of(other)[0]
    done = pull(sink, endpoint(source, rails))
    assert_arrived(done, source, sink)
    assert rails[rail] not in carried(done)
    assert other.agent.stats().served_bytes == 0


def test_an_endpoint_of_one_address_is_enough(make_agent: MakeAgent, source: Node) -> None:
    sink = make_agent(lane_bytes=1)
    source.offer(KEY, BLOCKS)
    (rail,) = rails_of(source)[1:2]
    done = pull(sink, endpoint(source, [rail]))
    assert_arrived(done, source, sink)
    assert list(carried(done)) == [rail]


def test_a_small_pull_takes_one_connection(make_agent: MakeAgent, source: Node) -> None:
    sink = make_agent()
    source.offer(KEY, BLOCKS)
    tokens = BLOCK_TOKENS
    sink.agent.pull(KEY, source.agent.endpoint, first_token=0, tokens=tokens, blocks=[5], budget_s=HANG_S)
    assert len(sink.wait_end(KEY).rails) == 1


def test_a_far_rail_steps_in_when_the_near_one_is_lost(make_agent: MakeAgent, make_proxy: MakeProxy) -> None:
    source, sink = make_agent(rails=("127.0.0.2:0@far~7", "127.0.0.3:0")), make_agent(**IMPATIENT)
    source.offer(KEY, BLOCKS)
    far, near = rails_of(source)
    proxy = make_proxy(near)
    proxy.break_after(BYTES // 2)
    done = pull(sink, endpoint(source, [far, proxy.address]))
    assert_arrived(done, source, sink)
    shares = carried(done)
    assert set(shares) == {"far", proxy.address}
    assert shares[proxy.address].bytes > BYTES // 8


def test_a_labelled_rail_is_reached_from_the_own_rail_of_that_label(make_agent: MakeAgent) -> None:
    sink = make_agent(rails=("127.0.0.2:0@a", "127.0.0.4:0@b"))
    with socket.create_server(("127.0.0.5", 0)) as listener:
        listener.settimeout(HANG_S)
        address = f"127.0.0.5:{listener.getsockname()[1]}@b/{1:016x}"
        sink.agent.pull(KEY, address, first_token=0, tokens=TOKENS, blocks=BLOCKS, budget_s=HANG_S)
        accepted, (host, _) = listener.accept()
        accepted.close()
    assert host == "127.0.0.4"


@pytest.mark.parametrize(
    "rails", [("127.0.0.1",), (":0",), ("127.0.0.1:0@",), ("127.0.0.1:0~999",), ("127.0.0.1:70000",), ("0.0.0.0:0",)]
)
def test_what_is_no_rail_is_refused(rails: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="address"):
        NativeAgent(AgentOptions(rails=rails))
    with pytest.raises(ConfigurationError, match="1 to 16 addresses"):
        NativeAgent(AgentOptions(rails=("127.0.0.1:0",) * 17))
