"""A process of `benchmarks/remote_engine/driver.py`, driven from a test: commands out, answers in, by command."""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.remote_engine.engine import DRIVER
from benchmarks.remote_engine.settings import Device, EngineName, engine_environ, engine_python
from tests.harness.fork_server import forked
from tests.harness.limits import FREED_S, HANG_S, START_S


class EngineError(Exception):
    """An error that the engine raised, with its code."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


@dataclass
class Answer:
    """All lines that answer one command."""

    number: int = 0
    lines: queue.Queue[dict[str, Any]] = field(default_factory=queue.Queue)
    deltas: list[dict[str, Any]] = field(default_factory=list)

    def next_delta(self, timeout_s: float = HANG_S) -> dict[str, Any] | None:
        """Return the next delta, or None when the command has ended. Raises EngineError."""
        line = self.lines.get(timeout=timeout_s)
        if "delta" in line:
            self.deltas.append(line["delta"])
            return line["delta"]
        if "error" in line:
            raise EngineError(line["error"], line["detail"])
        self.deltas.append({"result": line["result"]})
        return None

    def wait(self, timeout_s: float = HANG_S) -> Any:
        """Return the result once the command has ended. Raises EngineError."""
        while self.next_delta(timeout_s) is not None:
            pass
        return self.deltas.pop()["result"]

    def tokens(self, timeout_s: float = HANG_S) -> list[int]:
        self.wait(timeout_s)
        return [token for delta in self.deltas for token in delta["tokens"]]

    @property
    def last(self) -> dict[str, Any]:
        return self.deltas[-1]


class EngineProcess:
    def __init__(self, settings: dict[str, Any], gate: Path) -> None:
        """`settings`: see the driver. An engine that this Python does not have runs in its own environment."""
        self.gate = gate
        engine: EngineName = settings.get("engine", "vllm")
        device: Device = settings["options"].get("device", "cpu")
        python = engine_python(engine, device)
        if python is None:
            pytest.skip(f"there is no environment with {engine} for {device}: `make help` lists those that make it")
        # For the connector of these tests.
        path = filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
        environ = {
            **engine_environ(engine, device),
            "BATON_TEST_GATE": str(gate),
            "PYTHONPATH": os.pathsep.join(path),
        }
        self._process = subprocess.Popen(
            [python, str(DRIVER), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=forked(environ, engine) if device == "cpu" else environ,
            text=True,
        )
        self._numbers = itertools.count(1)
        self._answers: dict[int, Answer] = {0: Answer()}
        self._names = itertools.count()
        threading.Thread(target=self._read, daemon=True).start()
        self.facts: dict[str, Any] = {}

    def wait_started(self) -> None:
        self.facts = self._answers[0].wait(START_S)

    @property
    def pid(self) -> int:
        return self._process.pid

    def pids(self) -> list[int]:
        """Return the processes of the engine: its scheduler and its ranks, without the driver."""
        cores = [child for child in _children(self.pid) if _name(child).startswith(("VLLM::Engine", "sglang::sched"))]
        return [*cores, *(rank for core in cores for rank in _children(core) if _name(rank).startswith("VLLM::Work"))]

    def worker_pids(self) -> list[int]:
        """Return the ranks' processes: the children of the scheduler's, or that one itself where a rank is alone."""
        core, *ranks = self.pids()
        return ranks or [core]

    def send(self, do: str, **fields: Any) -> Answer:
        number = next(self._numbers)
        answer = self._answers[number] = Answer(number)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, "do": do, **fields}) + "\n")
        self._process.stdin.flush()
        return answer

    def ask(self, do: str, **fields: Any) -> Any:
        return self.send(do, **fields).wait()

    def settled(self) -> None:
        """Wait until nothing is left of any attempt: no KV in use, no lease, no pull. Raises AssertionError."""

        def left() -> dict[str, Any]:
            load = self.ask("load")
            figures = {name: load[name] for name in ("running", "waiting", "kv_usage", "leased_blocks", "leased")}
            for rank in range(len(self.facts["agents"])):
                stats = self.ask("stats", rank=rank)
                figures |= {f"{name} of {rank}": stats[name] for name in ("leases", "leased_blocks", "pulls", "parked")}
            return {name: value for name, value in figures.items() if value}

        until(lambda: not left(), lambda: f"left: {left()}", FREED_S)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"id"'):
                message = json.loads(line)
                self._answers[message["id"]].lines.put(message)
        for answer in self._answers.values():
            answer.lines.put({"error": "process_ended", "detail": "the engine's process has ended"})


def until(
    condition: Callable[[], object],
    complaint: Callable[[], str] = lambda: "it did not happen",
    timeout_s: float = HANG_S,
) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, complaint()
        time.sleep(0.02)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
