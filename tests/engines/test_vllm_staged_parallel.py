"""Hand-offs of real vLLM staged between engines of two ranks and of one, in any combination, with KV pools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_pair import Pair, check_several_at_once, prompt, started_pair
from engine_process import EngineError, until

pytestmark = pytest.mark.nightly

BLOCK_TOKENS = 32


@pytest.fixture(scope="module", params=[(2, 1), (1, 2), (2, 2)], ids=lambda sizes: f"{sizes[0]} to {sizes[1]}")
def engines(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    sizes = zip(("prefill", "decode"), request.param, strict=True)
    of_role = {role: {"tensor_parallel_size": size} for role, size in sizes}
    with started_pair(tiny_model, tmp_path_factory, of_role=of_role, kv_path="staged", kv_pool_bytes=64 << 20) as pair:
        pair.disaggregated(prompt(40, seed=7), 1)  # The pools are in use from the first step on.
        yield pair


@pytest.fixture
def pair(engines: Pair) -> Iterator[Pair]:
    yield engines
    engines.settled()


@pytest.mark.parametrize("tokens", [33, 200, 1500])
def test_output_equals_one_engines_and_what_was_staged_is_history(pair: Pair, tokens: int) -> None:
    ids, full_tokens = prompt(tokens, seed=tokens), tokens // BLOCK_TOKENS * BLOCK_TOKENS
    expected = pair.aggregated(ids, 24)
    output, last = pair.disaggregated(ids, 24)
    assert (output, last["transferred_tokens"]) == (expected, tokens - 1)
    assert list(pair.decode.ask("transfers")["pulls"]["done"]) == ["direct+staged"]
    pair.settled()
    sides = (pair.prefill, pair.decode)
    for engine in sides:
        engine.ask("preempt")
    before = [engine.ask("load")["pool"]["promoted_tokens"] for engine in sides]
    assert pair.disaggregated(ids, 24)[0] == expected
    after = [engine.ask("load")["pool"]["promoted_tokens"] for engine in sides]
    assert [new - old for old, new in zip(before, after, strict=True)] == [full_tokens, full_tokens]


def test_several_at_once(pair: Pair) -> None:
    check_several_at_once(pair)


def test_a_pull_that_fails_fails_the_request_and_frees_its_slots(pair: Pair) -> None:
    ids, name = prompt(300, seed=1), pair.name()
    pair.prefill.ask("faults", faults={"corrupt_every": 1})
    prefill = pair.send_prefill(name, ids)
    with pytest.raises(EngineError) as failure:
        pair.send_decode(name, ids, 4).wait()
    assert failure.value.code == "transfer_failed"
    prefill.wait()
    pair.prefill.ask("faults", faults={})
    pair.settled()
    assert pair.disaggregated(ids, 4)[0] == pair.aggregated(ids, 4)


def test_a_cancelled_attempt_leaves_nothing_on_any_rank(pair: Pair) -> None:
    ids, name = prompt(900, seed=2), pair.name()
    decode = pair.send_decode(name, ids, 4)
    until(lambda: pair.decode.ask("stats")["pulls"] > 0)
    pair.decode.ask("abort", request=name)
    decode.wait()
    pair.send_prefill(name, ids).wait()
    pair.prefill.ask("abort", request=name)
