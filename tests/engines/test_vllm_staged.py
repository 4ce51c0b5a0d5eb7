"""Hand-offs of real engines staged through host memory, over the stand-in for GPUs: tokens equal one engine's.

`make test` runs two engines of vLLM; pairs with SGLang are for the night.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cross_engines import nightly
from engine_pair import Pair, prompt, started_pair
from engine_process import Answer, EngineError, EngineProcess, until

from benchmarks.remote_engine.settings import EngineName
from tests.contract.fake_library import FakeGpu

CONTEXT_TOKENS = 1984
LONG_TOKENS = 1500
ONE_STEP_TOKENS = 1000
"""47 of the engine's 64 blocks: a second prompt takes those of the first."""
BLOCK_TOKENS, LAYERS = 32, 4
SLOT_BYTES = LAYERS * BLOCK_TOKENS * 2 * 2 * 64 * 4
"""K and V, two heads of 64 numbers, four bytes each."""
STAGED: dict[str, Any] = {
    "kv_path": "staged",
    "kv_staging_tokens": 2 * CONTEXT_TOKENS,
    "kv_pool_bytes": (64 + 128) * SLOT_BYTES,
}
SMALL: dict[EngineName, dict[str, Any]] = {
    "vllm": {
        "connector": "staged:StagedConnector",
        "num_gpu_blocks_override": 64,
        "max_model_len": CONTEXT_TOKENS,
    },
    "sglang": {
        "connector": "staged_sglang:StagedScheduler",
        "max_total_tokens": 64 * BLOCK_TOKENS,
        "context_length": CONTEXT_TOKENS,
    },
}
VLLM_ONLY = pytest.mark.parametrize("engines", ["vllm to vllm"], indirect=True, scope="module")


class Gpu(FakeGpu):
    """The stand-in of one engine."""

    def __init__(self, engine: EngineProcess) -> None:
        super().__init__(engine.gate, here=False)
        self._fault, self._mode = engine.gate / "fault", engine.gate / "mode"

    def plant(self, fault: str) -> None:
        self._fault.write_text(fault)

    def call_hooks(self, mode: str) -> None:
        """Have the engine's hook for a layer called as on a GPU, see `stand_in`."""
        self._mode.write_text(mode)

    def copied(self, engine: EngineProcess) -> int:
        """Return how many copies have ended in an engine's process."""
        (pid,) = engine.worker_pids()
        return self.counts(pid)["copies"]

    def heal(self) -> None:
        for file in (self._fault, self._mode):
            file.unlink(missing_ok=True)
        self.reset()


@pytest.fixture(
    scope="module",
    params=["vllm to vllm", nightly("sglang to sglang"), nightly("vllm to sglang"), nightly("sglang to vllm")],
)
def engines(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    os.environ["BATON_TEST_GPU"] = FakeGpu.compiled()
    prefill, decode = request.param.split(" to ")
    of_role = {"prefill": SMALL[prefill], "decode": SMALL[decode]}
    with started_pair(tiny_model, tmp_path_factory, engines=(prefill, decode), of_role=of_role, **STAGED) as pair:
        yield pair


@pytest.fixture
def pair(engines: Pair) -> Iterator[Pair]:
    yield engines
    for engine in (engines.prefill, engines.decode):
        Gpu(engine).heal()
    engines.settled()


@pytest.fixture
def source(pair: Pair) -> Gpu:
    return Gpu(pair.prefill)


@pytest.fixture
def sink(pair: Pair) -> Gpu:
    return Gpu(pair.decode)


def begun(pair: Pair, tokens: list[int]) -> tuple[Answer, Answer]:
    name = pair.name()
    return pair.send_prefill(name, tokens), pair.send_decode(name, tokens, 16)


def saved_blocks(engine: EngineProcess) -> int:
    """Return how many blocks the engine's KV pool has stored."""
    return engine.ask("load")["pool"]["saved_blocks"]


def pieces(engine: EngineProcess) -> int:
    """Return in how many pieces a block is copied: SGLang keeps K and V apart."""
    return LAYERS * (2 if engine.facts["engine"].startswith("sglang") else 1)


def is_free(engine: EngineProcess) -> bool:
    """Whether no block of the engine is in use, or counts as leased."""
    load = engine.ask("load")
    return not load["kv_usage"] and not load["leased_blocks"]


@pytest.mark.parametrize("tokens", [1, 33, 200, LONG_TOKENS])
def test_output_equals_aggregated_and_only_the_last_token_is_computed(pair: Pair, tokens: int) -> None:
    ids = prompt(tokens, seed=tokens)
    before = pair.decode.ask("load")
    output, last = pair.disaggregated(ids, 24)
    after = pair.decode.ask("load")
    assert output == pair.aggregated(ids, 24)
    assert after["prompt_tokens_computed"] - before["prompt_tokens_computed"] == 1
    assert last["transferred_tokens"] == tokens - 1
    if tokens > 1:
        done = pair.decode.ask("transfers")["pulls"]["done"]
        assert list(done) == ["direct+staged"], "metrics and traces name the way"


def test_the_engines_blocks_are_free_once_they_are_copied(pair: Pair, source: Gpu) -> None:
    """The lease goes on: peers read the slots, whatever becomes of the blocks."""
    ids, name = prompt(LONG_TOKENS, seed=2), pair.name()
    source.set(hold_copies=1)
    prefill = pair.send_prefill(name, ids)
    prefill.wait()
    assert not is_free(pair.prefill)
    source.set(hold_copies=0)
    until(lambda: is_free(pair.prefill))
    assert pair.prefill.ask("stats")["leases"] == 1
    overwrite(pair, seed=3)
    assert pair.send_decode(name, ids, 16).tokens() == pair.aggregated(ids, 16)


def overwrite(pair: Pair, seed: int) -> None:
    """Have prefill compute a prompt that takes most of its blocks."""
    pair.prefill.send(
        "generate", request=pair.name(), leg="whole", tokens=prompt(1900, seed), sampling={"max_tokens": 1}
    ).wait()


def test_nothing_is_posted_before_the_copies_end(pair: Pair, source: Gpu) -> None:
    ids, before = prompt(LONG_TOKENS, seed=4), pair.decode.ask("stats")
    source.set(hold_copies=1)
    prefill, decode = begun(pair, ids)
    prefill.wait()
    until(lambda: pair.decode.ask("stats")["pulls"] == 1)
    assert pair.decode.ask("stats")["pulled_bytes"] == before["pulled_bytes"]
    source.set(hold_copies=0)
    assert decode.tokens() == pair.aggregated(ids, 16)


def test_nothing_is_promised_before_the_copies_end(pair: Pair, sink: Gpu) -> None:
    ids, before = prompt(LONG_TOKENS, seed=5), pair.decode.ask("stats")
    sink.set(hold_copies=1)
    prefill, decode = begun(pair, ids)
    prefill.wait()
    until(lambda: pair.decode.ask("stats")["pulls_done"] > before["pulls_done"])
    assert decode.lines.empty()
    sink.set(hold_copies=0)
    assert decode.tokens() == pair.aggregated(ids, 16)


def test_what_is_staged_is_in_the_pools_and_was_copied_once(pair: Pair, source: Gpu, sink: Gpu) -> None:
    # SGLang in one step: so small a cache allows no second one's saves while the first's are under way.
    tokens = ONE_STEP_TOKENS if pair.prefill.facts["engine"].startswith("sglang") else LONG_TOKENS
    ids, sides = prompt(tokens, seed=6), ((pair.prefill, source), (pair.decode, sink))
    stored, blocks = [tokens // BLOCK_TOKENS] * 2, -(-tokens // BLOCK_TOKENS)
    pair.disaggregated(prompt(40, seed=7), 1)  # The pools are in use from the first step on.
    pair.settled()
    before = [(gpu.copied(engine), saved_blocks(engine)) for engine, gpu in sides]
    pair.disaggregated(ids, 2)

    # SGLang's pool takes over what a step staged after it.
    def saved() -> list[int]:
        return [saved_blocks(engine) - old for (engine, _), (_, old) in zip(sides, before, strict=True)]

    until(lambda: saved() == stored, lambda: f"{saved()} blocks are in the pools")
    pair.settled()
    after = [gpu.copied(engine) for engine, gpu in sides]
    assert [new - old for new, (old, _) in zip(after, before, strict=True)] == [
        blocks * pieces(engine) for engine, _ in sides
    ]


@VLLM_ONLY
def test_what_was_staged_is_history(pair: Pair) -> None:
    """Both engines forget the prompt; the second hand-off computes and moves nothing but the prompt's end."""
    ids, engines = prompt(LONG_TOKENS, seed=8), (pair.prefill, pair.decode)
    full_tokens = LONG_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
    expected = pair.aggregated(ids, 16)
    assert pair.disaggregated(ids, 2)[0] == expected[:2]
    pair.settled()
    for engine in engines:
        engine.ask("preempt")
    before = [engine.ask("load")["pool"]["promoted_tokens"] for engine in engines]
    again, last = pair.disaggregated(ids, 16)
    assert again == expected
    after = [engine.ask("load")["pool"]["promoted_tokens"] for engine in engines]
    assert [new - old for old, new in zip(before, after, strict=True)] == [full_tokens, full_tokens]
    assert last["transferred_tokens"] == LONG_TOKENS - 1 - full_tokens


@pytest.mark.parametrize(("mode", "seed"), [("queued", 20), ("replayed", 21), ("captured", 22)])
def test_layers_are_ready_at_the_steps_end_whenever_a_device_calls_their_hook(
    pair: Pair, source: Gpu, mode: str, seed: int
) -> None:
    ids = prompt(LONG_TOKENS, seed=seed)
    source.call_hooks(mode)
    output, last = pair.disaggregated(ids, 16)
    assert output == pair.aggregated(ids, 16)
    assert last["transferred_tokens"] == LONG_TOKENS - 1


def test_reordered_and_late_copies_change_nothing(pair: Pair, source: Gpu, sink: Gpu) -> None:
    prompts = [prompt(tokens, seed=100 + tokens) for tokens in (40, 333, 700, 90, 512)]
    for gpu in (source, sink):
        gpu.set(reorder_copies=1, delay_ms=5)
    both = [begun(pair, ids) for ids in prompts]
    outputs = [decode.tokens() for _, decode in both]
    for prefill, _ in both:
        prefill.wait()
    assert outputs == [pair.aggregated(ids, 16) for ids in prompts]


# ---------------------------------------------------------------- planted faults


@pytest.mark.parametrize(("mode", "seed"), [("queued", 23), ("captured", 24)])
def test_a_layer_posted_in_its_hook_shows(pair: Pair, source: Gpu, mode: str, seed: int) -> None:
    """Its copy begins at once, and reads what was there before the step."""
    ids = prompt(LONG_TOKENS, seed=seed)
    source.call_hooks(mode)
    source.plant("hook")
    output, _ = pair.disaggregated(ids, 16)
    source.heal()
    assert output != pair.aggregated(ids, 16)


def test_a_post_before_the_copies_end_shows(pair: Pair, source: Gpu) -> None:
    ids = prompt(LONG_TOKENS, seed=10)
    source.plant("to_host")
    source.set(hold_copies=1)
    prefill, decode = begun(pair, ids)
    output = decode.tokens()
    prefill.wait()
    source.heal()
    assert output != pair.aggregated(ids, 16)


def test_blocks_freed_before_the_copies_end_show(pair: Pair, source: Gpu) -> None:
    """The peer reads after the copies; they have read blocks that hold another prompt by then."""
    ids, name = prompt(LONG_TOKENS, seed=11), pair.name()
    before = source.copied(pair.prefill)
    pair.disaggregated(prompt(LONG_TOKENS, seed=15), 2)
    copies = source.copied(pair.prefill) - before
    source.plant("to_host")
    source.set(hold_copies=1)
    pair.send_prefill(name, ids).wait()
    until(lambda: is_free(pair.prefill))
    saved = saved_blocks(pair.prefill)
    overwrite(pair, seed=16)
    until(lambda: is_free(pair.prefill))
    copies = 2 * copies + pieces(pair.prefill) * (saved_blocks(pair.prefill) - saved)
    source.set(hold_copies=0)
    until(lambda: source.copied(pair.prefill) == before + copies)
    source.heal()
    assert pair.send_decode(name, ids, 16).tokens() != pair.aggregated(ids, 16)


def test_a_promise_before_the_copies_end_shows(pair: Pair, sink: Gpu) -> None:
    ids = prompt(LONG_TOKENS, seed=12)
    sink.plant("to_device")
    sink.set(hold_copies=1)
    prefill, decode = begun(pair, ids)
    output = decode.tokens()
    prefill.wait()
    sink.heal()
    assert output != pair.aggregated(ids, 16)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_copies_that_follow_no_stream_are_refused(pair: Pair, role: str) -> None:
    ids, gpu = prompt(LONG_TOKENS, seed=13), Gpu(getattr(pair, role))
    pair.disaggregated(prompt(40, seed=14), 2)
    gpu.plant("unordered")
    _, decode = begun(pair, ids)
    with pytest.raises(EngineError, match="not ordered after the last write" if role == "decode" else "revoked"):
        decode.tokens()
    gpu.heal()
    assert pair.disaggregated(ids, 16)[0] == pair.aggregated(ids, 16)
