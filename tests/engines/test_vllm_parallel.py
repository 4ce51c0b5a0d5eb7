"""Tensor parallelism: engines of two ranks and of one hand over to each other, rank to rank, and fail as one."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_pair import Pair, greedy, prompt, started_pair
from engine_process import EngineError, until

pytestmark = pytest.mark.nightly

BLOCK = 32
SEEDS = itertools.count(1000)
"""Engines stand in several pairs: what one test had computed, the next must not find cached."""


@pytest.fixture(scope="module")
def parallel(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two engines of two ranks: the tiny model has two KV heads, one for each."""
    with started_pair(tiny_model, tmp_path_factory, tensor_parallel_size=2) as pair:
        yield pair


@pytest.fixture(params=["2 to 1", "1 to 2", "2 to 2"])
def ranks(request: pytest.FixtureRequest, engines: Pair, parallel: Pair) -> Iterator[Pair]:
    """A prefill and a decode engine with so many ranks, checked after each test."""
    pair = {
        "2 to 1": Pair(parallel.prefill, engines.decode),
        "1 to 2": Pair(engines.prefill, parallel.decode),
        "2 to 2": parallel,
    }[request.param]
    yield pair
    pair.settled()


def test_each_rank_has_an_agent_and_all_say_the_same_of_their_kv(engines: Pair, parallel: Pair) -> None:
    assert [len(engine.facts["agents"]) for engine in (engines.prefill, parallel.prefill)] == [1, 2]
    assert engines.prefill.facts["kv_identity"] == parallel.decode.facts["kv_identity"]
    assert engines.prefill.facts["kv_bytes_per_token"] == parallel.decode.facts["kv_bytes_per_token"]


def test_nothing_of_the_ranks_memory_would_outlive_them(parallel: Pair) -> None:
    mapped = Path(f"/proc/{parallel.prefill.worker_pids()[0]}/maps").read_text()
    names = {line.split(maxsplit=5)[5] for line in mapped.splitlines() if "cpushm" in line}
    assert len(names) == 2
    assert all(name.endswith("(deleted)") for name in names)


def test_output_equals_the_decode_engines_own_and_only_the_last_token_is_computed(ranks: Pair) -> None:
    # Of one source's rank, a block has all heads: each of the sink's two ranks pulls it, and takes its own.
    copies = 2 if (len(ranks.prefill.facts["agents"]), len(ranks.decode.facts["agents"])) == (1, 2) else 1
    for tokens in (33, 200, 1500):
        ids = prompt(tokens, seed=next(SEEDS))
        before = ranks.decode.ask("load")
        output, last = ranks.disaggregated(ids, 24)
        after = ranks.decode.ask("load")
        assert output == ranks.aggregated(ids, 24), tokens
        assert after["prompt_tokens_computed"] - before["prompt_tokens_computed"] == 1
        assert after["prompt_tokens_pulled"] - before["prompt_tokens_pulled"] == tokens - 1
        block_bytes = ranks.decode.facts["kv_bytes_per_token"] * BLOCK
        assert last["transferred_bytes"] == -(-(tokens - 1) // BLOCK) * block_bytes * copies
    # A second turn, of which decode holds the beginning.
    second = ids + output + prompt(100, seed=next(SEEDS))
    output, last = ranks.disaggregated(second, 16)
    assert output == ranks.aggregated(second, 16)
    assert last["cached_tokens"] == (len(ids) + 23) // BLOCK * BLOCK


def test_several_at_once(ranks: Pair) -> None:
    prompts = [prompt(tokens, seed=next(SEEDS)) for tokens in (1, 40, 333, 700, 90, 512, 513, 64)]
    names = [ranks.name() for _ in prompts]
    prefills = [ranks.send_prefill(name, ids) for name, ids in zip(names, prompts, strict=True)]
    decodes = [ranks.send_decode(name, ids, 12) for name, ids in zip(names, prompts, strict=True)]
    outputs = [decode.tokens() for decode in decodes]
    for prefill in prefills:
        prefill.wait()
    assert outputs == [ranks.aggregated(ids, 12) for ids in prompts]


def test_a_pull_that_fails_on_some_ranks_fails_the_request(ranks: Pair) -> None:
    ids, name = prompt(300, seed=next(SEEDS)), ranks.name()
    ranks.prefill.ask("faults", faults={"corrupt_every": 1})
    prefill = ranks.send_prefill(name, ids)
    with pytest.raises(EngineError) as failure:
        ranks.send_decode(name, ids, 4).wait()
    assert failure.value.code == "transfer_failed"
    prefill.wait()
    ranks.prefill.ask("faults", faults={})
    again, _ = ranks.disaggregated(ids, 4)
    assert again == ranks.aggregated(ids, 4)


def test_a_cancelled_attempt_leaves_nothing_on_any_rank(ranks: Pair) -> None:
    ids, name = prompt(900, seed=next(SEEDS)), ranks.name()
    decode = ranks.send_decode(name, ids, 4)
    until(lambda: ranks.decode.ask("stats")["pulls"] > 0)
    ranks.decode.ask("abort", request=name)
    decode.wait()
    ranks.send_prefill(name, ids).wait()
    ranks.prefill.ask("abort", request=name)


def test_a_killed_rank_ends_its_engine_and_what_waits_for_it(parallel: Pair) -> None:
    """Keep this last: the engine is gone."""
    name, ids = parallel.name(), prompt(60, seed=next(SEEDS))
    running = parallel.decode.send("generate", request=name, leg="whole", tokens=ids, sampling=greedy(3000))
    assert running.next_delta() is not None
    _, rank = parallel.decode.worker_pids()
    others = [pid for pid in parallel.decode.pids() if pid != rank]
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(EngineError) as failure:
        running.wait()
    assert failure.value.code == "engine_failed"
    for command in ("health", "load"):
        with pytest.raises(EngineError) as failure:
            parallel.decode.ask(command)
        assert failure.value.code == "engine_failed"
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in others), lambda: "ranks outlive one of them")
