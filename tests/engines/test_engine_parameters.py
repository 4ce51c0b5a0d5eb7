"""Parameters that engines declare, and refuse by their own checks, in their own environments; no engine runs here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.messages.attempts import Sampling
from baton.messages.base import PARAMETER_CHARACTERS_MAX, PARAMETERS_MAX
from benchmarks.remote_engine.settings import EngineName, engine_environ, engine_python

CHECKS = Path(__file__).with_name("parameter_checks.py")
SCHEMA = {"kind": "json", "text": "{}"}
EXAMPLES: dict[EngineName, tuple[dict[str, Any], dict[str, Any]]] = {
    # Parameters that the engine takes, and some that it does not.
    "vllm": ({"constraint": SCHEMA, "extensions": {"allowed_token_ids": [5, 6]}}, {"allowed_token_ids": "all"}),
    "sglang": ({"constraint": SCHEMA}, {"json_schema": "{}"}),
}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_declares_checks_and_refuses_by_itself(engine: EngineName) -> None:
    python = engine_python(engine)
    if python is None:
        pytest.skip(f"there is no environment with {engine}: make environment-{engine}")
    taken, refused = EXAMPLES[engine]
    samplings = [
        {"max_tokens": 5},
        {"max_tokens": 5, **taken},
        {"max_tokens": 5, "extensions": refused},
        {"max_tokens": 5, "extensions": {"no_such": 1}},
        {"max_tokens": 5, "temperature": -1.0},
    ]
    command = [python, str(CHECKS), engine, json.dumps(samplings)]
    ran = subprocess.run(command, env=engine_environ(engine), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    assert set(msgspec.convert(samplings[1], Sampling).parameters) <= set(report["declared"])
    assert len(report["declared"]) <= PARAMETERS_MAX
    assert max(map(len, report["declared"])) <= PARAMETER_CHARACTERS_MAX
    plain, good, *bad = report["outcomes"]
    assert (plain, good) == (None, None)
    assert [code for code, *_ in bad] == ["invalid_request"] * 3
    assert bad[1][1] == "no_such"
    errors = report["errors"]
    assert errors.pop("refused")[0] == "invalid_request"
    assert all(error is None or error[0] == "engine_failed" for error in errors.values()), "inside is not the client's"
