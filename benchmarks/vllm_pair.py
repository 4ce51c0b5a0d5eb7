"""A prefill and a decode engine on real vLLM for benchmarks, both owned by this process."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from baton.engines.engine import EngineDelta, EngineFacts, EngineRequest, Leg
from baton.engines.vllm.engine import VllmEngine
from baton.messages.attempts import Sampling
from baton.messages.base import WorkerAddress
from baton.messages.workers import Role
from baton.transfer import AgentOptions

STEP_TOKENS: Final = 512
OPTIONS: dict[str, object] = {
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 16,
    "max_num_batched_tokens": STEP_TOKENS,
    "num_gpu_blocks_override": 400,
}
BUDGET_S = 120.0


class VllmPair:
    def __init__(self, engines: dict[Role, VllmEngine], source: EngineFacts) -> None:
        self.engines = engines
        self._source = WorkerAddress(worker="prefill", generation=1, agents=source.agents)

    def generate(
        self, role: Role, leg: Leg, *, name: str, prompt: int, prompt_tokens: int, output_tokens: int
    ) -> AsyncGenerator[EngineDelta]:
        """Run one leg. Prompts with different numbers differ from the first token on, so no prefix is cached."""
        request = EngineRequest(
            request=name,
            attempt=0,
            leg=leg,
            tokens=[(prompt * 7919 + index * 104729) % 8000 + 50 for index in range(prompt_tokens)],
            sampling=Sampling(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
            source=self._source if leg is Leg.DECODE else None,
            budget_s=BUDGET_S,
        )
        return self.engines[role].generate(request)


@asynccontextmanager
async def running_pair(model: Path, **options: object) -> AsyncGenerator[VllmPair]:
    engines: dict[Role, VllmEngine] = {}
    try:
        facts: dict[Role, EngineFacts] = {}
        for role in Role:
            began_s = time.monotonic()
            agent = AgentOptions(secret="bench")
            engines[role] = VllmEngine(str(model), role=role, options=OPTIONS | options, agent=agent)
            facts[role] = await engines[role].start()
            print(f"{role}: vLLM started in {time.monotonic() - began_s:.0f} s", flush=True)
        yield VllmPair(engines, facts[Role.PREFILL])
    finally:
        for engine in engines.values():
            await engine.close()
