"""What decides in each peer's router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from baton_simulator.routers.aibrix import Aibrix, AibrixOptions, PrefixTable
from baton_simulator.routers.dynamo import Dynamo, DynamoOptions
from baton_simulator.routers.peers import PEERS
from baton_simulator.routers.protocol import Arrival, Measured, Route, Router, WorkerSpec, WorkerState
from baton_simulator.routers.sglang import SGLANG, Sglang
from unit.test_simulator_routers import AGGREGATED, BLOCK_TOKENS, SEPARATED, arrival

PROMPT = tuple(range(10))


class Held:
    """A router under requests that stay in flight."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.arrivals: list[Arrival] = []

    def send(self, blocks: Sequence[int], tail_tokens: int = 0, session: str = "", now_s: float = 0.0) -> Route:
        self.arrivals.append(arrival(len(self.arrivals), blocks, tail_tokens, session))
        route = self.router.route(self.arrivals[-1], now_s)
        assert route is not None
        return route

    def prefill_all(self) -> None:
        for each in self.arrivals:
            self.router.prefilled(each, 0.0)

    def end_all(self) -> None:
        while self.arrivals:
            self.router.ended(self.arrivals.pop(), 0.0)


def held(name: str, workers: Sequence[WorkerSpec] = AGGREGATED) -> Held:
    return Held(PEERS[name](workers, Random(1)))


def idle(worker: WorkerSpec, kv_used: int = 0, decoded_tokens: int = 0) -> WorkerState:
    measured = Measured(decoded_tokens=decoded_tokens)
    return WorkerState(worker.name, worker.role, 0, 0, 0, kv_used, worker.kv_blocks_total, kv_used, measured=measured)


# ---------------------------------------------------------------- round-robin, least loaded, sticky


def test_round_robin_takes_workers_in_turn() -> None:
    fleet = held("round-robin", SEPARATED)

    routes = [fleet.send(PROMPT) for _ in range(6)]

    assert [route.decode for route in routes] == ["d0", "d1", "d2", "d3", "d0", "d1"]
    assert [route.prefill for route in routes] == ["p0", "p1", "p2", "p0", "p1", "p2"]


def test_least_loaded_takes_the_worker_with_the_fewest_requests() -> None:
    fleet = held("least-loaded")
    routes = [fleet.send(PROMPT) for _ in AGGREGATED]
    ends = fleet.arrivals[2]

    assert {route.decode for route in routes} == {"w0", "w1", "w2", "w3"}
    for _ in range(8):
        fleet.router.ended(ends, 0.0)
        assert fleet.send(PROMPT).decode == routes[2].decode
        ends = fleet.arrivals[-1]


def test_least_loaded_prefill_workers_are_free_after_the_first_token() -> None:
    fleet = held("least-loaded", SEPARATED)
    routes = [fleet.send(PROMPT) for _ in range(3)]
    fleet.router.prefilled(fleet.arrivals[1], 0.0)

    assert fleet.send(PROMPT).prefill == routes[1].prefill


def test_a_session_stays_on_its_worker_and_only_a_lost_worker_moves_it() -> None:
    fleet = held("sticky")
    before = {f"s{n}": fleet.send([n], session=f"s{n}").decode for n in range(100)}
    fewer = held("sticky", AGGREGATED[:-1])

    again = {session: fleet.send([7], session=session).decode for session in before}
    after = {session: fewer.send([7], session=session).decode for session in before}

    assert again == before
    assert set(before.values()) == {"w0", "w1", "w2", "w3"}
    assert {session for session in before if after[session] != before[session]} == {
        session for session, worker in before.items() if worker == "w3"
    }


def test_a_conversation_without_a_session_is_known_by_its_first_blocks() -> None:
    fleet = held("sticky")

    assert len({fleet.send([1, 2, *range(10, n)]).decode for n in range(10, 40)}) == 1
    assert len({fleet.send([1, n]).decode for n in range(40)}) == 4


# ---------------------------------------------------------------- sglang


def test_sglang_sends_a_known_prefix_to_its_worker_however_many_requests_that_has() -> None:
    fleet = held("sglang")

    assert {fleet.send([*PROMPT, 100 + n]).decode for n in range(50)} == {"w0"}


def test_sglang_needs_more_than_three_tenths_of_the_prompt() -> None:
    fleet = held("sglang")
    fleet.send([1, 2, 3])

    assert fleet.send([1, 2, 3, *range(100, 107)]).decode == "w1"
    assert fleet.send([1, 2, 3, *range(200, 206)]).decode == "w0"


def test_sglang_takes_the_shortest_queue_when_load_is_uneven() -> None:
    fleet = held("sglang")

    routes = [fleet.send(PROMPT) for _ in range(67)]

    # A spread of 64 is even, 65 is not. The balanced requests are recorded, but the prefix stays the first worker's.
    assert [route.decode for route in routes] == ["w0"] * 65 + ["w1", "w2"]


def test_sglang_finds_load_even_within_one_and_a_half_times() -> None:
    fleet = held("sglang", AGGREGATED[:2])
    for n in range(300):
        fleet.send([100 + n])

    # A spread of seventy between 150 and 220 requests.
    assert [fleet.send(PROMPT).decode for _ in range(70)] == ["w0"] * 70


def test_sglang_names_the_first_worker_of_a_prefix() -> None:
    fleet = held("sglang")
    for _ in range(66):
        fleet.send(PROMPT)
    fleet.end_all()

    assert fleet.send(PROMPT).decode == "w0"


def test_sglang_counts_separated_requests_from_their_first_token_on() -> None:
    fleet = held("sglang", SEPARATED)

    waiting = [fleet.send([100 + n]) for n in range(3)]
    fleet.prefill_all()
    streaming = fleet.send([200])

    assert waiting == [Route("d0", "p0")] * 3
    assert streaming == Route("d1", "p1")


def test_sglang_forgets_what_was_used_least_recently() -> None:
    options = replace(SGLANG, tree_tokens_max=12 * BLOCK_TOKENS)
    fleet = Held(Sglang(AGGREGATED[:2], options, Random(1)))
    old, new = [1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18]
    fleet.send(old)
    fleet.end_all()
    fleet.send(new)
    busy = fleet.send([99])

    # All went to w0 but the last. At the eviction w0 has 16 blocks, of which 12 may stay.
    assert busy.decode == "w1"
    assert fleet.send(new, now_s=59.0).decode == "w0"
    assert fleet.send(new, now_s=60.0).decode == "w0"
    assert fleet.send(old, now_s=60.0).decode == "w1"


# ---------------------------------------------------------------- vllm


def test_vllm_takes_the_least_loaded_of_all_holders() -> None:
    fleet = held("vllm")
    for _ in range(66):
        fleet.send(PROMPT)
    for each in fleet.arrivals[:65]:
        fleet.router.ended(each, 0.0)

    # w0 and w1 hold the prefix, w1 has one request in flight.
    assert [fleet.send(PROMPT).decode for _ in range(3)] == ["w0", "w0", "w1"]


def test_vllm_needs_more_than_three_tenths_of_the_prompt() -> None:
    fleet = held("vllm")
    fleet.send([1, 2, 3])

    assert fleet.send([1, 2, 3, *range(100, 107)]).decode == "w1"
    assert fleet.send([1, 2, 3, *range(200, 206)]).decode == "w0"


def test_vllm_prefill_counts_until_the_first_token_and_decode_from_admission_on() -> None:
    fleet = held("vllm", SEPARATED)
    fleet.send([100])
    fleet.router.prefilled(fleet.arrivals[0], 0.0)

    assert fleet.send([200]) == Route("d1", "p0")
    assert fleet.send([300]) == Route("d2", "p1")


def test_vllm_kv_aware_multiplies_uncomputed_tokens_by_requests() -> None:
    fleet = held("vllm-kv-aware", AGGREGATED[:2])
    fleet.router.cached("w1", PROMPT[:8], (), 0.0)

    # At w1 two blocks are left of each prompt, at w0 ten: 2 × 1, 4 × 2, and 6 × 3 against 10 × 1.
    assert [fleet.send(PROMPT).decode for _ in range(3)] == ["w1", "w1", "w0"]
    fleet.prefill_all()
    # Nothing is left to compute but this one: 2 × 3 there against 10 × 2.
    assert fleet.send(PROMPT).decode == "w1"


def test_vllm_kv_aware_computes_the_last_token_of_a_prompt_that_is_all_cached() -> None:
    fleet = held("vllm-kv-aware", AGGREGATED[:2])
    fleet.router.cached("w1", PROMPT, (), 0.0)

    # One block of each at w1, ten at w0: 1 × 1, 2 × 2, 3 × 3 and 4 × 4.
    assert [fleet.send(PROMPT).decode for _ in range(4)] == ["w1", "w1", "w1", "w0"]


def test_vllm_kv_aware_prefill_goes_by_tokens_alone_and_decode_in_turn() -> None:
    fleet = held("vllm-kv-aware", SEPARATED)
    fleet.router.cached("p1", PROMPT, (), 0.0)
    fleet.router.cached("d1", PROMPT, (), 0.0)

    routes = [fleet.send(PROMPT) for _ in range(9)]

    # A block each at p1, ten at the others.
    assert {route.prefill for route in routes} == {"p1"}
    # The turn goes on while the number of equal workers shrinks.
    assert [route.decode for route in routes[:4]] == ["d0", "d2", "d1", "d3"]
    assert fleet.send([100]).prefill == "p0"


# ---------------------------------------------------------------- aibrix


def test_aibrix_takes_the_longest_prefix_while_load_is_even() -> None:
    fleet = held("aibrix")
    first = fleet.send(PROMPT)
    others = {fleet.send([100 + n]).decode for n in range(3)}
    fleet.end_all()

    assert first.decode not in others
    assert fleet.send(PROMPT).decode == first.decode


def test_aibrix_passes_over_workers_above_a_standard_deviation() -> None:
    fleet = held("aibrix")
    first = fleet.send(PROMPT)

    assert fleet.send(PROMPT).decode != first.decode


def test_aibrix_leaves_out_all_but_the_least_loaded_when_load_is_uneven() -> None:
    options = AibrixOptions(standard_deviation_factor=100)
    fleet = Held(Aibrix(AGGREGATED, options, Random(1)))

    routes = [fleet.send(PROMPT) for _ in range(10)]

    assert len({route.decode for route in routes[:9]}) == 1
    assert routes[9].decode != routes[0].decode


def test_aibrix_prefill_weighs_the_unknown_share_over_load() -> None:
    fleet = Held(Aibrix(SEPARATED, AibrixOptions(standard_deviation_factor=100), Random(1)))
    first = fleet.send(PROMPT)

    assert fleet.send([*PROMPT, 100]).prefill == first.prefill
    assert fleet.send([200]).prefill != first.prefill


def test_aibrix_prefill_counts_until_the_first_token() -> None:
    fleet = held("aibrix", SEPARATED)
    routes = [fleet.send([n]) for n in range(3)]

    assert {route.prefill for route in routes} == {"p0", "p1", "p2"}
    for n in range(8):
        fleet.router.prefilled(fleet.arrivals[1 if n == 0 else -1], 0.0)
        assert fleet.send([100 + n]).prefill == routes[1].prefill


def test_aibrix_decode_prefers_free_memory() -> None:
    fleet = held("aibrix", SEPARATED)
    for worker in SEPARATED[3:]:
        fleet.router.beat(idle(worker, kv_used=0 if worker.name == "d2" else 900), 0.0)

    assert [fleet.send([n]).decode for n in range(5)] == ["d2"] * 5


def test_aibrix_decode_prefers_throughput_within_the_spread_and_lack_of_it_beyond() -> None:
    fleet = held("aibrix", SEPARATED)
    for at_s in (0.0, 1.0):
        for worker in SEPARATED[3:]:
            fleet.router.beat(idle(worker, decoded_tokens=3000 if worker.name == "d1" else 1000), at_s)
    within = fleet.send(PROMPT, now_s=1.0)
    fleet.end_all()
    for worker in SEPARATED[3:]:
        fleet.router.beat(idle(worker, decoded_tokens=3000 if worker.name == "d1" else 900), 2.0)
    fleet.router.beat(idle(SEPARATED[3], decoded_tokens=0), 3.0)

    assert within.decode == "d1"
    assert fleet.send(PROMPT, now_s=3.0).decode == "d0"


def test_aibrix_decode_takes_the_worker_that_drains_soonest() -> None:
    workers = [SEPARATED[0], *SEPARATED[3:5]]
    fleet = held("aibrix", workers)

    def steer(to: str, now_s: float) -> None:
        """Send a request to the worker whose throughput lies far below the other's."""
        for worker in workers[1:]:
            for at_s in (now_s - 0.1, now_s):
                fleet.router.beat(idle(worker, decoded_tokens=0 if worker.name == to else 1000), at_s)
        assert fleet.send([len(fleet.arrivals)], now_s=now_s).decode == to

    fleet.send([0], now_s=0.0)
    for n in range(10):
        steer("d1", 1.0 + n)
    steer("d0", 11.0)
    fleet.end_all()
    steer("d0", 12.0)
    steer("d1", 12.5)
    for worker in workers[1:]:
        fleet.router.beat(idle(worker), 13.0)

    # Each has one request, and d1 completed many more of them.
    for n in range(8):
        assert fleet.send([100 + n], now_s=13.0).decode == "d1"
        fleet.router.ended(fleet.arrivals.pop(), 13.0)


def test_aibrix_table_drops_the_oldest_and_the_expired() -> None:
    table = PrefixTable(BLOCK_TOKENS, AibrixOptions(table_blocks_max=4 * BLOCK_TOKENS))
    table.put(arrival(1, [1, 2, 3]), "w0", 0.0)
    table.put(arrival(2, [4, 5]), "w0", 1.0)

    assert table.known(arrival(3, [1, 2, 3]), ["w0"], 1.0) == {}
    assert table.known(arrival(3, [4, 5, 6]), ["w0", "w1"], 1.0) == {"w0": 66}
    assert table.known(arrival(3, [4, 5, 6]), ["w0"], 1202.0) == {}


def test_aibrix_table_is_bounded() -> None:
    table = PrefixTable(BLOCK_TOKENS, AibrixOptions())
    for n in range(10_000):
        table.put(arrival(n, [4 * n, 4 * n + 1, 4 * n + 2], tail_tokens=30), "w0", n * 0.01)

    assert 199_000 < len(table) <= 200_000


# ---------------------------------------------------------------- dynamo


def test_dynamo_follows_kv_events_until_the_backlog_outweighs_them() -> None:
    fleet = held("dynamo")
    fleet.router.cached("w2", PROMPT, (), 0.0)

    # Ten blocks are cached there. Each request adds 1.25 blocks of prompt and, PROMPT being shared, an active one. The
    # sixth would cost 7.5 + 16 blocks there and 11.25 + 11 elsewhere.
    routes = [fleet.send([*PROMPT, 100 + n], tail_tokens=BLOCK_TOKENS // 4).decode for n in range(6)]

    assert routes[:5] == ["w2"] * 5
    assert routes[5] != "w2"


def test_dynamo_forgets_evicted_blocks() -> None:
    fleet = held("dynamo")
    fleet.router.cached("w2", PROMPT, (), 0.0)
    fleet.router.cached("w2", (), PROMPT[1:], 0.0)
    fleet.router.cached("w3", PROMPT[:2], (), 0.0)

    assert fleet.send(PROMPT).decode == "w3"


def test_dynamo_counts_prompts_until_they_are_computed_and_active_blocks_to_the_end() -> None:
    fleet = held("dynamo", AGGREGATED[:2])
    first = fleet.send(range(100, 110)).decode
    second = fleet.send(range(200, 215)).decode
    fleet.router.prefilled(fleet.arrivals[1], 0.0)

    # First worker: 10 prompt blocks and 10 active ones, second: 15 active ones.
    assert second != first
    assert fleet.send([300]).decode == second
    fleet.router.prefilled(fleet.arrivals[0], 0.0)
    assert fleet.send([400]).decode == first


def test_dynamo_decode_ignores_caches_and_sharing() -> None:
    fleet = held("dynamo", SEPARATED)
    for worker in SEPARATED:
        if worker.name in ("p1", "d1"):
            fleet.router.cached(worker.name, PROMPT, (), 0.0)

    routes = [fleet.send(PROMPT) for _ in range(4)]

    assert {route.prefill for route in routes} == {"p1"}
    assert {route.decode for route in routes} == {"d0", "d1", "d2", "d3"}


def test_dynamo_temperature_spreads_requests() -> None:
    fleet = Held(Dynamo(AGGREGATED, DynamoOptions(router_temperature=1.0), Random(1)))
    fleet.router.cached("w2", PROMPT, (), 0.0)

    workers: list[str] = []
    for _ in range(200):
        workers.append(fleet.send(PROMPT).decode)
        fleet.end_all()

    # The cheapest weighs 1, the three others 1/e each.
    assert 70 < workers.count("w2") < 120
    assert set(workers) == {"w0", "w1", "w2", "w3"}
