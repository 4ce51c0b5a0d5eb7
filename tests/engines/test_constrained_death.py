"""Answers of a JSON schema whose decode worker is killed in the middle, over every pair of engines."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import openai
import pytest
from cross_engines import COMPACT
from jsonschema import Draft202012Validator
from serving import PATIENCE, start_worker, tell, wait_idle

from baton.messages.attempts import AttemptState
from baton.messages.workers import Role
from benchmarks.remote_engine.settings import EngineName, engine_environ, engine_python
from tests.harness.cluster import running_cluster

ROW = {
    "type": "object",
    "properties": {"größe": {"enum": ["S", "M", "日本"]}, "id": {"type": "string", "minLength": 3, "maxLength": 6}},
    "required": ["größe", "id"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {"type": "array", "items": ROW, "minItems": 16, "maxItems": 16}
TOKENS_MAX = 1500
ENGINES: tuple[EngineName, ...] = ("vllm", "sglang")

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.mark.parametrize("decode", ENGINES)
@pytest.mark.parametrize("prefill", ENGINES)
async def test_json_stays_the_same_when_its_worker_is_killed(
    prefill: EngineName, decode: EngineName, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if None in (engine_python(prefill), engine_python(decode)):
        pytest.skip("both engines are needed: make environment-vllm environment-sglang")
    for name, value in engine_environ("sglang").items():
        monkeypatch.setenv(name, value)
    form = {"type": "json_schema", "json_schema": {"name": "rows", "schema": SCHEMA}}
    async with running_cluster(tmp_path, model=tiny_model) as cluster:
        await cluster.start_control_plane(gateway_flags=PATIENCE)
        await start_worker(cluster, Role.PREFILL, "prefill", prefill, **COMPACT[prefill])
        for name in ("decode-0", "decode-1"):
            await start_worker(cluster, Role.DECODE, name, decode, **COMPACT[decode])
        await cluster.wait_ready()
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            number, answer, struck = await cluster.observer.caught_in(
                Role.DECODE,
                AttemptState.RUNNING,
                ask=lambda number: tell(client, number, output_tokens=TOKENS_MAX, response_format=form),
            )
            cluster.services[struck].signal(signal.SIGKILL)
            said = await answer
            assert any(workers >= {"decode-0", "decode-1"} for workers in cluster.observer.workers.values())
            await cluster.services.pop(struck).end()
            del cluster.observer.heartbeats[struck]
            async with asyncio.timeout(60):
                undisturbed = await tell(client, number, output_tokens=TOKENS_MAX, response_format=form)
            assert said.encode() == undisturbed.encode()
            Draft202012Validator(SCHEMA).validate(json.loads(said))  # pyright: ignore[reportUnknownMemberType]
            await wait_idle(cluster)
