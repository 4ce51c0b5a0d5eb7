"""Shared code of the transfer agents' contract tests: an agent with its memory, and waits with a deadline."""

from __future__ import annotations

import ctypes
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from random import Random
from typing import Any, Protocol, TypedDict

from baton_native import DeviceMemory

from baton.pool.gpu_agent import GpuAgent, direct_options
from baton.pool.staging import StagedAgent
from baton.transfer import (
    AgentOptions,
    EventKind,
    NativeAgent,
    Pool,
    TransferAgent,
    TransferEvent,
    lease_key,
    share_memory,
)
from baton.transfer.device import cuda_copies
from tests.harness.limits import HANG_S

LAYERS = 4
BLOCKS = 30
BLOCK_TOKENS = 16
BLOCK_BYTES = 24 << 10
GAP_BYTES = 64
POISON = 0xA5
TERMINAL = frozenset({EventKind.PULL_DONE, EventKind.PULL_FAILED})

KEY = lease_key("request", 0)
OPTIONS = AgentOptions(
    secret="shared",
    lease_ttl_s=HANG_S,
    unclaimed_ttl_s=HANG_S,
    wanted_timeout_s=HANG_S,
    connect_timeout_s=HANG_S,
    stall_timeout_s=HANG_S,
    chunk_bytes=256 << 10,
)
"""Nothing ends by its time: what a test waits for is an event. A layer of `SOURCE_BLOCKS` is more than one chunk."""
RAILS = tuple(f"127.0.0.{number}:0" for number in range(2, 6))
SOURCE_BLOCKS = list(range(3, 15))
SINK_BLOCKS = list(range(16, 28))
TOKENS = len(SOURCE_BLOCKS) * BLOCK_TOKENS


class Fabric(TypedDict, total=False):
    """The configuration of an agent for one backend in these tests."""

    verbs_library: str
    ucx_library: str
    gpu_library: str
    rails: tuple[str, ...]
    streams: int
    lane_bytes: int


class Memory(Protocol):
    @property
    def address(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    def read(self, offset: int, size: int) -> bytes: ...
    def write(self, offset: int, data: bytes) -> None: ...
    def fill(self, offset: int, size: int, value: int) -> None: ...


class HostMemory:
    def __init__(self, size: int, *, shared: bool) -> None:
        self.region = share_memory(size) if shared else None
        memory = ctypes.c_uint8 * size
        self._memory = memory() if self.region is None else memory.from_address(self.region.address)
        self.address = ctypes.addressof(self._memory)
        self.bytes = size

    def read(self, offset: int, size: int) -> bytes:
        return ctypes.string_at(self.address + offset, size)

    def write(self, offset: int, data: bytes) -> None:
        ctypes.memmove(self.address + offset, data, len(data))

    def fill(self, offset: int, size: int, value: int) -> None:
        ctypes.memset(self.address + offset, value, size)


class Party:
    """An agent, and waits for its events."""

    def __init__(self, agent: TransferAgent) -> None:
        self.agent = agent
        self.events: list[TransferEvent] = []

    def lease(self, key: bytes, blocks: Sequence[int]) -> int:
        generation = self.agent.open_lease(key)
        self.agent.extend_lease(key, generation, blocks)
        return generation

    def wait(
        self, *kinds: EventKind, key: bytes | None = None, layers: int = 0, timeout_s: float = HANG_S
    ) -> TransferEvent:
        """Remove and return the first event of these kinds; earlier events of other kinds stay in `events`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for event in self.events:
                if event.kind in kinds and key in (None, event.key) and event.layers >= layers:
                    self.events.remove(event)
                    return event
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise AssertionError(f"no {kinds} within {timeout_s} s; saw {self.events}, {self.agent.stats()}")
            select.select([self.agent], [], [], left_s)
            self.events += self.agent.poll()

    def wait_end(self, key: bytes, timeout_s: float = HANG_S) -> TransferEvent:
        return self.wait(*TERMINAL, key=key, timeout_s=timeout_s)

    def rest(self) -> list[TransferEvent]:
        """Return every event not waited for."""
        self.events += self.agent.poll()
        taken, self.events = self.events, []
        return taken


class Node(Party):
    """An agent and its pool; between two blocks lies a gap that must stay untouched."""

    def __init__(
        self,
        agent: TransferAgent,
        *,
        fingerprint: str = "model",
        block_bytes: int = BLOCK_BYTES,
        blocks: int = BLOCKS,
        layout: str = "",
        shared: bool = False,
        gpu_library: str | None = None,
    ) -> None:
        """`gpu_library`: the library whose CUDA memory holds the pool."""
        super().__init__(agent)
        self.block_bytes = block_bytes
        self.stride_bytes = block_bytes + GAP_BYTES
        self.blocks = blocks
        self.layer_bytes = blocks * self.stride_bytes
        size = LAYERS * self.layer_bytes
        host = HostMemory(size, shared=shared) if gpu_library is None else None
        self.memory: Memory = host or DeviceMemory(size, 0, gpu_library or "")
        self.poison()
        agent.set_pool(
            Pool(
                layer_addresses=tuple(self.memory.address + self._at(layer, 0) for layer in range(LAYERS)),
                blocks=blocks,
                block_bytes=block_bytes,
                block_stride_bytes=self.stride_bytes,
                block_tokens=BLOCK_TOKENS,
                fingerprint=fingerprint,
                region=host and host.region,
                device=None if host else 0,
                layout=layout,
            )
        )

    def close(self) -> None:
        """Close the agent and release the memory."""
        self.agent.close()
        del self.memory

    def poison(self) -> None:
        self.memory.fill(0, self.memory.bytes, POISON)

    def is_poison(self) -> bool:
        return self.memory.read(0, self.memory.bytes) == all_poison(self.memory.bytes)

    def _at(self, layer: int, block: int) -> int:
        return layer * self.layer_bytes + block * self.stride_bytes

    def address(self, layer: int, block: int) -> int:
        return self.memory.address + self._at(layer, block)

    def read(self, layer: int, block: int) -> bytes:
        return self.memory.read(self._at(layer, block), self.block_bytes)

    def write(self, layer: int, block: int, data: bytes) -> None:
        assert len(data) == self.block_bytes
        self.memory.write(self._at(layer, block), data)

    def gaps_are_untouched(self) -> bool:
        gap = bytes([POISON]) * GAP_BYTES
        return all(
            self.memory.read(self._at(layer, block) + self.block_bytes, GAP_BYTES) == gap
            for layer in range(LAYERS)
            for block in range(self.blocks)
        )

    def fill(self, blocks: Sequence[int], seed: int = 0) -> None:
        """Write content that encodes layer, position in the lease and `seed`."""
        for layer in range(LAYERS):
            for position, block in enumerate(blocks):
                self.write(layer, block, content(layer, position, seed, self.block_bytes))

    def holds(
        self, blocks: Sequence[int], *, first: int = 0, seed: int = 0, layers: Sequence[int] | None = None
    ) -> bool:
        return all(
            self.read(layer, block) == content(layer, first + position, seed, self.block_bytes)
            for layer in (range(LAYERS) if layers is None else layers)
            for position, block in enumerate(blocks)
        )

    def offer(self, key: bytes, blocks: Sequence[int], *, seed: int = 0) -> int:
        """Fill the blocks and open a lease of them, with all layers ready."""
        self.fill(blocks, seed)
        return self.offer_as_is(key, blocks)

    def offer_as_is(self, key: bytes, blocks: Sequence[int]) -> int:
        """Open a lease of blocks with whatever they hold, with all layers ready."""
        generation = self.lease(key, blocks)
        tokens = len(blocks) * BLOCK_TOKENS
        self.agent.post_ready(key, generation, -1, tokens)
        self.agent.complete_lease(key, generation, tokens)
        return generation


def make_gpu_agent(
    options: AgentOptions, slots: int, *, stream: int | None = None, adapters: bool = False, host: str = "", **more: Any
) -> GpuAgent:
    """Return an agent whose pool other GPUs read, and other peers staged. `stream`: in which its engine works."""
    options = replace(options, tells_asks=True)
    staged = StagedAgent(
        NativeAgent(replace(options, backends=("direct",))),
        cuda_copies(0, library=options.gpu_library),
        slots,
        on_ask=True,
        stream=lambda: stream,
    )
    direct = NativeAgent(direct_options(replace(options, host_id=host), adapters=adapters))
    return GpuAgent(direct, staged, stream=lambda: stream, **more)


@cache
def all_poison(size: int) -> bytes:
    return bytes([POISON]) * size


@lru_cache(maxsize=512)
def content(layer: int, position: int, seed: int, size: int = BLOCK_BYTES) -> bytes:
    """Return bytes that differ between any two parts, even of the same block."""
    return Random(f"{layer} {position} {seed}").randbytes(size)


def wait_until(condition: Callable[[], bool], timeout_s: float = HANG_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not become true"
        time.sleep(0.002)


MakeAgent = Callable[..., TransferAgent]
"""The type of the fixture `make_agent`, which takes fields of AgentOptions."""
MakeNode = Callable[..., Node]
"""The type of the fixture `make_node`, which also takes arguments of `Node`; `host`: not in a GPU's memory."""


def pull(sink: Node, source: Node, key: bytes = KEY, *, first_token: int = 0, budget_s: float = HANG_S) -> None:
    """Pull the content of `SOURCE_BLOCKS`, from `first_token` on, into `SINK_BLOCKS`."""
    blocks = SINK_BLOCKS[first_token // BLOCK_TOKENS :]
    sink.agent.pull(
        key, source.agent.endpoint, first_token=first_token, tokens=TOKENS, blocks=blocks, budget_s=budget_s
    )


def begin(source: Node, sink: Node) -> int:
    """Let a pull get its first layer and wait for the others."""
    source.fill(SOURCE_BLOCKS)
    generation = source.lease(KEY, SOURCE_BLOCKS)
    source.agent.post_ready(KEY, generation, 0, TOKENS)
    pull(sink, source)
    sink.wait(EventKind.PULL_PROGRESS)
    return generation


def pull_whole(sink: Node, source: Node) -> TransferEvent:
    """Offer all blocks and pull them; return the pull's last event, and check every byte if it is done."""
    source.offer(KEY, SOURCE_BLOCKS, seed=3)
    pull(sink, source)
    end = sink.wait_end(KEY)
    assert end.kind == EventKind.PULL_FAILED or sink.holds(SINK_BLOCKS, seed=3)
    assert sink.gaps_are_untouched()
    return end


def assert_nothing_left(*nodes: Party) -> None:
    def is_empty(node: Party) -> bool:
        stats = node.agent.stats()
        return (stats.leases, stats.leased_blocks, stats.pulls, stats.parked) == (0, 0, 0, 0)

    # The last release may still be in flight. A lease that was forgotten would end, too, when it expires.
    expired = [node.agent.stats().leases_expired for node in nodes]
    wait_until(lambda: all(is_empty(node) for node in nodes))
    assert [node.agent.stats().leases_expired for node in nodes] == expired


def wait_idle(share: float) -> None:
    """Wait until this process takes less than `share` of a CPU for half a second."""

    def is_idle() -> bool:
        before_s = time.process_time()
        time.sleep(0.5)
        return time.process_time() - before_s < share * 0.5

    wait_until(is_idle)
