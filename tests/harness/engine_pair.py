"""Two engines that hand off to each other, what tests ask of them, and the answers."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from baton.engines.engine import (
    Engine,
    EngineBlocksRemoved,
    EngineBlocksStored,
    EngineDelta,
    EngineEventBatch,
    EngineFacts,
    EngineLoad,
    EngineRequest,
    Leg,
)
from baton.messages.attempts import Sampling, TokenLogprob
from baton.messages.base import WorkerAddress
from baton.messages.index import Tier
from tests.harness.limits import FREED_S, HANG_S

POLL_S = 0.005
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


@dataclass
class Shadow:
    """An engine's prefix cache as reconstructed from its events, by the protocol's rules."""

    held: Counter[bytes] = field(default_factory=Counter[bytes])
    sequence: int = 0
    batches: list[EngineEventBatch] = field(default_factory=list[EngineEventBatch])
    stored: dict[bytes, EngineBlocksStored] = field(default_factory=dict[bytes, EngineBlocksStored])
    """Every block ever stored, with the run it came in."""

    async def follow(self, engine: Engine) -> None:
        async for batch in engine.events():
            self.apply(batch)

    def apply(self, batch: EngineEventBatch) -> None:
        assert batch.sequence == self.sequence + 1, "events were lost"
        self.sequence = batch.sequence
        self.batches.append(batch)
        for event in batch.events:
            match event:
                case EngineBlocksStored(tier=tier) | EngineBlocksRemoved(tier=tier) if tier is not Tier.DEVICE:
                    pass
                case EngineBlocksStored():
                    assert len(event.tokens) == len(event.hashes) * event.block_tokens
                    assert event.parent is None or event.parent in self.stored, "a parent comes before its children"
                    self.held.update(event.hashes)
                    self.stored.update(dict.fromkeys(event.hashes, event))
                case EngineBlocksRemoved():
                    self.held.subtract(event.hashes)
                    assert min(self.held.values()) >= 0, "removed more often than stored"
                case _:
                    self.held.clear()

    def prefix_tokens(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return how many leading tokens of a prompt lie in held blocks."""
        children = {
            (parent, run.tokens[index * run.block_tokens : (index + 1) * run.block_tokens]): block
            for run in {id(run): run for run in self.stored.values()}.values()
            # A block belongs to its parent's tenant.
            if run.parent is not None or run.cache_salt == salt
            for index, (parent, block) in enumerate(zip((run.parent, *run.hashes), run.hashes, strict=False))
        }
        size = next(iter(self.stored.values())).block_tokens if self.stored else 1
        parent: bytes | None = None
        for start in range(0, len(tokens) - size + 1, size):
            parent = children.get((parent, tuple(tokens[start : start + size])))
            if parent is None or self.held[parent] <= 0:
                return start
        return len(tokens) // size * size


@dataclass
class Pair:
    """Two engines that hand off to each other, and the facts that tests need."""

    prefill: Engine
    decode: Engine
    prefill_facts: EngineFacts
    decode_facts: EngineFacts
    vocabulary: int
    dead_agent: str
    """A well-formed endpoint of an agent that no longer exists."""
    prefill_shadow: Shadow = field(default_factory=Shadow)
    decode_shadow: Shadow = field(default_factory=Shadow)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    """Counter for unique prompts and requests."""

    def prompt(self, tokens: int) -> list[int]:
        """Return a prompt that no test has used before."""
        source = random.Random(next(self.numbers) * 7919 + tokens)
        return [source.randrange(300, self.vocabulary) for _ in range(tokens)]

    def request(
        self,
        tokens: Sequence[int],
        sampling: Sampling = GREEDY,
        *,
        leg: Leg = Leg.WHOLE,
        name: str | None = None,
        agents: tuple[str, ...] | None = None,
        salt: str = "",
        budget_s: float = HANG_S,
    ) -> EngineRequest:
        address = WorkerAddress(worker="prefill", generation=1, agents=agents or self.prefill_facts.agents)
        return EngineRequest(
            request=name or f"request {next(self.numbers)}",
            attempt=1,
            leg=leg,
            tokens=tokens,
            sampling=sampling,
            cache_salt=salt,
            source=address if leg is Leg.DECODE else None,
            sink_ranks=len(self.decode_facts.agents) if leg is Leg.PREFILL else 0,
            budget_s=budget_s,
        )

    async def hand_off(self, tokens: Sequence[int], sampling: Sampling = GREEDY, *, salt: str = "") -> Answer:
        """Run both legs at once, as a gateway does, and return decode's answer."""
        prefill = self.request(tokens, sampling, leg=Leg.PREFILL, salt=salt)
        decode = self.request(tokens, sampling, leg=Leg.DECODE, name=prefill.request, salt=salt)
        first, answer = await asyncio.gather(collect(self.prefill, prefill), collect(self.decode, decode))
        assert first.tokens == [], "prefill's token belongs to no answer"
        return answer

    async def settled(self) -> tuple[EngineLoad, EngineLoad]:
        """Return both loads once all requests' resources are free; fail if some stay."""

        def is_settled() -> bool:
            loads = (self.prefill.load(), self.decode.load())
            return all(load.kv_usage == 0 and load.running + load.waiting + load.leased_blocks == 0 for load in loads)

        await eventually(is_settled, timeout_s=FREED_S)
        loads = (self.prefill.load(), self.decode.load())
        assert not any(load.leased for load in loads)
        return loads


@asynccontextmanager
async def shadowed(pair: Pair) -> AsyncGenerator[Pair]:
    """Follow the events of both engines until the pair is closed."""
    async with asyncio.TaskGroup() as group:
        followers = [
            group.create_task(pair.prefill_shadow.follow(pair.prefill)),
            group.create_task(pair.decode_shadow.follow(pair.decode)),
        ]
        yield pair
        for follower in followers:
            follower.cancel()


@dataclass
class Answer:
    """All deltas of one attempt, added up."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    deltas: list[EngineDelta] = field(default_factory=list[EngineDelta])
    first_s: float = 0.0
    """Time from the request to the first delta."""

    @property
    def last(self) -> EngineDelta:
        return self.deltas[-1]


async def collect(engine: Engine, request: EngineRequest) -> Answer:
    answer, began_s = Answer(), time.monotonic()
    async for delta in engine.generate(request):
        answer.first_s = answer.first_s or time.monotonic() - began_s
        assert not answer.deltas or answer.last.finish is None, "nothing comes after the end"
        answer.deltas.append(delta)
        answer.tokens += delta.tokens
        answer.logprobs += delta.logprobs
    assert answer.last.finish is not None, "the last delta says how it ended"
    return answer


def moved_bytes(engine: Engine) -> int:
    """Return the total moved by all pulls, from the metrics' figures."""
    return sum(totals.moved_bytes for totals in engine.transfers().pulls.done.values())


async def first_delta(engine: Engine, request: EngineRequest) -> tuple[AsyncIterator[EngineDelta], EngineDelta]:
    stream = engine.generate(request)
    return stream, await anext(stream)


async def eventually(condition: Callable[[], bool], *, timeout_s: float = HANG_S) -> None:
    """Wait until a condition holds; fail if it does not in time."""
    for _ in range(int(timeout_s / POLL_S)):
        if condition():
            return
        await asyncio.sleep(POLL_S)
    raise AssertionError("the condition did not come true")


def changed(sampling: Sampling, **fields: object) -> Sampling:
    return msgspec.structs.replace(sampling, **fields)
