"""The servers that `benchmarks.gateway` compares, each with its processes by role."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import httpx
import psutil

from benchmarks.deployment import deployment
from benchmarks.gateway_engine import MODEL, PACE_S
from benchmarks.gateway_load import HOST
from benchmarks.peer_proxies import free_ports
from benchmarks.peer_routing import find_version

ROOT: Final = Path(__file__).parents[1]
START_S: Final = 300.0
STOP_S: Final = 5.0
STREAMS: Final = 64
ENGINES: Final = 2
"""Engines behind each peer, and decode workers of Baton."""
WORKERS: Final = "workers"
"""The role of engines: not on the path that is measured, so on another core than all others."""
ENGINE_OPTIONS: Final = {
    **dict.fromkeys(("step_fixed_s", "prefill_token_s", "attention_token_s"), 0.0),
    "eos_probability": 0.0,
    "running_max": 256,
    "step_tokens_max": 1 << 16,
    "context_tokens_max": 1 << 16,
    "layers": 4,
    "kv_bytes_per_token": 32,
    "blocks": 16384,
}
"""An engine that takes no time, with room for the longest prompts."""


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers."""

    port: int
    model: str
    roots: Mapping[str, Sequence[int]]
    """Processes by role, without their descendants."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What contenders share."""

    folder: Path
    model_folder: Path
    engine_ports: Sequence[int]
    engine_pids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    start: Callable[[Setup], Generator[Running]]
    package: str = ""
    """Package that it needs in its environment; empty: it runs in ours."""
    environment: str = ""

    def version(self) -> str:
        """Return the version of the package; empty if there is none."""
        python = python_of(self.environment)
        return find_version(python, self.package) if Path(python).exists() else ""


def python_of(environment: str) -> str:
    return str(ROOT / environment / "bin" / "python")


@contextmanager
def program(
    setup: Setup, name: str, command: Sequence[str], settings: Mapping[str, str] | None = None
) -> Generator[subprocess.Popen[bytes]]:
    """Run a program, with its output in a log of this name, and end it afterwards."""
    with (setup.folder / f"{name}.log").open("wb") as log:
        environ = {**os.environ, **(settings or {})}
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environ)
    try:
        yield process
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for each in children:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def wait_until_answering(setup: Setup, name: str, port: int, model: str, process: subprocess.Popen[bytes]) -> None:
    """Return when a request is answered."""
    body = {"model": model, "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1, "stream": True}
    give_up_s = time.monotonic() + START_S
    answer = ""
    while time.monotonic() < give_up_s and process.poll() is None:
        try:
            found = httpx.post(f"http://{HOST}:{port}/v1/chat/completions", json=body, timeout=5.0)
            answer = found.text
            if found.status_code == 200 and "[DONE]" in answer:
                return
        except httpx.TransportError as error:
            answer = repr(error)
        time.sleep(0.2)
    log = (setup.folder / f"{name}.log").read_text(errors="replace")
    raise ChildProcessError(f"{name} did not answer: {answer[-300:]}\n{log[-1500:]}")


@contextmanager
def engines(folder: Path) -> Generator[tuple[list[int], list[int]]]:
    """Run the engines of the peers. Yields their ports and processes."""
    ports = free_ports(ENGINES)
    setup = Setup(folder, folder, ports, [])
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                program(setup, f"engine-{port}", (sys.executable, "-m", "benchmarks.gateway_engine", str(port)))
            )
            for port in ports
        ]
        for port, process in zip(ports, processes, strict=True):
            wait_until_answering(setup, f"engine-{port}", port, MODEL, process)
        yield ports, [process.pid for process in processes]


def baton(setup: Setup, *, name: str, prefill: int = 0, decode_sequence_s: float = 0.0) -> Generator[Running]:
    folder = setup.folder / name
    folder.mkdir()
    options = json.dumps({**ENGINE_OPTIONS, "decode_sequence_s": decode_sequence_s})
    flags = [
        "--engine",
        "simulated",
        "--model",
        str(setup.model_folder),
        "--engine-options",
        options,
    ]
    flags += ["--prefill", str(prefill), "--decode", str(ENGINES), "--disaggregation", "always" if prefill else "never"]
    # On a machine that is busy with the load, late answers must not make a worker look lost.
    with deployment(folder, flags, {"BATON_GATEWAY_ACCEPT_S": "5"}) as ports:
        roots: dict[str, list[int]] = {}
        for process in psutil.Process(ports.launcher_pid).children():
            role = role_of(process.cmdline())
            if role:
                roots.setdefault(role, []).append(process.pid)
        yield Running(ports.http, setup.model_folder.name, roots)


def role_of(command: Sequence[str]) -> str:
    """Return the role of a process of `baton up`; empty for others."""
    services = {"baton_gateway": "gateway", "baton_scheduler": "scheduler", "baton_kvindex": "kvindex"}
    services |= {"baton_prefill": WORKERS, "baton_decode": WORKERS}
    found = next((services[word] for word in command if word in services), "")
    server = Path(command[0]).name if command else ""
    return found or next((name for name in ("nats", "redis") if server.startswith(name)), "")


def router(setup: Setup, *, package: str, policy: str, flags: Callable[[Setup], Sequence[str]]) -> Generator[Running]:
    port, metrics_port = free_ports(2)
    command = [python_of(".venv-peer-routers"), "-m", f"{package.replace('-', '_')}.launch_router"]
    command += ["--host", HOST, "--port", str(port), "--prometheus-port", str(metrics_port), "--policy", policy]
    command += ["--worker-startup-check-interval", "1", "--max-concurrent-requests", "100000", "--log-level", "error"]
    command += ["--worker-urls", *(f"http://{HOST}:{each}" for each in setup.engine_ports), *flags(setup)]
    with program(setup, package, command) as process:
        wait_until_answering(setup, package, port, MODEL, process)
        yield Running(port, MODEL, {"gateway": [process.pid], WORKERS: setup.engine_pids})


def event_sources(setup: Setup) -> list[str]:
    """Return flags that name sources of KV events. None comes: the engines hold no KV."""
    flags = ["--kv-event-model", MODEL]
    for port, source in zip(setup.engine_ports, free_ports(ENGINES), strict=True):
        flags += ["--kv-event-source", f"http://{HOST}:{port}=tcp://{HOST}:{source}"]
    return flags


def litellm(setup: Setup) -> Generator[Running]:
    (port,) = free_ports(1)
    models = [
        {
            "model_name": MODEL,
            "litellm_params": {
                "model": f"hosted_vllm/{MODEL}",
                "api_base": f"http://{HOST}:{each}/v1",
                "api_key": "none",
            },
        }
        for each in setup.engine_ports
    ]
    config = setup.folder / "litellm.json"
    config.write_text(json.dumps({"model_list": models, "litellm_settings": {"drop_params": True}}))
    folder = ROOT / ".venv-peer-litellm" / "bin"
    command = [str(folder / "python"), str(folder / "litellm"), "--config", str(config)]
    command += ["--host", HOST, "--port", str(port), "--num_workers", "1"]
    settings = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        # Any client may come, as at the other contenders.
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    with program(setup, "litellm", command, settings) as process:
        wait_until_answering(setup, "litellm", port, MODEL, process)
        yield Running(port, MODEL, {"gateway": [process.pid], WORKERS: setup.engine_pids})


def dynamo(setup: Setup) -> Generator[Running]:
    (port,) = free_ports(1)
    python = python_of(".venv-peer-dynamo")
    settings = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(setup.folder / "dynamo"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_LOG": "warn",
        "HF_HUB_OFFLINE": "1",
    }
    mocker = [python, "-m", "dynamo.mocker", "--model-path", str(setup.model_folder), "--model-name", MODEL]
    mocker += ["--num-workers", str(ENGINES), "--block-size", "16", "--speedup-ratio", "1000000"]
    frontend = [python, "-m", "dynamo.frontend", "--http-port", str(port), "--router-mode", "kv"]
    with program(setup, "mocker", mocker, settings) as engines, program(setup, "dynamo", frontend, settings) as process:
        wait_until_answering(setup, "dynamo", port, MODEL, process)
        yield Running(port, MODEL, {"gateway": [process.pid], WORKERS: [engines.pid]})


def floor(setup: Setup, *, name: str) -> Generator[Running]:
    (port,) = free_ports(1)
    with program(setup, name, (sys.executable, "-m", "benchmarks.gateway_floors", name, str(port))) as process:
        wait_until_answering(setup, name, port, MODEL, process)
        yield Running(port, MODEL, {"gateway": [process.pid]})


ROUTERS: Final = ".venv-peer-routers"
CONTENDERS: Final[Sequence[Contender]] = (
    Contender("baton", partial(baton, name="baton")),
    Contender("baton-handed-over", partial(baton, name="baton-handed-over", prefill=1)),
    Contender("baton-paced", partial(baton, name="baton-paced", decode_sequence_s=PACE_S * ENGINES / STREAMS)),
    Contender("fastapi", partial(floor, name="fastapi")),
    Contender("asgi", partial(floor, name="asgi")),
    Contender(
        "sglang-router",
        partial(router, package="sglang-router", policy="cache_aware", flags=lambda _: ()),
        "sglang-router",
        ROUTERS,
    ),
    Contender(
        "vllm-router",
        partial(router, package="vllm-router", policy="kv_aware", flags=event_sources),
        "vllm-router",
        ROUTERS,
    ),
    Contender("dynamo", dynamo, "ai-dynamo", ".venv-peer-dynamo"),
    Contender("litellm", litellm, "litellm", ".venv-peer-litellm"),
)
