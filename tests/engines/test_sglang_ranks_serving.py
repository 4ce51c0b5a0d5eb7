"""A `baton up` whose SGLang workers have two ranks each: one rank is killed under streams, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator
from contextlib import suppress

import openai
import psutil
import pytest
from serving import tell

from baton.cli.tiny_model import make_tiny_model
from benchmarks.remote_engine.settings import engine_environ, engine_options, engine_python
from tests.harness.launcher import Launcher, launched

OUTPUT_TOKENS = (40, 300, 300, 300, 300, 300)
"""Tokens of each stream; the rank is killed when the first one ends."""
READY_TIMEOUT_S = 600.0
"""Three real engines start one after another."""
RANK_NAME = "sglang::scheduler_TP1"

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Generator[Launcher]:
    pythons = {"vllm": engine_python("vllm"), "sglang": engine_python("sglang")}
    if None in pythons.values():
        pytest.skip("both engines are needed: make environment-vllm environment-sglang")
    folder = tmp_path_factory.mktemp("up")
    make_tiny_model(folder / ".cache" / "models" / "tiny-qwen3")
    # One decode worker must have room for all streams.
    options = {
        "vllm": engine_options("vllm"),
        "sglang": engine_options("sglang", ranks=2) | {"max_total_tokens": 32768},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engine_environ("sglang").items():
            patch.setenv(name, value)
        with launched(
            folder,
            *("--prefill-engine", "vllm", "--decode-engine", "sglang", "--decode", "2", "--disaggregation", "always"),
            *("--engine-options", json.dumps(options)),
            *(flag for engine, python in pythons.items() for flag in (f"--{engine}-python", str(python))),
            ready_timeout_s=READY_TIMEOUT_S,
        ) as launcher:
            yield launcher


def second_ranks(launcher: Launcher) -> list[psutil.Process]:
    """Return the second rank of each decode worker that runs."""
    ranks: list[psutil.Process] = []
    for process in launcher.descendants():
        with suppress(psutil.NoSuchProcess):
            if process.name() == RANK_NAME:
                ranks.append(process)
    return ranks


async def test_a_killed_rank_takes_its_worker_down_and_no_answer_with_it(launcher: Launcher) -> None:
    async with openai.AsyncOpenAI(base_url=f"{launcher.url}/v1", api_key="none", max_retries=0) as client:

        def answers(mode: str) -> list[asyncio.Task[str]]:
            asked = enumerate(OUTPUT_TOKENS)
            return [asyncio.create_task(tell(client, n, output_tokens=tokens, mode=mode)) for n, tokens in asked]

        expected = await asyncio.gather(*answers("never"))
        # Both decode workers, in turn: each of them serves some of the streams.
        for struck in second_ranks(launcher):
            restarts = launcher.output.count(" is back")
            running = answers("always")
            _, streaming = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            assert len(streaming) == len(running) - 1
            struck.kill()
            assert await asyncio.gather(*running) == expected
            await asyncio.to_thread(
                launcher.wait_until, lambda output, was=restarts: output.count(" is back") > was, "the worker was back"
            )
        assert len(second_ranks(launcher)) == 2
        assert await asyncio.gather(*answers("always")) == expected
