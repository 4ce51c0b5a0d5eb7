"""Real vLLM engines for this folder's tests: one prefill and one decode, started once per session."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine_process import Answer, EngineProcess, until

from baton.cli.tiny_model import make_tiny_model

OPTIONS: dict[str, Any] = {
    # Token-for-token equality needs fp32: in bf16 random weights give near-ties that any reordering flips.
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 200,
    "connector": "gated:GatedConnector",
}

AGENT: dict[str, Any] = {
    "secret": "tests",
    "lease_ttl_s": 2.0,
    "unclaimed_ttl_s": 20.0,
    "wanted_timeout_s": 5.0,
    "stall_timeout_s": 15.0,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without vLLM there is nothing to test here; with it, the first test also pays for the engines' start."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.name.startswith("test_vllm_"):
            item.add_marker(pytest.mark.timeout(240))
            if importlib.util.find_spec("vllm") is None:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder)
    return folder


@dataclass
class Pair:
    """A prefill and a decode engine of the same model, and requests that go through both."""

    prefill: EngineProcess
    decode: EngineProcess
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def name(self) -> str:
        return f"request-{next(self._numbers)}"

    def send_prefill(self, name: str, tokens: list[int], **fields: Any) -> Answer:
        sampling = {"max_tokens": 1}
        return self.prefill.send(
            "generate", request=name, leg="prefill", tokens=tokens, sampling=sampling, **fields
        )

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
        """Stop prefill's next step before `layer`, after it has gone by it `passes` times."""
        (self.prefill.gate / "hold").write_text(f'{{"layer": {layer}, "pass": {passes}}}')

    def held(self) -> None:
        until((self.prefill.gate / "held").exists, 20)

    def let_go(self) -> None:
        for name in ("hold", "held"):
            (self.prefill.gate / name).unlink(missing_ok=True)


def greedy(output_tokens: int) -> dict[str, Any]:
    return {"max_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True}


def prompt(tokens: int, seed: int) -> list[int]:
    """Return token ids that no other seed shares a first block with."""
    return [(index * 7919 + seed * 104729 + 13) % 8000 + 50 for index in range(tokens)]


@pytest.fixture(scope="session")
def engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    started: list[EngineProcess] = []
    try:
        # One after another: two that load at once take longer than both in turn.
        for role in ("prefill", "decode"):
            settings = {"model": str(tiny_model), "role": role, "options": OPTIONS, "agent": AGENT}
            engine = EngineProcess(settings, tmp_path_factory.mktemp(f"gate-{role}"))
            started.append(engine)
            engine.wait_started()
        yield Pair(*started)
    finally:
        for engine in started:
            engine.close()


@pytest.fixture
def pair(engines: Pair) -> Iterator[Pair]:
    """The session's engines, checked after each test: nothing of it may be left on either side."""
    yield engines
    engines.let_go()
    engines.prefill.ask("faults", faults={})
    engines.settled()
