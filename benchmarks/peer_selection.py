"""Dynamo's selection of workers, told of requests and caches."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from baton_simulator.routers.protocol import Role

from benchmarks.peer_events import (
    BLOCK_TOKENS,
    Cache,
    CacheLog,
    Choices,
    Event,
    NewRouter,
    Scenario,
    conversation,
    names,
    popular_prefixes,
)

PROGRAM: Final = Path(__file__).parent / "peer_dynamo.py"
STOP_S: Final = 10.0
ARRIVE: Final[dict[Role, str]] = {"prefill": "arrive_at_prefill"}


@dataclass(frozen=True, slots=True)
class Selection:
    """A peer whose selection of workers is called in a process: Dynamo."""

    package: str
    rule: NewRouter
    fleet: dict[Role, int]
    settings: dict[Role, dict[str, str]]
    scenarios: Sequence[Scenario] = (conversation, popular_prefixes)


class Service:
    """Dynamo's selection of one role's workers, in a process of its own."""

    def __init__(self, python: str, workers: int, settings: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [python, PROGRAM, str(BLOCK_TOKENS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **settings},
        )
        for number in range(workers):
            self.call("join", number)

    def call(self, name: str, *arguments: object) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=STOP_S)


def run_selection(python: str, selection: Selection, events: Sequence[Event]) -> tuple[Choices, CacheLog]:
    with ExitStack() as stack:
        services: dict[Role, Service] = {
            role: stack.enter_context(closing(Service(python, selection.fleet[role], settings)))
            for role, settings in selection.settings.items()
        }
        return choose(services, names(selection.fleet), events)


def choose(
    services: dict[Role, Service], workers: dict[Role, list[str]], events: Sequence[Event]
) -> tuple[Choices, CacheLog]:
    caches = {name: Cache() for each in workers.values() for name in each}
    computing: Role = "prefill" if "prefill" in services else "aggregated"
    choices: Choices = {}
    log: CacheLog = {}
    for event in events:
        request, tokens = event.arrival.id, [ord(each) for each in event.text]
        if event.kind == "arrive":
            choices[request] = {
                role: workers[role][service.call(ARRIVE.get(role, "arrive"), request, tokens)]
                for role, service in services.items()
            }
            continue
        for role, service in services.items():
            if event.kind == "last" and role != "prefill":
                service.call("last", request)
            if event.kind == "first":
                service.call("last" if role == "prefill" else "first", request)
        if event.kind == "first":
            blocks = list(event.arrival.blocks)
            worker = choices[request][computing]
            held, evicted = caches[worker].store(blocks)
            services[computing].call("store", workers[computing].index(worker), blocks, held, evicted, tokens)
            log[request] = worker, blocks[held:], evicted
    return choices, log
