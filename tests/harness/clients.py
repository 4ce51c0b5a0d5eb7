"""Clients of a cluster whose answers are compared byte by byte, and what the bus shows of their attempts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType

import openai

from baton.bus import Delivery
from baton.messages.attempts import Cancel
from tests.harness.cluster import Cluster


class Clients:
    """Consecutive streams, each from the gateway that accepts new ones at the time."""

    def __init__(
        self,
        cluster: Cluster,
        prompts: Sequence[str],
        *,
        gateway: str = "gateway",
        output_tokens: int = 200,
        body: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """`body`: of each request, beside OpenAI's."""
        self._cluster = cluster
        self._output_tokens = output_tokens
        self._body = body
        self.gateway = gateway
        self.answers: dict[str, list[str]] = {prompt: [] for prompt in prompts}
        self.gap_s_max = 0.0
        self._asking = False

    async def ask(self, prompt: str, **changes: object) -> str:
        url = self._cluster.gateway_url(self.gateway)
        text: list[str] = []
        # The library gives a connection five seconds, and this process may stand still for longer on a busy machine.
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120.0) as client:
            stream = await client.completions.create(
                model="tiny",
                prompt=prompt,
                temperature=0,
                max_tokens=self._output_tokens,
                stream=True,
                extra_body={**self._body, **changes},
            )
            last_s = time.monotonic()
            finish: list[str] = []
            async for chunk in stream:
                now_s = time.monotonic()
                if text:
                    self.gap_s_max = max(self.gap_s_max, now_s - last_s)
                last_s = now_s
                text += [choice.text for choice in chunk.choices]
                finish += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        assert finish == ["length"]
        return "".join(text)

    async def ask_again_and_again(self, prompt: str) -> None:
        while self._asking:
            self.answers[prompt].append(await self.ask(prompt))

    @asynccontextmanager
    async def asking(self) -> AsyncGenerator[None]:
        """Send requests continuously; await the last answers at the end. Raises any client error."""
        self._asking = True
        async with asyncio.TaskGroup() as group:
            for prompt in self.answers:
                group.create_task(self.ask_again_and_again(prompt))
            yield
            self._asking = False


class Bystander:
    """Counts the attempts that gateways cancelled, by reason."""

    def __init__(self) -> None:
        self.cancels: Counter[str] = Counter()

    @classmethod
    async def of(cls, cluster: Cluster) -> Bystander:
        seen = cls()
        assert cluster.bus is not None
        await cluster.bus.subscribe("baton.worker.*.task", seen.see)
        return seen

    async def see(self, delivery: Delivery) -> None:
        if isinstance(delivery.message, Cancel):
            self.cancels[delivery.message.reason] += 1
