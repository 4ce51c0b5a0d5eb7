"""The simulator's routers compared with the peers themselves: `make bench-peer-routing PEER_PYTHON=PYTHON`.

PYTHON is an interpreter with sglang-router, vllm-router or ai-dynamo; several may be given. Each peer that one of them
has is run over workers that answer when told to, so that at each request the same ones are in flight on both sides.
The share of requests that go to the same worker is the result, beside that of a router with another rule.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final

from baton_simulator.routers.cache_aware import CacheAwareOptions
from baton_simulator.routers.peers import PEERS
from baton_simulator.routers.protocol import Role, Route, WorkerSpec
from baton_simulator.routers.sglang import SGLANG, Sglang
from baton_simulator.routers.vllm import VLLM, Vllm

from benchmarks.peer_events import (
    BLOCK_TOKENS,
    PART_S,
    CacheLog,
    Choices,
    Event,
    NewRouter,
    Scenario,
    names,
    parts_with_pauses,
    warm_up,
)
from benchmarks.peer_proxies import EVICTION_S, Proxy, run_proxy
from benchmarks.peer_selection import Selection, run_selection
from benchmarks.report import Row, report

AGGREGATED: Final[dict[Role, int]] = {"aggregated": 8}
SEPARATED: Final[dict[Role, int]] = {"prefill": 4, "decode": 4}
SGLANG_READY = ("/workers", '"is_healthy":true')
TREE_TOKENS: Final = 10_000
"""Size of the trees whose evictions are compared, a few times less than what is sent to each worker."""


def small_tree(options: CacheAwareOptions) -> CacheAwareOptions:
    return replace(options, tree_tokens_max=TREE_TOKENS, eviction_interval_s=PART_S)


def small_tree_flags(chars_per_token: int) -> list[str]:
    return ["--max-tree-size", str(TREE_TOKENS * chars_per_token), "--eviction-interval-secs", str(EVICTION_S)]


CONTENDERS: Final[Sequence[Proxy | Selection]] = [
    Proxy("sglang-router", "round_robin", PEERS["round-robin"], AGGREGATED, ready=SGLANG_READY),
    Proxy("sglang-router", "cache_aware", PEERS["sglang"], AGGREGATED, ready=SGLANG_READY),
    Proxy(
        "sglang-router",
        "cache_aware",
        lambda workers, random: Sglang(workers, small_tree(SGLANG), random),
        AGGREGATED,
        scenarios=(parts_with_pauses,),
        flags=small_tree_flags(chars_per_token=1),
        ready=SGLANG_READY,
    ),
    Proxy("vllm-router", "round_robin", PEERS["round-robin"], AGGREGATED, has_token_ids=True),
    Proxy("vllm-router", "cache_aware", PEERS["vllm"], AGGREGATED, has_token_ids=True),
    Proxy(
        "vllm-router",
        "cache_aware",
        lambda workers, random: Vllm(workers, small_tree(VLLM), random),
        AGGREGATED,
        scenarios=(parts_with_pauses,),
        flags=small_tree_flags(chars_per_token=8),
        has_token_ids=True,
    ),
    Proxy(
        "vllm-router",
        "cache_aware",
        PEERS["vllm"],
        SEPARATED,
        separated_flag="--vllm-pd-disaggregation",
        has_token_ids=True,
    ),
    Selection("ai-dynamo", PEERS["dynamo"], AGGREGATED, {"aggregated": {}}),
    Selection(
        "ai-dynamo",
        PEERS["dynamo"],
        SEPARATED,
        {
            "prefill": {},
            "decode": {
                "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "0",
                "DYN_ROUTER_ASSUME_KV_REUSE": "false",
                "DYN_ROUTER_TRACK_PREFILL_TOKENS": "false",
            },
        },
    ),
]
NOTES: Final = (
    "Not compared: AIBrix v0.7.0, a plug-in of Envoy in Go that no package index has; sglang-router 0.3.2 separated,"
    " which never creates the trees of its two policies (`init_pd_cache_aware_policies` has no caller) and so chooses"
    " at random while loads are even; `sticky`, which hashes by another function than vllm-router, so that its"
    " workers are others by design; `vllm-kv-aware`, since the workers here send vllm-router no KV events: it"
    " follows the source."
)


class Following(Random):
    """Draws what the peer drew, where a router draws at all: a tie is broken as the peer broke it."""

    drawn: Sequence[str] = ()

    def choice(self, seq: Any) -> Any:
        return next((each for each in seq if each in self.drawn), seq[0])


def simulated(
    new_router: NewRouter,
    specs: Sequence[WorkerSpec],
    random: Random,
    events: Sequence[Event],
    peer: Choices,
    log: CacheLog,
) -> Choices:
    router = new_router(specs, random)
    choices: Choices = {}
    for event in events:
        arrival, at_s = event.arrival, event.at_s
        if event.kind == "arrive":
            if isinstance(random, Following):
                random.drawn = tuple(peer[arrival.id].values())
            route = router.route(arrival, at_s)
            assert route is not None
            choices[arrival.id] = by_role(route)
        elif event.kind == "first":
            router.prefilled(arrival, at_s)
            if arrival.id in log:
                router.cached(*log[arrival.id], at_s)
        elif event.kind == "last":
            router.ended(arrival, at_s)
    return choices


def by_role(route: Route) -> dict[Role, str]:
    if route.prefill is None:
        return {"aggregated": route.decode}
    return {"prefill": route.prefill, "decode": route.decode}


def equal_percent(peer: Choices, simulated: Choices) -> float:
    """Return the share of choices that are equal, the first requests left out, which give the workers their order."""
    pairs = [
        (worker, simulated[request][role])
        for request, workers in peer.items()
        if not request.startswith("warm")
        for role, worker in workers.items()
    ]
    return 100 * sum(a == b for a, b in pairs) / len(pairs)


def compare(python: str, contender: Proxy | Selection, requests: int, scenario: Scenario) -> Row:
    workers, log = names(contender.fleet), CacheLog()
    if isinstance(contender, Proxy):
        events = warm_up(max(contender.fleet.values())) + scenario(requests)
        peer = asyncio.run(run_proxy(python, contender, events))
        for role, each in workers.items():
            workers[role] = [peer[f"warm-{n}"][role] for n in range(len(each))]
            assert set(workers[role]) == set(each), f"idle workers were not taken in turn: {workers[role]}"
    else:
        events = scenario(requests)
        peer, log = run_selection(python, contender, events)
    specs = [WorkerSpec(name, role, 10_000, BLOCK_TOKENS) for role, each in workers.items() for name in each]
    peer_name = f"{contender.package} {find_version(python, contender.package)}"
    if isinstance(contender, Proxy):
        peer_name += f" {contender.policy}"
    fleet = "separated" if "prefill" in contender.fleet else "aggregated"
    ours, control = (
        equal_percent(peer, simulated(new_router, specs, random, events, peer, log))
        for new_router, random in ((contender.rule, Following()), (PEERS["least-loaded"], Random(1)))
    )
    name = f"{peer_name}, {fleet}, {scenario.__name__.replace('_', ' ')}"
    return Row(name=name, unit="% equal choices", ours=ours, peers={"least_loaded": control})


def find_version(python: str, package: str) -> str:
    """Return the version that the interpreter has of the package; empty if it has none."""
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", action="append", default=[], help="interpreter that has peers")
    parser.add_argument("--requests", type=int, default=600, help="requests of each comparison")
    arguments = parser.parse_args()
    rows: list[Row] = []
    missing: set[str] = set()
    for contender in CONTENDERS:
        python = next((each for each in arguments.peer_python if find_version(each, contender.package)), None)
        if python is None:
            missing.add(contender.package)
            continue
        rows += [compare(python, contender, arguments.requests, each) for each in contender.scenarios]
    report("peer_routing", rows, notes=" ".join([NOTES, *(f"Not installed: {each}." for each in sorted(missing))]))


if __name__ == "__main__":
    main()
