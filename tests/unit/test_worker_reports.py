"""What a worker's heartbeats and metrics say."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from baton.connectors.pool_report import PoolReport
from baton.engines.engine import EngineDelta, EngineLoad
from baton.engines.scripted import FACTS, ScriptedEngine
from baton.engines.stages import prompt_stages
from baton.errors import EngineFailed
from baton.messages.attempts import FinishReason
from baton.messages.workers import Role
from baton.transfer import LayerGroup
from tests.harness.worker import World, decode_task, open_world, prefill_task


@pytest.fixture
async def decode() -> AsyncGenerator[World]:
    async with open_world(Role.DECODE) as world:
        yield world


async def test_heartbeats_declare_what_the_engine_takes(decode: World) -> None:
    assert decode.heartbeat().parameters == FACTS.parameters == ("mode",)
    assert decode.heartbeat().engine_kind == "kind"


async def test_heartbeats_say_what_the_worker_is_and_holds(decode: World) -> None:
    await decode.ask(decode_task())
    pulled = LayerGroup(
        first_layer=0, layers=1, began_s=0.0, ended_s=0.5, moved_bytes=1 << 20, backend="shm", rail="", waiting_s=0.0
    )
    stages = prompt_stages(entered_s=0.0, begun_s=0.0, ended_s=0.5, pulled=(pulled,))
    await decode.step(EngineDelta(tokens=[1], transferred_bytes=1 << 20, transfer_s=0.5, stages=stages))
    for _ in range(40):
        await decode.clock.advance(0.1)
        await decode.step(EngineDelta(tokens=[1]))
    await decode.clock.advance(0.5)
    beat = decode.heartbeat()
    assert (beat.role, beat.model, beat.engine) == (Role.DECODE, "tiny", "scripted 1")
    assert (beat.running, beat.waiting, beat.running_max) == (1, 0, 2)
    assert beat.attempts == (("r", 0),)
    assert (beat.kv_blocks_used, beat.kv_blocks_total) == (4, 100)
    fit, (transfer,) = beat.steps, beat.transfers
    assert fit.decode_step_s + fit.sequence_s + fit.kv_s * 0.04 == pytest.approx(0.1, rel=0.1)
    assert fit.samples > 0
    assert (transfer.peer, transfer.backend, transfer.samples) == ("p0", "shm", 1)
    assert transfer.bytes_per_s == pytest.approx(2 << 20, rel=0.1)
    assert beat.step_tokens_max == FACTS.step_tokens_max
    assert beat.events_sequence == beat.held_sequence > 0


async def test_heartbeats_say_whether_the_engine_has_work_and_does_it(decode: World) -> None:
    async def said() -> tuple[int, int, int]:
        await decode.clock.advance(0.5)
        beat = decode.heartbeat()
        return beat.computing, beat.progress_tokens, beat.completed

    assert await said() == (0, 0, 0), "nothing before the first request"
    await decode.ask(decode_task("pulling"))
    assert await said() == (0, 0, 0), "the engine has nothing to do yet"
    await decode.ask(decode_task(pulls=False))
    assert await said() == (1, 0, 0)
    decode.engine.load_now = EngineLoad(prompt_tokens_computed=100)
    assert await said() == (1, 100, 0), "a part of the prompt"
    await decode.step(EngineDelta(tokens=[1, 2]))
    assert await said() == (1, 102, 0)
    await decode.step(EngineDelta(tokens=[3], finish=FinishReason.LENGTH))
    assert await said() == (0, 103, 1)


async def test_heartbeats_say_how_much_the_pool_takes_before_it_evicts() -> None:
    world = World(Role.DECODE, ScriptedEngine(replace(FACTS, pool_blocks=10)))
    await world.start()
    assert world.heartbeat().pool_tokens_free == 10 * FACTS.block_tokens
    world.engine.load_now = EngineLoad(pool=PoolReport(slots=10, ready=7))
    await world.clock.advance(0.5)
    assert world.heartbeat().pool_tokens_free == 3 * FACTS.block_tokens
    await world.close()


async def test_a_scrape_shows_what_the_worker_keeps(decode: World) -> None:
    busy_before_s = decode.shown("baton_engine_busy_seconds_total")
    await decode.ask(decode_task())
    decode.engine.load_now = EngineLoad(running=1, kv_usage=0.5, leased_blocks=3, prompt_tokens_pulled=99)
    assert decode.shown('baton_worker_attempts{state="pulling"}') == 1
    await decode.clock.advance(1.0)
    assert decode.shown("baton_engine_busy_seconds_total") == busy_before_s, "a pull computes nothing"
    await decode.step(EngineDelta(tokens=[1, 2]))
    await decode.clock.advance(0.5)
    await decode.step(EngineDelta(tokens=[3], finish=FinishReason.LENGTH))
    busy_s = decode.shown("baton_engine_busy_seconds_total")
    assert busy_s == pytest.approx(busy_before_s + 0.5, abs=0.1)
    await decode.clock.advance(5.0)
    assert decode.shown("baton_engine_busy_seconds_total") == busy_s
    assert decode.shown("baton_engine_output_tokens_total") == 3
    assert decode.shown('baton_worker_attempts_ended_total{end="length"}') == 1
    assert decode.shown('baton_first_output_seconds_count{leg="decode"}') == 1
    blocks = [decode.shown(f'baton_kv_blocks{{state="{state}"}}') for state in ("used", "leased", "free")]
    assert blocks[1] == 3
    assert sum(blocks) == FACTS.kv_blocks
    await decode.ask(prefill_task("other"))
    assert decode.shown('baton_worker_refusals_total{reason="role"}') == 1


async def test_a_scrape_of_a_worker_whose_engine_died_shows_the_rest(decode: World) -> None:
    decode.engine.die("as if it had crashed")
    assert decode.shown('baton_worker_slots{state="free"}') == 2
    assert "baton_kv_blocks{" not in decode.metrics.render("")[1].decode()
    with pytest.raises(EngineFailed):
        await decode.running
