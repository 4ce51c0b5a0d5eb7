"""The table of fields knows every field of the engines' own servers, in the versions that are installed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from baton_gateway import fields

from benchmarks.remote_engine.settings import EngineName, engine_environ, engine_python

SCRIPT = Path(__file__).with_name("request_fields.py")
ENGINE_FIELDS = Path(__file__).parents[2] / "docs" / "engine_fields.json"


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_engines_servers_have_these_fields(engine: EngineName) -> None:
    python = engine_python(engine)
    if python is None:
        pytest.skip(f"there is no environment with {engine}: make environment-{engine}")
    ran = subprocess.run(
        [python, str(SCRIPT), engine], env=engine_environ(engine), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    if engine == "vllm":
        assert set(found.pop("parameters")) - fields.REFUSED.keys() == fields.ENGINE
    written = json.loads(ENGINE_FIELDS.read_text())[engine]
    assert written == found, f"put the output of {SCRIPT.name} into {ENGINE_FIELDS.name}, and handle new fields"
