"""Engines that are stopped or killed in the midst of a hand-off, for every pair of engines with KV pools."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from random import Random

import psutil
from cross_engines import GREEDY, Engines, make_pair

from baton.engines.engine import Engine, EngineRequest, Leg
from baton.errors import BatonError
from benchmarks.remote_engine.engine import RemoteEngine
from tests.harness.engine_pair import Answer, Pair, collect, eventually
from tests.harness.limits import HANG_S

BEGIN_TOKENS = 257
"""Part of the prompt that the sink has already."""
PROMPT_TOKENS = 2400
BUDGET_S = 12.0
STRUCK_WITHIN_S = 0.2
"""A prompt takes longer to be computed and pulled."""


async def check_struck_handoff(engines: Engines, names: tuple[str, str], leg: Leg, how: signal.Signals) -> str:
    """Strike one side of a hand-off; whatever comes of it, and of the attempts after it, is the same answer.

    Returns what became of the struck attempt.
    """
    pair = await make_pair(engines, *names)
    tokens, salt = pair.prompt(PROMPT_TOKENS), f"{leg} struck by {how.name}"
    expected = (await collect(pair.decode, pair.request(tokens, GREEDY, salt=f"{salt}, alone"))).tokens
    await collect(pair.decode, pair.request(tokens[:BEGIN_TOKENS], GREEDY, salt=salt))
    prefill = pair.request(tokens, GREEDY, leg=Leg.PREFILL, salt=salt, budget_s=BUDGET_S)
    decode = pair.request(tokens, GREEDY, leg=Leg.DECODE, name=prefill.request, salt=salt, budget_s=BUDGET_S)
    name, victim = (names[0], pair.prefill) if leg is Leg.PREFILL else (names[1], pair.decode)
    legs = [asyncio.create_task(attempt(pair.prefill, prefill)), asyncio.create_task(attempt(pair.decode, decode))]
    await moving(pair, legs[1])
    await asyncio.sleep(Random(f"{names} {leg} {how}").uniform(0.0, STRUCK_WITHIN_S))
    async with struck(victim, how):
        assert not legs[1].done(), "it was struck in the midst of the transfer"
        # A process that is stopped cannot even fail: its side is heard of once it goes on.
        await asyncio.wait(legs, timeout=BUDGET_S)
        if leg is Leg.PREFILL:
            await legs[1]
            # The next attempt runs without the struck engine, on what decode has.
            whole = replace(pair.request(tokens, GREEDY, salt=salt), attempt=2)
            assert (await collect(pair.decode, whole)).tokens == expected
        else:
            whole = replace(pair.request(tokens, GREEDY, salt=salt), attempt=2)
            assert (await collect(pair.prefill, whole)).tokens == expected
    if how is signal.SIGKILL:
        await engines.lose(name)
    answer = (await asyncio.gather(*legs))[1]
    assert answer is None or answer.tokens == expected
    pair = await make_pair(engines, *names)
    for engine in (pair.prefill, pair.decode):
        with suppress(BatonError):
            await engine.abort(prefill.request, prefill.attempt)
    await eventually(lambda: _is_free(pair.prefill) and _is_free(pair.decode))
    again = await pair.hand_off(tokens, GREEDY, salt=salt)
    assert again.tokens == expected
    await eventually(lambda: _is_free(pair.prefill) and _is_free(pair.decode))
    return "failed" if answer is None else "answered"


async def moving(pair: Pair, decode: asyncio.Task[Answer | None]) -> None:
    """Wait until decode pulls."""
    assert isinstance(pair.decode, RemoteEngine)
    async with asyncio.timeout(HANG_S):
        while not (await pair.decode.stats())["pulls"]:
            assert not decode.done(), "the transfer was over before it was seen"


async def attempt(engine: Engine, request: EngineRequest) -> Answer | None:
    """Return an answer; None: the attempt failed, as it may."""
    try:
        return await collect(engine, request)
    except BatonError:
        return None


@asynccontextmanager
async def struck(engine: Engine, how: signal.Signals) -> AsyncGenerator[None]:
    """Strike an engine with all its processes; those that are stopped go on at the end."""
    assert isinstance(engine, RemoteEngine)
    worker = psutil.Process(engine.pid)
    struck = [worker, *worker.children(recursive=True)]
    for process in struck:
        process.send_signal(how)
    try:
        yield
    finally:
        for process in struck:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


def _is_free(engine: Engine) -> bool:
    load = engine.load()
    return not (load.kv_usage or load.running or load.waiting or load.leased_blocks or load.pool.pinned)
