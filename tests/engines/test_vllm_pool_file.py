"""The file under the KV pool behind real vLLM: an engine that was killed finds its blocks again, token for token."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from engine_pair import prompt
from engine_process import until

from baton.messages.index import Tier
from baton.worker.shadow import ShadowMap
from benchmarks.remote_engine.engine import read_batch
from tests.engines.test_vllm_pool import BLOCK_TOKENS, SLOT_BYTES, PoolEngine, pool_of, started

FILE_BYTES = 256 * (SLOT_BYTES + 4096)
PATIENT_S = 1.0
"""Time that computing a token is said to take: a busy machine does not make the file late."""


def file_of(engine: PoolEngine) -> dict[str, Any]:
    return pool_of(engine)["file"] or {}


def written(engine: PoolEngine) -> None:
    """Wait until the file has all that the pool has."""
    until(lambda: file_of(engine).get("ready") == pool_of(engine)["ready"], lambda: str(pool_of(engine)))


def told(engine: PoolEngine, blocks: int) -> ShadowMap:
    """Wait until the engine's events have told of this many blocks in its file; it need not have had a request."""
    digest = engine.process.facts["model_digest"]
    shadow = ShadowMap(model_digest=digest, engine_block_tokens=BLOCK_TOKENS, block_tokens=BLOCK_TOKENS)

    def is_told() -> bool:
        for batch in engine.process.ask("events")[shadow.batches :]:
            shadow.apply(read_batch(batch))
        return shadow.fingerprint(Tier.FILE).blocks == blocks

    until(is_told, lambda: f"{shadow.fingerprint(Tier.FILE)} of {blocks} blocks")
    return shadow


@pytest.mark.nightly
def test_a_killed_engine_finds_its_blocks_again(tiny_model: Path, tmp_path: Path) -> None:
    options = {"kv_file": str(tmp_path / "kv"), "kv_file_bytes": FILE_BYTES}
    tokens, other, salt = prompt(700, 1), prompt(500, 2), "tenant"
    with started(tiny_model, tmp_path, **options) as engine:
        first = engine.ask(tokens, cache_salt=salt)
        second = engine.ask(other)
        written(engine)
        blocks = file_of(engine)["ready"]
        os.kill(engine.process.pid, signal.SIGKILL)
    with (tmp_path / "kv").open("r+b") as disk:
        # A bit of one block's KV flips: the fourth of the second prompt, in the order of writing.
        slot = (len(tokens) + 24) // BLOCK_TOKENS + 3
        at = 4096 + slot * (4096 + SLOT_BYTES) + 4096 + 12345
        disk.seek(at)
        byte = disk.read(1)[0]
        disk.seek(at)
        disk.write(bytes([byte ^ 1]))
    with started(tiny_model, tmp_path, **options) as engine:
        assert told(engine, blocks).fingerprint(Tier.POOL).blocks == 0
        assert engine.ask(tokens, cache_salt="another tenant", computing_token_s=PATIENT_S).promoted == 0
        again = engine.ask(tokens, cache_salt=salt, computing_token_s=PATIENT_S)
        assert again.tokens == first.tokens
        assert (again.promoted, again.computed) == (21 * BLOCK_TOKENS, 700 - 21 * BLOCK_TOKENS)
        damaged = engine.ask(other, computing_token_s=PATIENT_S)
        assert damaged.tokens == second.tokens
        assert (damaged.promoted, damaged.computed) == (3 * BLOCK_TOKENS, 500 - 3 * BLOCK_TOKENS)
        assert file_of(engine)["failed_blocks"] == 1
        assert file_of(engine)["loaded_tokens"] == 24 * BLOCK_TOKENS
        assert pool_of(engine)["pinned"] == 0


@pytest.mark.nightly
def test_what_the_pool_evicted_comes_from_the_file(tiny_model: Path, tmp_path: Path) -> None:
    options = {"kv_pool_bytes": 64 * SLOT_BYTES, "kv_file": str(tmp_path / "kv"), "kv_file_bytes": FILE_BYTES}
    with started(tiny_model, tmp_path, **options) as engine:
        # A quarter of the pool may be on its way to the file at a time: no block is left out, however slow the disk is.
        tokens = prompt(512, 1)
        first = engine.ask(tokens)
        written(engine)
        for seed in (2, 3, 4):
            engine.ask(prompt(960, seed), 1)
        assert pool_of(engine)["evicted_blocks"] > 30
        engine.forget()
        again = engine.ask(tokens, computing_token_s=PATIENT_S)
        assert again.tokens == first.tokens
        assert again.promoted == 511
        assert file_of(engine)["loaded_tokens"] > 0


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["something else", "another model", "no folder", "no room"])
def test_an_engine_without_its_file_serves(tiny_model: Path, tmp_path: Path, case: str) -> None:
    options: dict[str, Any] = {"kv_file": str(tmp_path / "kv"), "kv_file_bytes": FILE_BYTES}
    match case:
        case "something else":
            (tmp_path / "kv").write_text("important")
        case "another model":
            with started(tiny_model, tmp_path, block_size=64, **options) as engine:
                engine.ask(prompt(320, 1), 1)
                until(lambda: bool(file_of(engine).get("written_blocks")))
        case "no folder":
            (tmp_path / "file").write_text("")
            options["kv_file"] = str(tmp_path / "file" / "kv")
        case _:
            options["kv_file_bytes"] = 1 << 60
    with started(tiny_model, tmp_path, **options) as engine:
        tokens = prompt(320, 1)
        first = engine.ask(tokens)
        assert first.promoted == 0, "another block size is another layout"
        engine.forget()
        again = engine.ask(tokens)
        assert again.tokens == first.tokens
        assert again.promoted == 319
        assert bool(file_of(engine)) is (case == "another model")
