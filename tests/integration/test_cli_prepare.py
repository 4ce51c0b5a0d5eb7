"""The output of a one-shot container for the workers: a model, and settings that they can read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from baton_decode.config import DecodeSettings

from baton import config
from baton.cli.deployment import Deployment
from baton.cli.engine_defaults import engine_defaults
from baton.cli.prepare import prepare
from baton.cli.servers import free_port
from baton.stop import EXIT_FAILED, EXIT_MISCONFIGURED
from tests.harness.limits import HANG_S

NAMED = {"max_model_len": 4096, "share": 0.5, "eager": True, "unset": None, "deep": {"a b": [1, 'é"\n']}}


def read(file: Path) -> DecodeSettings:
    return config.load(DecodeSettings, service="decode", argv=["--config", str(file)], environ={})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare for each engine in turn: the model is made once, the settings are rewritten."""
    return tmp_path_factory.mktemp("prepared")


@pytest.mark.parametrize("engine", ["vllm", "simulated"])
def test_workers_read_what_was_prepared(folder: Path, engine: str) -> None:
    deployment = Deployment(
        folder=folder,
        engine=engine,  # pyright: ignore[reportArgumentType]
        device="cpu",
        engine_options=NAMED,
        pythons={},
    )
    settings = read(prepare(deployment))
    assert (settings.model_name, settings.engine, settings.device) == ("tiny", engine, "cpu")
    assert (Path(settings.model) / "config.json").is_file()
    defaults = engine_defaults(engine, device="cpu", tiny=True, workers_per_gpu=1)
    defaults |= {"kv_pool_bytes": "auto", "kv_pool_workers": 2}
    named = {key: value for key, value in NAMED.items() if value is not None}
    assert settings.engine_options == json.loads(json.dumps(defaults | named))


@pytest.mark.parametrize(
    ("folder", "written_bytes_max", "words"),
    [
        ("/proc/none", None, "/proc/none: No such file or directory"),
        ("", 4096, "a file cannot be written: File too large"),
    ],
)
@pytest.mark.parametrize("command", [("baton.cli.prepare",), ("baton.cli", "up", "--folder")])
def test_a_folder_that_takes_no_files_is_one_sentence(
    tmp_path: Path, command: tuple[str, ...], folder: str, written_bytes_max: int | None, words: str
) -> None:
    limited = ["prlimit", f"--fsize={written_bytes_max}"] if written_bytes_max else []
    port = ["--port", str(free_port())] if "up" in command else []
    answer = subprocess.run(
        [*limited, sys.executable, "-m", *command, folder or str(tmp_path), "--engine", "simulated", *port],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert answer.returncode == EXIT_FAILED, answer.stderr
    assert words in answer.stderr
    assert len(answer.stderr.splitlines()) == 1, answer.stderr


def test_a_model_of_the_users_keeps_its_name(tmp_path: Path) -> None:
    model = tmp_path / "Qwen3"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 40960}')
    (model / "model.safetensors").touch()
    deployment = Deployment(folder=tmp_path, model=str(model), device="cpu", engine_options={}, pythons={})
    settings = read(prepare(deployment))
    assert (settings.model, settings.model_name) == (str(model), "Qwen3")
    assert settings.engine_options["max_model_len"] == 8192


def test_containers_on_a_gpu_are_told_to_serve_whole(tmp_path: Path) -> None:
    """The scheduler of compose.yaml separates where nothing else is said, so the start ends with the reason."""
    flags = ["--device", "cuda", "--engine", "vllm"]
    refused = run_prepare(tmp_path, *flags, "--disaggregation", "always")
    assert refused.returncode == EXIT_MISCONFIGURED
    assert "on CUDA decode workers serve requests whole" in refused.stderr
    assert "DISAGGREGATION=never" in refused.stderr
    assert run_prepare(tmp_path, *flags, "--disaggregation", "never").returncode == 0
    assert read(tmp_path / "worker.toml").device == "cuda"


def run_prepare(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "baton.cli.prepare", str(folder), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
