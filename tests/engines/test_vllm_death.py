"""Engines that are killed: every waiter gets an error, and nothing of them stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from engine_pair import Pair, greedy, prompt
from engine_process import EngineError, until

pytestmark = pytest.mark.ends_engines


def test_killed_engine_process_fails_its_requests_and_all_that_follow(engines: Pair) -> None:
    name, ids = engines.name(), prompt(60, seed=80)
    running = engines.decode.send("generate", request=name, leg="whole", tokens=ids, sampling=greedy(3000))
    assert running.next_delta() is not None
    core, *_ = engines.decode.pids()
    ranks = engines.decode.worker_pids()
    os.kill(core, signal.SIGKILL)
    with pytest.raises(EngineError) as failure:
        running.wait()
    assert failure.value.code == "engine_failed"
    for command in ("health", "load", "stats"):
        with pytest.raises(EngineError) as failure:
            engines.decode.ask(command)
        assert failure.value.code == "engine_failed"
    until(lambda: not any(map(_runs, ranks)), lambda: "ranks outlive their scheduler")


def test_killed_worker_takes_its_engine_with_it(engines: Pair) -> None:
    children = engines.prefill.pids()
    assert children
    os.kill(engines.prefill.pid, signal.SIGKILL)
    until(lambda: not any(map(_runs, children)), lambda: "the engine outlives its worker")


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
