"""The failures between prefill and decode, and the ends of engines, with both sides staged."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_pair import Pair, prompt, started_pair
from engine_process import EngineError, until
from test_vllm_failures import *  # noqa: F403

from tests.contract.fake_library import FakeGpu

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    os.environ["BATON_TEST_GPU"] = FakeGpu.compiled()
    with started_pair(tiny_model, tmp_path_factory, connector="staged:StagedConnector", kv_path="staged") as pair:
        yield pair


def test_abort_of_a_held_lease(pair: Pair) -> None:
    """The engine has freed its blocks already; the slots are free after it."""
    name, ids = pair.name(), prompt(300, seed=39)
    pair.send_prefill(name, ids).wait()
    until(lambda: pair.prefill.ask("load")["kv_usage"] == 0)
    assert pair.prefill.ask("load")["leased"] == [[name, 0]]
    assert pair.prefill.ask("stats")["leased_blocks"] == 10
    pair.prefill.ask("abort", request=name)
    pair.prefill.settled()


def test_slots_for_one_prompt_serve_several(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases wait for slots; decode requests wait, or compute."""
    monkeypatch.setenv("BATON_TEST_GPU", FakeGpu.compiled())
    small: dict[str, Any] = {"connector": "staged:StagedConnector", "kv_path": "staged", "max_model_len": 2048}
    with started_pair(tiny_model, tmp_path_factory, kv_staging_tokens=2048, **small) as pair:
        prompts = [prompt(1500, seed=200 + number) for number in range(4)]
        names = [pair.name() for _ in prompts]
        prefills = [pair.send_prefill(name, ids) for name, ids in zip(names, prompts, strict=True)]
        decodes = [
            pair.send_decode(name, ids, 12) for name, ids in zip(reversed(names), reversed(prompts), strict=True)
        ]
        outputs = [decode.tokens() for decode in reversed(decodes)]
        for prefill in prefills:
            prefill.wait()
        assert outputs == [pair.aggregated(ids, 12) for ids in prompts]
        pair.settled()


@pytest.mark.ends_engines
def test_prefill_that_is_killed_in_the_middle_of_a_staged_hand_off(engines: Pair) -> None:
    ids, name = prompt(1500, seed=220), engines.name()
    FakeGpu(engines.prefill.gate, here=False).set(hold_copies=1)
    engines.send_prefill(name, ids)
    decode = engines.send_decode(name, ids, 8)
    until(lambda: engines.prefill.ask("stats")["leases"] == 1)
    for pid in (*engines.prefill.pids(), engines.prefill.pid):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="did not arrive"):
        decode.tokens()
    engines.decode.settled()
    assert len(engines.aggregated(ids, 8)) == 8
