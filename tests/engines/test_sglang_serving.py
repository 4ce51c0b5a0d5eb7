"""Roles of real SGLang workers change at run time: services as processes, OpenAI's own SDK as the client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from serving import PATIENCE, change_roles_under_answers

from baton.messages.workers import Role
from benchmarks.remote_engine.settings import engine_environ, engine_options, engine_python
from tests.harness.cluster import Cluster, running_cluster

pytestmark = [pytest.mark.nightly, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> AsyncIterator[Cluster]:
    python = engine_python("sglang")
    if python is None:
        pytest.skip("SGLang is needed: make environment-sglang")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environ("sglang").items():
            patch.setenv(name, value)
        async with running_cluster(tmp_path_factory.mktemp("serving"), model=tiny_model) as cluster:
            await cluster.start_control_plane(gateway_flags=PATIENCE)
            for name in ("prefill-0", "decode-0", "decode-1"):
                role, options = Role(name.partition("-")[0]), engine_options("sglang")
                await cluster.start_worker(
                    role, name, "--digest-s", "0.1", engine="sglang", options=options, python=python
                )
                # One after another: loading two at a time takes longer than both in turn.
                await cluster.wait_worker(name, timeout_s=600)
            await cluster.wait_ready()
            yield cluster


async def test_roles_change_under_answers(cluster: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        # At times all need one worker, whose KV has room for five.
        await change_roles_under_answers(cluster, client, at_once=4)
