"""A prefill and a decode engine, and operations of tests on both."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pytest
from engine_process import Answer, EngineProcess, until

from benchmarks.remote_engine.settings import EngineName

LEASE_TTL_S: Final = 4.0
NUMBERS: Final = itertools.count()
"""Counter of requests, global because an engine may belong to several pairs."""
_SEEDS: Final = itertools.count(4000)

OPTIONS: dict[str, Any] = {
    # Token-for-token equality needs fp32: in bf16 random weights give near-ties that any reordering flips.
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 200,
    "connector": "gated:GatedConnector",
}

SGLANG_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "context_length": 4096,
    "max_running_requests": 8,
    "chunked_prefill_size": 512,
    "max_total_tokens": 200 * 32,
}

AGENT: dict[str, Any] = {
    "secret": "tests",
    "connect_timeout_s": 3.0,
    "lease_ttl_s": LEASE_TTL_S,
    "unclaimed_ttl_s": 30.0,
    "wanted_timeout_s": 10.0,
    "stall_timeout_s": 15.0,
}


@dataclass
class Pair:
    """A prefill and a decode engine of the same model, and requests that go through both."""

    prefill: EngineProcess
    decode: EngineProcess

    def name(self) -> str:
        return f"request-{next(NUMBERS)}"

    def send_prefill(self, name: str, tokens: list[int], **fields: Any) -> Answer:
        fields |= {"sampling": {"max_tokens": 1}, "sink_ranks": len(self.decode.facts["agents"])}
        return self.prefill.send("generate", request=name, leg="prefill", tokens=tokens, **fields)

    def send_decode(self, name: str, tokens: list[int], output_tokens: int, **fields: Any) -> Answer:
        fields = {"agents": self.prefill.facts["agents"]} | fields
        return self.decode.send(
            "generate", request=name, leg="decode", tokens=tokens, sampling=greedy(output_tokens), **fields
        )

    def disaggregated(self, tokens: list[int], output_tokens: int) -> tuple[list[int], dict[str, Any]]:
        """Return the tokens that prefill → decode generates, and decode's last delta."""
        name = self.name()
        prefill = self.send_prefill(name, tokens)
        decode = self.send_decode(name, tokens, output_tokens)
        output = decode.tokens()
        prefill.wait()
        return output, decode.last

    def aggregated(self, tokens: list[int], output_tokens: int) -> list[int]:
        """Return what the decode engine generates alone, with nothing cached."""
        name = self.name()
        return self.decode.send(
            "generate", request=name, leg="whole", tokens=tokens, sampling=greedy(output_tokens), cache_salt=name
        ).tokens()

    def settled(self) -> None:
        self.prefill.settled()
        self.decode.settled()

    def hold(self, layer: int, passes: int = 0) -> None:
        """Stop prefill's next step before `layer`, after it has gone by it `passes` times; let go what is held."""
        order = self.prefill.gate / "order"
        order.write_text(f'{{"layer": {layer}, "pass": {passes}}}')
        order.rename(self.prefill.gate / "hold")

    def held(self) -> None:
        until((self.prefill.gate / "held").exists)

    def let_go(self) -> None:
        for name in ("hold", "held"):
            (self.prefill.gate / name).unlink(missing_ok=True)


def start_engine(
    model: Path, tmp_path_factory: pytest.TempPathFactory, role: str, name: EngineName = "vllm", **options: Any
) -> EngineProcess:
    own = (OPTIONS if name == "vllm" else SGLANG_OPTIONS) | options
    settings = {"engine": name, "model": str(model), "role": role, "options": own, "agent": AGENT}
    engine = EngineProcess(settings, tmp_path_factory.mktemp(f"gate-{role}"))
    try:
        engine.wait_started()
    except BaseException:
        engine.close()
        raise
    return engine


@contextmanager
def started_pair(
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    *,
    engines: tuple[EngineName, EngineName] = ("vllm", "vllm"),
    of_role: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    **options: Any,
) -> Generator[Pair]:
    """Start a pair. `engines`: prefill's and decode's; `of_role`: further options of one of the two."""
    started: list[EngineProcess] = []
    try:
        # One after another: an engine loads on one core, and the other has other tests.
        for role, name in zip(("prefill", "decode"), engines, strict=True):
            own = options | dict(of_role.get(role, {}))
            started.append(start_engine(model, tmp_path_factory, role, name, **own))
        prefill, decode = started
        yield Pair(prefill, decode)
    finally:
        for engine in started:
            engine.close()


def check_several_at_once(pair: Pair) -> None:
    """Hand several prompts over at the same time; check their tokens."""
    prompts = [new_prompt(tokens) for tokens in (40, 333, 700, 90, 512, 513)]
    names = [pair.name() for _ in prompts]
    prefills = [pair.send_prefill(name, ids) for name, ids in zip(names, prompts, strict=True)]
    decodes = [pair.send_decode(name, ids, 12) for name, ids in zip(names, prompts, strict=True)]
    outputs = [decode.tokens() for decode in decodes]
    for prefill in prefills:
        prefill.wait()
    assert outputs == [pair.aggregated(ids, 12) for ids in prompts]


def greedy(output_tokens: int) -> dict[str, Any]:
    return {"max_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True}


def new_prompt(tokens: int) -> list[int]:
    """Return token ids that no engine of this process has cached a block of."""
    return prompt(tokens, next(_SEEDS))


def prompt(tokens: int, seed: int) -> list[int]:
    """Return token ids that no other seed shares a first block with."""
    return [(index * 7919 + seed * 104729 + 13) % 8000 + 50 for index in range(tokens)]
