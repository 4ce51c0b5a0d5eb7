"""The events under which peers' routers and the simulator's are compared: a trace's requests, one event at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final, Literal

from baton_simulator.routers.protocol import Arrival, Role, Router, WorkerSpec
from baton_simulator.traffic import skewed
from baton_simulator.traffic.library import load
from baton_simulator.traffic.trace import Trace

BLOCK_TOKENS: Final = 64
"""Prompts are shortened: a block of the trace becomes one of so many characters, each a token."""
BLOCK_START, TAIL_START = 0x20000, 0xE0000
"""Code points that begin a block or a tail. No two different ones begin alike, so text matches as ids do."""
POPULAR: Final = 5
"""Prefixes of the skewed trace that overload their workers."""
CACHED_BLOCKS: Final = 2000
PART_REQUESTS: Final = 100
PARTS: Final = 6
PART_S: Final = 1000.0
"""Time of the simulator between two parts."""

Kind = Literal["arrive", "first", "last", "pause"]


@dataclass(frozen=True, slots=True)
class Event:
    at_s: float
    kind: Kind
    arrival: Arrival
    text: str
    """The prompt."""


NewRouter = Callable[[Sequence[WorkerSpec], Random], Router]
Scenario = Callable[[int], list[Event]]
Choices = dict[str, dict[Role, str]]
"""Request → role → worker."""
CacheLog = dict[str, tuple[str, Sequence[int], Sequence[int]]]
"""Request → (worker, stored, evicted) when its prompt was computed."""


def names(fleet: dict[Role, int]) -> dict[Role, list[str]]:
    return {role: [f"{role}-{n}" for n in range(count)] for role, count in fleet.items()}


def conversation(requests: int) -> list[Event]:
    return events(load("conversation", seed=1), requests, token_s=0.05)


def popular_prefixes(requests: int) -> list[Event]:
    """Return requests of few prefixes and long answers, so that some workers are overloaded and others idle."""
    trace = load("skewed", seed=1)
    popular = [each for each in trace.requests if each.blocks[0] < POPULAR * skewed.PREFIX_BLOCKS[1]]
    return events(replace(trace, requests=popular), requests, token_s=1.5)


def parts_with_pauses(requests: int) -> list[Event]:
    """Return requests in parts, each ended before a pause that outlasts the peer's interval between evictions."""
    sent = events(load("skewed", seed=1), min(requests, PARTS * PART_REQUESTS), token_s=0.5)
    found: list[Event] = []
    for event in sorted(sent, key=lambda event: (_part(event), event.at_s)):
        if found and _part(event) > _part(found[-1]):
            found.append(replace(event, kind="pause"))
        found.append(event)
    return [replace(event, at_s=_part(event) * PART_S) for event in found]


def _part(event: Event) -> int:
    return int(event.arrival.id.rpartition("-")[2]) // PART_REQUESTS


def events(trace: Trace, requests: int, token_s: float) -> list[Event]:
    """Return the events of the trace's first requests, in order of time."""
    scale = BLOCK_TOKENS / trace.block_tokens
    numbers: dict[int, int] = {}
    found: list[Event] = []
    for n, request in enumerate(trace.requests[:requests]):
        blocks = tuple(numbers.setdefault(block, len(numbers)) for block in request.blocks)
        tail = max(1, int((request.prompt_tokens - len(blocks) * trace.block_tokens) * scale))
        text = "".join(chr(BLOCK_START + block).ljust(BLOCK_TOKENS, ".") for block in blocks)
        text += chr(TAIL_START + n).ljust(tail, ".")
        arrival = Arrival(f"{trace.name}-{n}", "", BLOCK_TOKENS, blocks, len(text), 1024)
        first_s = request.at_s + 0.2 + request.prompt_tokens / 20_000
        last_s = first_s + request.output_tokens * token_s
        found += [
            Event(request.at_s, "arrive", arrival, text),
            Event(first_s, "first", arrival, text),
            Event(last_s, "last", arrival, text),
        ]
    return sorted(found, key=lambda event: event.at_s)


def warm_up(workers: int) -> list[Event]:
    """Return requests that have nothing in common, one per worker: where they go tells the order of the workers."""
    texts = [chr(TAIL_START + 0x10000 + n) * 10 for n in range(workers)]
    arrivals = [Arrival(f"warm-{n}", "", BLOCK_TOKENS, (), len(text), 1024) for n, text in enumerate(texts)]
    kinds: Sequence[Kind] = ("arrive", "first", "last")
    return [Event(0.0, kind, arrival, text) for kind in kinds for arrival, text in zip(arrivals, texts, strict=True)]


class Cache:
    """One worker's prefix cache, least recently used blocks evicted first, those at a prompt's end before the rest."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def store(self, blocks: Sequence[int]) -> tuple[int, list[int]]:
        """Return how many of the prompt's leading blocks were there already, and what was evicted for the others."""
        held = next((at for at, block in enumerate(blocks) if block not in self._blocks), len(blocks))
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        return held, [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - CACHED_BLOCKS)]
