"""The peers' routers: one behaviour suite over all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from random import Random

import pytest
from baton_simulator.routers.peers import PEERS
from baton_simulator.routers.protocol import Arrival, Measured, Route, Router, WorkerSpec, WorkerState

BLOCK_TOKENS = 64
AGGREGATED = [WorkerSpec(f"w{n}", "aggregated", 1000, BLOCK_TOKENS) for n in range(4)]
SEPARATED = [WorkerSpec(f"p{n}", "prefill", 1000, BLOCK_TOKENS) for n in range(3)] + [
    WorkerSpec(f"d{n}", "decode", 1000, BLOCK_TOKENS) for n in range(4)
]
FLEETS = {"aggregated": AGGREGATED, "separated": SEPARATED}

every_router = pytest.mark.parametrize("new_router", PEERS.values(), ids=PEERS)
every_fleet = pytest.mark.parametrize("workers", FLEETS.values(), ids=FLEETS)
NewRouter = Callable[[Sequence[WorkerSpec], Random], Router]


def arrival(number: int, blocks: Sequence[int], tail_tokens: int = 0, session: str = "") -> Arrival:
    tokens = len(blocks) * BLOCK_TOKENS + tail_tokens
    return Arrival(f"r{number}", session, BLOCK_TOKENS, tuple(blocks), tokens, 100)


def run(router: Router, workers: Sequence[WorkerSpec], seed: int, requests: int = 200) -> list[Route]:
    """Send requests of growing conversations, finish them in random order, refuse some; return their routes.

    All begin alike, so that several workers hold a part of each.
    """
    random = Random(seed)
    conversations = [[8, 9, 100 * n + 10] for n in range(20)]
    queued: list[Arrival] = []
    decoding: list[Arrival] = []
    routes: list[Route] = []
    for number in range(requests):
        now_s = number * 0.5
        at = random.randrange(len(conversations))
        each = arrival(number, conversations[at], tail_tokens=random.randrange(BLOCK_TOKENS), session=f"s{at}")
        conversations[at].append(100 * at + 10 + len(conversations[at]))
        route = router.route(each, now_s)
        assert route is not None
        routes.append(route)
        router.cached(route.prefill or route.decode, each.blocks, (), now_s)
        queued.append(each)
        while len(queued) > 5:
            router.prefilled(queued[0], now_s)
            decoding.append(queued.pop(0))
        while len(decoding) > 10:
            router.ended(decoding.pop(random.randrange(len(decoding))), now_s)
        if random.random() < 0.02:
            router.ended(queued.pop(), now_s)
        for worker in workers:
            used = random.randrange(1000)
            measured = Measured(decoded_tokens=random.randrange(100))
            router.beat(WorkerState(worker.name, worker.role, 0, 0, 0, used, 1000, used, measured=measured), now_s)
    for each in queued + decoding:
        router.prefilled(each, requests)
        router.ended(each, requests)
    return routes


@every_fleet
@every_router
def test_every_request_gets_a_worker_of_each_role(new_router: NewRouter, workers: Sequence[WorkerSpec]) -> None:
    roles = {worker.name: worker.role for worker in workers}

    routes = run(new_router(workers, Random(1)), workers, seed=1)

    if workers is AGGREGATED:
        assert {(roles[route.decode], route.prefill) for route in routes} == {("aggregated", None)}
    else:
        assert {(roles[route.decode], roles[route.prefill or ""]) for route in routes} == {("decode", "prefill")}


@every_fleet
@pytest.mark.parametrize("name", [name for name in PEERS if name != "sticky"])
def test_ended_requests_no_longer_count(name: str, workers: Sequence[WorkerSpec]) -> None:
    router = PEERS[name](workers, Random(1))
    run(router, workers, seed=1)
    for worker in workers:
        router.beat(WorkerState(worker.name, worker.role, 0, 0, 0, 0, 1000, 0), 10_000)

    # Nothing is known of these prompts, so each goes to a worker that has none of them yet.
    routes: list[Route] = []
    for number in range(3):
        each = arrival(1000 + number, [5000 + number])
        route = router.route(each, 10_000)
        assert route is not None
        routes.append(route)
        if name == "sglang" and workers is SEPARATED:
            router.prefilled(each, 10_000)

    assert len({route.decode for route in routes}) == 3
    assert workers is AGGREGATED or len({route.prefill for route in routes}) == 3


@every_fleet
@every_router
def test_a_seed_determines_all_routes(new_router: NewRouter, workers: Sequence[WorkerSpec]) -> None:
    first, second = (run(new_router(workers, Random(7)), workers, seed=3) for _ in range(2))

    assert first == second


def test_routes_do_not_depend_on_the_order_of_hashes() -> None:
    program = "from unit.test_simulator_routers import all_routes; print(all_routes())"
    # This process has another order: its seed is random.
    other = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=True,
        text=True,
    ).stdout

    assert other == f"{all_routes()}\n"


def all_routes() -> list[list[Route]]:
    return [run(new(workers, Random(7)), workers, seed=3) for new in PEERS.values() for workers in FLEETS.values()]
