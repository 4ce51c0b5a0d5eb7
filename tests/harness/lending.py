"""Operations of the tests in which workers of a whole deployment lend prefixes to each other.

Placement takes the workers in turn (`round-robin`), so the second request for a prompt is computed by another worker
than the first, and the scheduler names the first as its lender.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

import httpx
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.cluster import Cluster
from tests.harness.limits import HANG_S

IN_TURN: Final = ("--policy", "round-robin")
BORROW_TIMEOUT_S: Final = 90.0
TRIES_MAX: Final = 12
"""Bound on prompts until the second request goes to another worker: with many beside it, half of them do."""
_numbers = itertools.count()
"""Counter of prompts, global because several tests may share a deployment and its caches."""


@dataclass(frozen=True)
class Said:
    request: str
    text: str
    worker: str
    """Worker that computed the prompt and answered."""
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


@dataclass(frozen=True)
class Loan:
    """Two answers to one prompt, the second by a worker that may have borrowed the prompt's prefix from the first."""

    first: Said
    second: Said
    computed_tokens: int
    """Prompt tokens that the second worker computed, by its engine's count."""
    borrowed_tokens: int
    failed: int
    """Loans that failed at the second worker meanwhile."""


class Lending:
    def __init__(self, cluster: Cluster, client: openai.AsyncOpenAI) -> None:
        self.cluster = cluster
        self._client = client

    def prompt(self) -> str:
        """Return a prompt of several blocks that begins like no other."""
        return f"story {next(_numbers)}: " + "it is interrupted " * 300

    async def ask(self, prompt: str, *, output_tokens: int = 24, mode: str = "never") -> Said:
        began_s, ttft_s = time.monotonic(), 0.0
        raw = await self._client.completions.with_raw_response.create(
            model="tiny",
            prompt=prompt,
            max_tokens=output_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
            extra_headers={"x-baton-disaggregation": mode, "x-baton-deadline-s": "60"},
        )
        text, usage = "", None
        async for chunk in raw.parse():
            ttft_s = ttft_s or time.monotonic() - began_s
            text += "".join(choice.text for choice in chunk.choices)
            usage = chunk.usage or usage
        assert usage is not None
        details = usage.prompt_tokens_details
        cached_tokens = details.cached_tokens if details is not None else 0
        worker = raw.headers["x-baton-prefill" if mode == "always" else "x-baton-decode"]
        return Said(raw.headers["x-request-id"], text, worker, usage.prompt_tokens, cached_tokens or 0, ttft_s)

    async def computed(self, prompt: str, *, mode: str = "never") -> Said:
        """Have some worker compute a prompt, and wait until its pool has it and the index could know."""
        beats = self.cluster.observer.heartbeats
        before = {name: await self.figures(name) for name in beats}
        said = await self.ask(prompt, mode=mode)
        was, block_tokens = before[said.worker], beats[said.worker].engine_block_tokens
        async with asyncio.timeout(HANG_S):
            while True:
                now = await self.figures(said.worker)
                own_tokens = said.cached_tokens - (now["borrowed"] - was["borrowed"])
                own_blocks = -(-max(own_tokens, 0) // block_tokens)
                if now["saved"] - was["saved"] >= said.prompt_tokens // block_tokens - own_blocks:
                    break
                await asyncio.sleep(0.02)
        # Events of what is stored are published before the next heartbeats.
        for _ in range(2):
            beat = beats[said.worker]
            await self.cluster.observer.until(lambda seen=beat: beats[said.worker] is not seen)
        return said

    async def lend(self, meanwhile: Callable[[str], Awaitable[object]] | None = None) -> Loan:
        """Ask for a prompt twice, of two workers. `meanwhile` is given the first, just before the second is asked.

        Placement is free to skip a worker, and the index may be a moment late: other prompts follow until the second
        worker is another one.
        """
        for _ in range(TRIES_MAX):
            async with asyncio.timeout(BORROW_TIMEOUT_S):
                prompt = self.prompt()
                first = await self.computed(prompt)
                before = {name: await self.figures(name) for name in self.cluster.observer.heartbeats}
                if meanwhile is not None:
                    await meanwhile(first.worker)
                second = await self.ask(prompt)
                if second.worker == first.worker:
                    continue
                was, now = before[second.worker], await self.figures(second.worker)
                return Loan(
                    first,
                    second,
                    computed_tokens=int(now["computed"] - was["computed"]),
                    borrowed_tokens=int(now["borrowed"] - was["borrowed"]),
                    failed=int(now["failed"] - was["failed"]),
                )
        raise AssertionError(f"both of a prompt's requests went to one worker, {TRIES_MAX} times")

    async def borrow(self) -> Loan:
        """Return the next loan that arrives: on a busy machine, computing may be faster now and then."""
        async with asyncio.timeout(BORROW_TIMEOUT_S):
            while not (loan := await self.lend()).borrowed_tokens:
                assert loan.first.text == loan.second.text
            return loan

    async def figures(self, worker: str) -> dict[str, float]:
        """Return a worker's counters: prompt tokens `computed`, loaned tokens `lent` and `borrowed`, loans `failed`,
        blocks `saved` in the pool."""
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"http://{self.cluster.status_address(worker)}/metrics", timeout=HANG_S)
        found: dict[str, float] = {}
        names = {
            ("baton_engine_prompt_tokens_total", "computed"): "computed",
            ("baton_kv_pool_loan_tokens_total", "lent"): "lent",
            ("baton_kv_pool_loan_tokens_total", "borrowed"): "borrowed",
            ("baton_kv_pool_loans_failed_total", ""): "failed",
            ("baton_kv_pool_blocks_total", "saved"): "saved",
        }
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                label = sample.labels.get("source") or sample.labels.get("side") or sample.labels.get("event") or ""
                if name := names.get((sample.name, label)):
                    found[name] = sample.value
        return found

    @asynccontextmanager
    async def stopping(self) -> AsyncGenerator[Callable[[str], Awaitable[None]]]:
        """Yield a function that stops a worker with all its processes; they go on at the end."""
        stopped: list[psutil.Process] = []

        async def stop(worker: str) -> None:
            process = self.cluster.services[worker].process
            assert process is not None
            parent = psutil.Process(process.pid)
            for each in (parent, *parent.children(recursive=True)):
                each.suspend()
                stopped.append(each)

        try:
            yield stop
        finally:
            for each in stopped:
                with suppress(psutil.NoSuchProcess):
                    each.resume()
