"""Lenders that are stopped or killed once they have granted a loan, for every pair of engines."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from dataclasses import replace

import psutil
from cross_engines import Engines, make_pair

from benchmarks.remote_engine.engine import RemoteEngine
from tests.contract.engine_suite import collect
from tests.contract.lending_suite import PROMPT_TOKENS, lend
from tests.harness.limits import HANG_S

DEADLINE_S = 3.0
ANSWERED_S = 60.0


async def check_struck(engines: Engines, names: tuple[str, str], how: signal.Signals) -> None:
    """Borrow from a lender that is struck: the answer is the same, and comes while the lender is still stopped."""
    pair = await make_pair(engines, *names)
    tokens, salt = pair.prompt(PROMPT_TOKENS), f"struck by {how.name}"
    expected = (await collect(pair.decode, pair.request(tokens, salt=f"{salt}, alone"))).tokens
    await collect(pair.prefill, pair.request(tokens, salt=salt))
    await pair.settled()
    loan = await lend(pair, tokens, salt, budget_s=DEADLINE_S)
    assert loan.tokens >= PROMPT_TOKENS // 2
    assert isinstance(pair.prefill, RemoteEngine)
    lender = psutil.Process(pair.prefill.pid)
    struck = [lender, *lender.children(recursive=True)]
    for process in struck:
        process.send_signal(how)
    try:
        async with asyncio.timeout(ANSWERED_S):
            answer = await collect(pair.decode, replace(pair.request(tokens, salt=salt), loan=loan))
    finally:
        if how is signal.SIGKILL:
            await engines.lose(names[0])
        for process in struck:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
    assert answer.tokens == expected
    async with asyncio.timeout(HANG_S):
        while pair.decode.load().pool.pinned or pair.decode.load().kv_usage:  # noqa: ASYNC110 - another process.
            await asyncio.sleep(0.02)
