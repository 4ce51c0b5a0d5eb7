"""Prefill → decode over real vLLM equals the decode engine alone, and moves no more than it must."""

from __future__ import annotations

import pytest
from engine_pair import Pair, check_several_at_once, prompt
from engine_process import until

LAYERS = 4
BLOCK = 32


def block_bytes(pair: Pair) -> int:
    """Bytes of one block, all layers."""
    return pair.decode.facts["kv_bytes_per_token"] * BLOCK


def sum_of_done_pulls(pair: Pair, figure: str) -> float:
    """The bytes that the metrics count: without those of failed pulls."""
    return sum(totals[figure] for totals in pair.decode.ask("transfers")["pulls"].get("done", {}).values())


@pytest.mark.parametrize("tokens", [33, 200, 1500])
def test_output_equals_aggregated_and_only_the_last_token_is_computed(pair: Pair, tokens: int) -> None:
    ids = prompt(tokens, seed=tokens)
    before, done_before = pair.decode.ask("load"), sum_of_done_pulls(pair, "moved_bytes")
    output, last = pair.disaggregated(ids, 24)
    after = pair.decode.ask("load")
    assert output == pair.aggregated(ids, 24)
    assert after["prompt_tokens_computed"] - before["prompt_tokens_computed"] == 1
    assert after["prompt_tokens_pulled"] - before["prompt_tokens_pulled"] == tokens - 1
    assert last["transferred_tokens"] == tokens - 1
    assert last["cached_tokens"] == 0
    assert last["transferred_bytes"] == -(-(tokens - 1) // BLOCK) * block_bytes(pair)
    assert after["bytes_pulled"] - before["bytes_pulled"] == last["transferred_bytes"]
    assert sum_of_done_pulls(pair, "moved_bytes") - done_before == last["transferred_bytes"]
    assert sum_of_done_pulls(pair, "moving_s") > 0
    assert pair.prefill.ask("transfers")["agents"]["served_bytes"] > 0


def test_single_token_prompt_needs_no_transfer(pair: Pair) -> None:
    ids = prompt(1, seed=1)
    output, last = pair.disaggregated(ids, 4)
    assert output == pair.aggregated(ids, 4)
    assert last["transferred_bytes"] == 0


def test_second_turn_moves_only_what_decode_lacks(pair: Pair) -> None:
    first = prompt(200, seed=2)
    answer, _ = pair.disaggregated(first, 40)
    second = first + answer + prompt(100, seed=3)
    output, last = pair.disaggregated(second, 16)
    assert output == pair.aggregated(second, 16)
    # Decode holds the full blocks of all it has computed: prompt and answer but the last token.
    held_blocks = (len(first) + len(answer) - 1) // BLOCK
    lacking_blocks = -(-(len(second) - 1) // BLOCK) - held_blocks
    assert last["cached_tokens"] == held_blocks * BLOCK
    assert last["transferred_bytes"] == lacking_blocks * block_bytes(pair)


def test_prompt_that_decode_holds_already_moves_nothing(pair: Pair) -> None:
    ids = prompt(65, seed=4)
    first, _ = pair.disaggregated(ids, 4)
    served = pair.prefill.ask("stats")["served_bytes"]
    again, last = pair.disaggregated(ids, 4)
    assert again == first
    assert last["cached_tokens"] == 64
    assert last["transferred_bytes"] == 0
    assert pair.prefill.ask("stats")["served_bytes"] == served


def test_several_at_once(pair: Pair) -> None:
    check_several_at_once(pair)


def test_layers_arrive_while_the_next_one_is_held_back(pair: Pair) -> None:
    ids = prompt(1500, seed=20)
    name = pair.name()
    # The third chunk, which completes the prompt, stops before layer 2: layers 0 and 1 are complete.
    pair.hold(layer=2, passes=2)
    prefill = pair.send_prefill(name, ids)
    decode = pair.send_decode(name, ids, 8)
    pair.held()
    until(lambda: list(pair.decode.ask("stats")["layers_arrived"].values()) == [2])
    pair.let_go()
    output = decode.tokens()
    prefill.wait()
    assert output == pair.aggregated(ids, 8)


def test_blocks_that_another_request_writes_in_the_same_step_are_not_ready_before_it(pair: Pair) -> None:
    """vLLM counts them as cached when it schedules them."""
    ids, name, other = prompt(200, seed=22), pair.name(), pair.name()
    pair.hold(layer=0)
    busy = pair.prefill.send(
        "generate", request=pair.name(), leg="whole", tokens=prompt(10, seed=23), sampling={"max_tokens": 1}
    )
    pair.held()
    first, second = pair.send_prefill(name, ids), pair.send_prefill(other, ids)
    decode = pair.send_decode(other, ids, 8)
    until(lambda: pair.decode.ask("stats")["pulls"] == 1)
    for _ in range(2):
        pair.prefill.ask("load")  # By its second answer, vLLM has what was sent before.
    (pair.prefill.gate / "held").unlink()
    # The step that is held goes by layer 2 as well.
    pair.hold(layer=2, passes=2)
    pair.held()
    until(lambda: list(pair.decode.ask("stats")["layers_arrived"].values()) == [2])
    pair.let_go()
    expected = pair.aggregated(ids, 8)
    assert decode.tokens() == expected
    assert pair.send_decode(name, ids, 8).tokens() == expected
    for answer in (first, second, busy):
        answer.wait()


def test_decode_first_then_prefill(pair: Pair) -> None:
    ids = prompt(120, seed=21)
    name = pair.name()
    decode = pair.send_decode(name, ids, 8)
    until(lambda: pair.prefill.ask("stats")["parked"] == 1)
    pair.send_prefill(name, ids).wait()
    assert decode.tokens() == pair.aggregated(ids, 8)


def test_kv_events_name_every_block_once_without_a_gap(pair: Pair) -> None:
    for engine in (pair.prefill, pair.decode):
        batches = engine.ask("events")
        assert [batch["sequence"] for batch in batches] == list(range(1, len(batches) + 1))
        assert any("EngineBlocksStored" in batch["kinds"] for batch in batches)
