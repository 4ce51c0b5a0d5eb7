"""The KV pool behind real vLLM: what the engine forgot comes back from the pool, bit for bit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from engine_pair import AGENT, NUMBERS, OPTIONS, greedy, prompt
from engine_process import Answer, EngineError, EngineProcess, until

from baton.blocks import hash_blocks, root_key
from baton.messages.index import Tier
from baton.worker.shadow import ShadowMap
from benchmarks.remote_engine.engine import read_batch

BLOCK_TOKENS = 32
SLOT_BYTES = 4 * BLOCK_TOKENS * 2 * 2 * 64 * 4
"""Four layers of 32 tokens, K and V, two heads of 64 numbers, four bytes each."""
POOL_BYTES = 512 * SLOT_BYTES


@dataclass
class Turn:
    tokens: list[int]
    computed: int
    """Prompt tokens that the engine computed, by its own count."""
    cached: int
    promoted: int
    pulled: int = 0


class PoolEngine:
    """An engine with a small cache, and its counters around each request."""

    def __init__(self, model: Path, gate: Path, **options: Any) -> None:
        defaults = {"num_gpu_blocks_override": 64, "max_model_len": 1984, "kv_pool_bytes": POOL_BYTES}
        settings = {"model": str(model), "role": "decode", "options": OPTIONS | defaults | options, "agent": AGENT}
        self.process = EngineProcess(settings, gate)

    def load(self) -> dict[str, Any]:
        return self.process.ask("load")

    def ask(self, tokens: list[int], output_tokens: int = 24, **fields: Any) -> Turn:
        before = self.load()
        fields = {"request": f"request-{next(NUMBERS)}", "leg": "whole", "sampling": greedy(output_tokens)} | fields
        answer = self.process.send("generate", tokens=tokens, **fields)
        output = answer.tokens()
        self.saved()
        after = self.load()

        def grown(counter: str) -> int:
            return after[counter] - before[counter]

        return Turn(
            output,
            computed=grown("prompt_tokens_computed"),
            cached=grown("prompt_tokens_cached"),
            promoted=after["pool"]["promoted_tokens"] - before["pool"]["promoted_tokens"],
            pulled=grown("prompt_tokens_pulled"),
        )

    def saved(self) -> None:
        """Wait until all saves have ended: no block is in use any more."""
        self.process.settled()

    def forget(self) -> None:
        """Drop the engine's own cache, not the pool."""
        self.process.ask("preempt")


@contextmanager
def started(model: Path, gate: Path, **options: Any) -> Generator[PoolEngine]:
    engine = PoolEngine(model, gate, **options)
    try:
        engine.process.wait_started()
        yield engine
    finally:
        engine.process.close()


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolEngine]:
    with started(tiny_model, tmp_path_factory.mktemp("gate")) as engine:
        yield engine


@pytest.fixture(scope="module")
def source(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolEngine]:
    """A second engine, which prefills for the first."""
    with started(tiny_model, tmp_path_factory.mktemp("gate-source"), num_gpu_blocks_override=200) as engine:
        yield engine


def pool_of(engine: PoolEngine) -> dict[str, Any]:
    return engine.load()["pool"]


def handed_over(
    engine: PoolEngine, source: PoolEngine, tokens: list[int], *, loan: dict[str, Any] | None = None, **fields: Any
) -> Turn:
    name = f"request-{next(NUMBERS)}"
    prefill = source.process.send(
        "generate", request=name, leg="prefill", tokens=tokens, sampling={"max_tokens": 1}, loan=loan, **fields
    )
    turn = engine.ask(tokens, request=name, leg="decode", agents=source.process.facts["agents"], **fields)
    prefill.wait()
    return turn


def test_second_turn_after_eviction_computes_hardly_more_than_with_an_endless_cache(engine: PoolEngine) -> None:
    question, more = prompt(700, 1), prompt(45, 2)

    def second_turn(salt: str, *, evicted: bool) -> Turn:
        first = engine.ask(question, cache_salt=salt)
        if evicted:
            # 64 blocks of 32 tokens; these two prompts need all of them.
            for seed in (3, 4):
                engine.ask(prompt(1500, seed), 1)
        return engine.ask([*question, *first.tokens, *more], cache_salt=salt)

    endless = second_turn("endless", evicted=False)
    evicted = second_turn("evicted", evicted=True)
    assert endless.promoted == 0
    assert evicted.cached == 0, "the engine has evicted the first turn"
    assert evicted.tokens == endless.tokens
    assert evicted.computed <= endless.computed + BLOCK_TOKENS + 1
    assert evicted.promoted + evicted.computed == len(question) + 24 + len(more)


def test_device_pool_and_hand_off_serve_one_request(engine: PoolEngine, source: PoolEngine) -> None:
    tokens, salt = prompt(1000, 11), "combined"
    expected = engine.ask(tokens, cache_salt="alone").tokens
    engine.ask(tokens[: 20 * BLOCK_TOKENS + 1], 1, cache_salt=salt)
    engine.forget()
    engine.ask(tokens[: 8 * BLOCK_TOKENS + 1], 1, cache_salt=salt)
    turn = handed_over(engine, source, tokens, cache_salt=salt)
    assert turn.tokens == expected
    assert (turn.cached, turn.promoted, turn.pulled, turn.computed) == (8 * 32, 12 * 32, 1000 - 20 * 32 - 1, 1)


def test_a_prompt_that_the_pool_holds_in_full_is_not_pulled(engine: PoolEngine, source: PoolEngine) -> None:
    tokens, salt = prompt(640, 12), "full"
    expected = engine.ask(tokens, cache_salt=salt).tokens
    engine.forget()
    turn = handed_over(engine, source, tokens, cache_salt=salt)
    assert turn.tokens == expected
    assert (turn.promoted, turn.pulled, turn.computed) == (639, 0, 1)
    source.process.settled()


def test_another_salt_finds_nothing(engine: PoolEngine) -> None:
    tokens = prompt(320, 13)
    engine.ask(tokens, 1, cache_salt="mine")
    engine.forget()
    assert engine.ask(tokens, 1, cache_salt="yours").promoted == 0
    assert engine.ask(tokens, 1, cache_salt="mine").promoted == 319


def test_requests_under_pressure_get_the_tokens_they_get_alone(engine: PoolEngine) -> None:
    """Eight requests need more than the engine's blocks: they are preempted while their blocks are saved."""
    prompts = [prompt(300, 20 + number // 2) + prompt(20, 40 + number) for number in range(8)]
    alone = [engine.ask(tokens, 200, cache_salt=f"alone {number}").tokens for number, tokens in enumerate(prompts)]
    before = engine.load()["preemptions"]
    for _ in range(2):
        answers = [
            engine.process.send(
                "generate", request=f"request-{next(NUMBERS)}", leg="whole", tokens=tokens, sampling=greedy(200)
            )
            for tokens in prompts
        ]
        assert [answer.tokens() for answer in answers] == alone
    engine.saved()
    assert engine.load()["preemptions"] > before
    assert pool_of(engine)["pinned"] == 0


def test_an_aborted_promotion_leaves_nothing(engine: PoolEngine) -> None:
    tokens = prompt(1500, 50)
    engine.ask(tokens, 1)
    engine.forget()
    for _ in range(3):
        name = f"request-{next(NUMBERS)}"
        engine.process.send("generate", request=name, leg="whole", tokens=tokens, sampling=greedy(100))
        engine.process.ask("abort", request=name)
        engine.saved()
    assert pool_of(engine)["pinned"] == 0


@pytest.mark.nightly
def test_after_random_requests_all_of_the_engines_blocks_can_be_had(engine: PoolEngine) -> None:
    random = Random(18)
    for _ in range(100):
        answers: list[Answer] = []
        names = [f"request-{next(NUMBERS)}" for _ in range(4)]
        for name in names:
            tokens = prompt(random.randint(40, 900), 200 + random.randrange(12))
            sampling = greedy(random.randint(1, 60))
            answers.append(engine.process.send("generate", request=name, leg="whole", tokens=tokens, sampling=sampling))
        engine.process.ask("abort", request=random.choice(names))
        for answer in answers:
            answer.wait()
    engine.saved()
    assert pool_of(engine)["pinned"] == 0
    before = engine.load()["preemptions"]
    engine.ask(prompt(1980, 300), 1)
    assert engine.load()["preemptions"] == before


def follows_events(engine: PoolEngine) -> ShadowMap:
    """Wait until a shadow map of the engine's events has as many blocks in the pool as that has."""
    digest = engine.process.facts["model_digest"]
    shadow = ShadowMap(model_digest=digest, engine_block_tokens=BLOCK_TOKENS, block_tokens=BLOCK_TOKENS)

    def agrees() -> bool:
        for batch in engine.process.ask("events")[shadow.batches :]:
            shadow.apply(read_batch(batch))
        return shadow.fingerprint(Tier.POOL).blocks == pool_of(engine)["ready"]

    until(agrees, lambda: f"{shadow.fingerprint(Tier.POOL)}, {pool_of(engine)}")
    return shadow


def test_a_pool_smaller_than_a_prompt_serves_its_first_blocks_and_its_events_tell_what(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with started(tiny_model, tmp_path_factory.mktemp("gate-small"), kv_pool_bytes=8 * SLOT_BYTES) as engine:
        tokens = prompt(700, 60)
        first = engine.ask(tokens)
        assert pool_of(engine)["slots"] == 8
        assert pool_of(engine)["dropped_blocks"] > 0
        engine.forget()
        second = engine.ask(tokens)
        assert second.tokens == first.tokens
        assert (second.promoted, second.computed) == (8 * BLOCK_TOKENS, 700 - 8 * BLOCK_TOKENS)
        for seed in range(5):
            engine.ask(prompt(100, 130 + seed), 40, cache_salt=str(seed % 2))
        assert pool_of(engine)["evicted_blocks"] > 0
        assert follows_events(engine).ignored_blocks == 0


@pytest.mark.nightly
def test_two_ranks_save_and_promote_together(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with started(tiny_model, tmp_path_factory.mktemp("gate-ranks"), tensor_parallel_size=2) as engine:
        tokens = prompt(640, 140)
        first = engine.ask(tokens)
        engine.forget()
        second = engine.ask(tokens)
        assert second.tokens == first.tokens
        assert (second.promoted, second.computed) == (639, 1)
        # A slot of either rank has half of the heads.
        assert pool_of(engine)["slots"] == 512


@pytest.mark.nightly
def test_without_memory_for_the_pool_the_engine_serves_without_it(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    with started(tiny_model, tmp_path_factory.mktemp("gate-refused"), kv_pool_bytes=1 << 45) as engine:
        tokens = prompt(200, 70)
        first = engine.ask(tokens)
        engine.forget()
        assert engine.ask(tokens).tokens == first.tokens
        assert pool_of(engine)["slots"] == 0
    assert "this engine runs without a KV pool: memory for a KV pool of" in capfd.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("fault", [None, "PromisingConnector"])
def test_late_copies_change_no_token_and_planted_faults_do(
    fault: str | None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Copies end late and in any order. A connector that promises or frees before they end gives wrong tokens."""
    connector = f"delayed:{fault or 'DelayedConnector'}"
    with started(tiny_model, tmp_path_factory.mktemp("gate-late"), connector=connector) as engine:
        tokens = prompt(22 * BLOCK_TOKENS, 80)
        first = engine.ask(tokens, cache_salt="late")
        until(lambda: pool_of(engine)["ready"] >= 22)
        # The engine forgets them, and some of the saves of these still wait.
        for seed in (81, 82, 83):
            engine.ask(prompt(1500, seed), 1)
        second = engine.ask(tokens, cache_salt="late")
        assert second.promoted == 22 * BLOCK_TOKENS - 1
        assert (second.tokens == first.tokens) is (fault is None)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", [None, "FreeingConnector"])
def test_blocks_stay_until_a_save_has_read_them(
    fault: str | None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Saves read the blocks only after others have asked for all of the engine's 64. A connector that frees the blocks
    of a save at once gives wrong tokens."""
    gate = tmp_path_factory.mktemp("gate-held")
    with started(tiny_model, gate, connector=f"delayed:{fault or 'HoldingConnector'}") as engine:

        def answer(tokens: list[int], output_tokens: int, salt: str) -> list[int]:
            fields = {"request": f"request-{next(NUMBERS)}", "leg": "whole", "cache_salt": salt}
            return engine.process.send("generate", tokens=tokens, sampling=greedy(output_tokens), **fields).tokens()

        tokens = prompt(22 * BLOCK_TOKENS, 85)
        first = answer(tokens, 24, "held")
        # Half of the blocks are free while saves hold the rest.
        for seed in (86, 87, 88):
            answer(prompt(30 * BLOCK_TOKENS, seed), 1, "others")
        assert pool_of(engine)["ready"] == 0
        (gate / "copy").touch()
        until(lambda: pool_of(engine)["ready"] >= 22)
        engine.saved()
        engine.forget()
        second = engine.ask(tokens, cache_salt="held")
        assert second.promoted == 22 * BLOCK_TOKENS - 1
        assert (second.tokens == first) is (fault is None)


@pytest.mark.nightly
def test_a_preempted_prefill_that_is_aborted_during_its_promotion_is_freed_once(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    gate = tmp_path_factory.mktemp("gate-promotion")
    # Each second step fills a block. vLLM takes all blocks back after one that does not, when none is being saved.
    with started(tiny_model, gate, connector="delayed:WaitingConnector", max_num_batched_tokens=16) as engine:
        (gate / "hold").write_text(json.dumps({"layer": 0, "pass": 8}))
        name = f"request-{next(NUMBERS)}"
        prefill = engine.process.send(
            "generate", request=name, leg="prefill", tokens=prompt(300, 89), sampling=greedy(1)
        )
        until((gate / "held").exists)
        preempted = engine.process.send("preempt")
        (gate / "hold").unlink()
        preempted.wait()
        until(lambda: pool_of(engine)["pinned"] > 0)
        engine.process.ask("abort", request=name)
        prefill.wait()
        (gate / "promote").touch()
        engine.saved()
        assert pool_of(engine)["pinned"] == 0
        assert len(engine.ask(prompt(100, 90)).tokens) == 24


def lend(
    source: PoolEngine, engine: PoolEngine, tokens: list[int], salt: str, budget_s: float = 20.0
) -> dict[str, Any]:
    """Have the source's pool lend a prompt's prefix; return the loan, as the engine's request names it."""
    key = os.urandom(16).hex()
    root = root_key(source.process.facts["model_digest"], salt=salt)
    blocks = hash_blocks(root, b"".join(token.to_bytes(4, "little") for token in tokens), 32)
    sink_ranks = len(engine.process.facts["pool_agents"])
    lent = source.process.ask("lend", key=key, blocks=blocks.hex(), sink_ranks=sink_ranks)
    endpoints = source.process.facts["pool_agents"]
    return {"key": key, "endpoints": endpoints, "tokens": lent, "budget_s": budget_s}


@pytest.mark.parametrize("leg", ["whole", "prefill"])
def test_a_prefix_that_only_the_source_computed_is_borrowed(engine: PoolEngine, source: PoolEngine, leg: str) -> None:
    tokens, salt = prompt(800, 100), f"lent to {leg}"
    source.ask(tokens, cache_salt=salt)
    expected = engine.ask(tokens, cache_salt="undisturbed").tokens
    loan = lend(source, engine, tokens, salt)
    assert loan["tokens"] == 800
    before = pool_of(engine)["borrowed_tokens"]
    if leg == "prefill":
        # The borrower prefills, the source decodes.
        source.forget()
        assert handed_over(source, engine, tokens, cache_salt=salt, loan=loan).tokens == expected
    else:
        turn = engine.ask(tokens, cache_salt=salt, loan=loan)
        assert turn.tokens == expected
        assert (turn.promoted, turn.computed) == (799, 1)
    assert pool_of(engine)["borrowed_tokens"] - before == 800
    source.process.settled()
    assert (pool_of(source)["pinned"], pool_of(engine)["pinned"]) == (0, 0)


def test_own_blocks_and_borrowed_ones_serve_one_request(engine: PoolEngine, source: PoolEngine) -> None:
    tokens, salt = prompt(900, 101), "partly lent"
    source.ask(tokens[:640], 1, cache_salt=salt)
    engine.ask(tokens[:320], 1, cache_salt=salt)
    expected = engine.ask(tokens, cache_salt="undisturbed 101").tokens
    turn = engine.ask(tokens, cache_salt=salt, loan=lend(source, engine, tokens, salt))
    assert turn.tokens == expected
    assert (turn.cached, turn.promoted, turn.computed) == (320, 320, 260)


@pytest.mark.parametrize("case", ["never lent", "nobody there", "late"])
def test_a_loan_that_fails_costs_tokens_and_no_request(engine: PoolEngine, source: PoolEngine, case: str) -> None:
    tokens, salt = prompt(600, 110), f"failed: {case}"
    expected = engine.ask(tokens, cache_salt="undisturbed 110").tokens
    source.ask(tokens, 1, cache_salt=salt)
    loan = lend(source, engine, tokens, salt)
    match case:
        case "never lent":
            loan |= {"key": os.urandom(16).hex(), "budget_s": 0.5}
        case "nobody there":
            loan |= {"endpoints": ["127.0.0.1:9/0000000000000001"], "budget_s": 2.0}
        case _:
            loan |= {"budget_s": 0.0}
    before = pool_of(engine)["borrows_failed"]
    turn = engine.ask(tokens, cache_salt=salt, loan=loan)
    assert turn.tokens == expected
    assert (turn.promoted, turn.computed) == (0, 600)
    assert pool_of(engine)["borrows_failed"] == before + 1
    assert pool_of(engine)["pinned"] == 0


def test_a_pool_lends_half_of_its_slots_at_most(engine: PoolEngine, source: PoolEngine) -> None:
    salt = "much lent"
    prompts = [prompt(1900, 120 + number) for number in range(6)]
    for tokens in prompts:
        source.ask(tokens, 1, cache_salt=salt)
    loans = [lend(source, engine, tokens, salt) for tokens in prompts]
    assert [loan["tokens"] for loan in loans] == [1888] * 4 + [0] * 2
    # Nobody reads them: they end by themselves.
    until(lambda: pool_of(source)["pinned"] == 0)


def test_prefill_killed_during_a_hand_off_leaves_a_prefix_to_continue_from(
    engine: PoolEngine, source: PoolEngine
) -> None:
    """Runs last: it kills the source. What it has computed is in decode's pool, and only the rest is computed."""
    tokens, salt = prompt(900, 90), "killed"
    expected = engine.ask(tokens, cache_salt="undisturbed").tokens
    assert handed_over(source, engine, tokens[:500], cache_salt=salt).computed == 1
    source.process.settled()
    engine.forget()
    (source.process.gate / "hold").write_text('{"layer": 2, "pass": 0}')
    name = f"request-{next(NUMBERS)}"
    source.process.send(
        "generate", request=name, leg="prefill", tokens=tokens, sampling={"max_tokens": 1}, cache_salt=salt
    )
    agents = source.process.facts["agents"]
    decode = engine.process.send(
        "generate", request=name, leg="decode", tokens=tokens, agents=agents, sampling=greedy(24), cache_salt=salt
    )
    os.kill(source.process.pid, signal.SIGKILL)
    with pytest.raises(EngineError) as failure:
        decode.wait()
    assert failure.value.code in ("peer_unreachable", "transfer_failed")
    engine.saved()
    engine.forget()
    turn = engine.ask(tokens, cache_salt=salt)
    assert turn.tokens == expected
    assert (turn.promoted, turn.computed) == (480, 420)
