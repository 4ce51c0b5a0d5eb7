"""Real engines of both kinds that hand off to each other, by name, each in a process with its own environment."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from tiny_models import make_model
from tokenizers import Tokenizer

from baton.blocks import BLOCK_TOKENS_DEFAULT
from baton.engines.engine import Engine, EngineFacts, EngineLoad, Leg
from baton.errors import PeerUnreachable, TransferFailed
from baton.messages.attempts import Sampling
from baton.messages.workers import Role
from baton.transfer import AgentOptions, NativeAgent
from benchmarks.remote_engine.engine import RemoteEngine
from benchmarks.remote_engine.settings import EngineName, engine_environ, engine_options, engine_python
from tests.contract.engine_suite import EngineSuite
from tests.harness.engine_pair import Pair, Shadow, collect
from tests.harness.fork_server import forked
from tests.harness.limits import HANG_S

AGENT = {
    "secret": "tests",
    "connect_timeout_s": 3.0,
    "lease_ttl_s": 4.0,
    "unclaimed_ttl_s": 30.0,
    "wanted_timeout_s": 10.0,
    "stall_timeout_s": 30.0,
}
_pairs = itertools.count()
RUNNING_MAX = 4
KINDS: Mapping[tuple[str, str | None], Mapping[str, object]] = {
    # On a CPU vLLM keeps latent rows in blocks of 16 tokens, whatever is asked for. Where the CPU has AMX, its default
    # attention does not take weights in fp32.
    ("vllm", "deepseek"): {"num_gpu_blocks_override": 512, "attention_backend": "CPU_MLA"},
    ("vllm", "staged"): {"kv_path": "staged", "kv_pool_bytes": 64 << 20},
    ("sglang", "staged"): {"kv_path": "staged", "kv_pool_bytes": 64 << 20},
    ("vllm", "fp8"): {"kv_cache_dtype": "fp8"},
    ("vllm", "scaled"): {"kv_cache_dtype": "fp8"},
    ("vllm", "scaledotherwise"): {"kv_cache_dtype": "fp8"},
    ("vllm", "stagedfp8"): {"kv_path": "staged", "kv_cache_dtype": "fp8"},
    ("vllm", "stageddeepseek"): {
        "kv_path": "staged",
        "num_gpu_blocks_override": 512,
        "attention_backend": "CPU_MLA",
    },
    ("sglang", "stageddeepseek"): {"kv_path": "staged"},
    ("sglang", "fp8"): {"kv_cache_dtype": "fp8_e4m3"},
    ("vllm", "lfm2"): {"load_format": "dummy"},
    ("sglang", "lfm2"): {"load_format": "dummy"},
    ("sglang", "mellum"): {"load_format": "dummy"},
}
"""Further options by engine and kind of model or cache."""
COMPACT: Mapping[EngineName, Mapping[str, Any]] = {
    "vllm": {"structured_outputs_config": {"disable_any_whitespace": True}},
    "sglang": {"constrained_json_disable_any_whitespace": True},
}
"""Options for JSON without white space: random weights would not end it."""
GREEDY = Sampling(max_tokens=32, temperature=0.0, ignore_eos=True)
PROMPT_TOKENS = (1, 33, 200, 1500)


def nightly(value: object) -> object:
    """Leave this case to `make test-nightly`."""
    return pytest.param(value, marks=pytest.mark.nightly)


@dataclass
class Running:
    engine: RemoteEngine
    facts: EngineFacts
    shadow: Shadow
    stack: AsyncExitStack
    wants_pool: bool


class Engines:
    """Engines by name, started on first use.

    Each takes 1 to 2 GB, so few run at a time: the least recently used one ends first.
    """

    def __init__(self, folder: Path, **options: Mapping[str, object]) -> None:
        """`options`: further options of each engine, by its name."""
        self._folder = folder
        self._options = options
        self._running: dict[str, Running] = {}

    async def get(self, name: str) -> Running:
        """Return an engine by `engine-block_tokens`; before the tokens may stand a kind of `tiny_models` or `KINDS`.

        With `x2` at the end it has two tensor-parallel ranks.
        """
        running = self._running.pop(name, None)
        if running is None:
            while len(self._running) >= RUNNING_MAX:
                await self._running.pop(next(iter(self._running))).stack.aclose()
            running = await self._start(name)
        self._running[name] = running
        return running

    async def lose(self, name: str) -> None:
        """Forget an engine that was killed; the next `get` starts another one."""
        await self._running.pop(name).stack.aclose()

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def text(self, tokens: Sequence[int]) -> str:
        """Return what tokens of these engines say, without special ones."""
        return str(Tokenizer.from_file(str(self._folder / "qwen3" / "tokenizer.json")).decode(list(tokens)))

    async def close(self) -> None:
        for running in self._running.values():
            await running.stack.aclose()

    async def _start(self, name: str) -> Running:
        parts = re.fullmatch(r"(\w+)(?:-([a-z]\w*))?-(\d+)(?:x(\d))?", name)
        assert parts is not None, name
        engine, kind, block_tokens, ranks = parts.groups()
        assert engine in ("vllm", "sglang")
        # What is staged is of the kind that follows the word.
        of_model = (kind or "").removeprefix("staged")
        model = self._folder / ("qwen3" if of_model in ("", "bfloat16", "fp8") else of_model)
        make_model(model, of_model)
        python = engine_python(engine)
        if python is None:
            pytest.skip(f"there is no environment with {engine}: make environment-{engine}")
        dtype = "bfloat16" if kind == "bfloat16" else "float32"
        settings: dict[str, Any] = {
            "engine": engine,
            "model": str(model),
            "role": Role.DECODE,
            "options": engine_options(engine, block_tokens=int(block_tokens), dtype=dtype, ranks=int(ranks or 1))
            | dict(KINDS.get((engine, kind), {}))
            | dict(self._options.get(engine, {})),
            "agent": AGENT,
        }
        remote = RemoteEngine(python, settings, forked(engine_environ(engine), engine), self._folder / f"{name}.log")
        stack, shadow = AsyncExitStack(), Shadow()
        stack.push_async_callback(remote.close)
        try:
            facts = await remote.start()
        except BaseException:
            await stack.aclose()
            raise
        stack.callback(asyncio.create_task(shadow.follow(remote)).cancel)
        return Running(remote, facts, shadow, stack, wants_pool="kv_pool_bytes" in settings["options"])


class RealEngineSuite(EngineSuite):
    @pytest.mark.parametrize("endpoint", ["malformed"])
    async def test_an_unreachable_source_is_named_as_such(self, pair: Pair, endpoint: str) -> None:
        """Real engines refuse a malformed endpoint instead of connecting to it."""
        with pytest.raises(TransferFailed, match="is not an endpoint"):
            await collect(pair.decode, pair.request(pair.prompt(50), leg=Leg.DECODE, agents=("no endpoint",)))
        with pytest.raises(PeerUnreachable):
            await collect(pair.decode, pair.request(pair.prompt(50), leg=Leg.DECODE, agents=(pair.dead_agent,)))
        await pair.settled()


async def make_pair(engines: Engines, prefill: str, decode: str) -> Pair:
    source, sink = await engines.get(prefill), await engines.get(decode)
    for name, running in ((prefill, source), (decode, sink)):
        can_have_pool = running.facts.block_tokens % BLOCK_TOKENS_DEFAULT == 0
        assert (running.facts.pool_blocks > 0) == (running.wants_pool and can_have_pool), name
    gone = NativeAgent(AgentOptions(secret="tests"))
    gone.close()
    return Pair(
        source.engine,
        sink.engine,
        source.facts,
        sink.facts,
        vocabulary=8192,
        dead_agent=gone.endpoint,
        prefill_shadow=source.shadow,
        decode_shadow=sink.shadow,
        # Pairs share engines, and so what these have cached.
        numbers=itertools.count(next(_pairs) * 10_000),
    )


def engines_fixture(**options: Mapping[str, object]) -> Callable[..., object]:
    """Make a module's fixture `engines`, with further options for each kind of engine."""

    @pytest_asyncio.fixture(scope="module", loop_scope="module")
    async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Engines]:
        engines = Engines(tmp_path_factory.mktemp("engines"), **options)
        try:
            yield engines
        finally:
            await engines.close()

    return engines


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def named_pair(request: pytest.FixtureRequest, engines: Engines) -> Pair:
    """Provide the pair of engines whose names are the parameter, as in `vllm-32-to-sglang-32`."""
    return await make_pair(engines, *request.param.split("-to-"))


async def asleep(engine: Engine) -> None:
    """Wait until an engine that has nothing to do leaves its processor to others."""
    assert isinstance(engine, RemoteEngine)
    processes = [process := psutil.Process(engine.pid), *process.children(recursive=True)]

    def used_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    async with asyncio.timeout(HANG_S):
        share = 1.0
        while share >= 0.4:
            before_s = used_s()
            await asyncio.sleep(1)
            share = used_s() - before_s


def figures(load: EngineLoad) -> tuple[int, int]:
    return load.prompt_tokens_computed, load.prompt_tokens_pulled


async def check_answers(pair: Pair, *, at_once: bool) -> None:
    """Hand prompts off, and compare with what the decode engine says alone, which computes them all again."""
    prompts = [pair.prompt(tokens) for tokens in PROMPT_TOKENS * (2 if at_once else 1)]
    before = figures(pair.decode.load())
    if at_once:
        answers = await asyncio.gather(*(pair.hand_off(prompt, GREEDY) for prompt in prompts))
    else:
        answers = [await pair.hand_off(prompt, GREEDY) for prompt in prompts]
    await pair.settled()
    computed, pulled = (after - was for after, was in zip(figures(pair.decode.load()), before, strict=True))
    assert computed == len(prompts), "of each prompt only the last token, which samples the first of the answer"
    assert pulled == sum(map(len, prompts)) - len(prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = await collect(pair.decode, pair.request(prompt, GREEDY, salt="computed here"))
        assert answer.tokens == alone.tokens, len(prompt)
        assert answer.last.transferred_tokens == len(prompt) - 1


@asynccontextmanager
async def corrupting(pair: Pair, **faults: Any) -> AsyncGenerator[None]:
    assert isinstance(pair.prefill, RemoteEngine)
    await pair.prefill.set_faults(corrupt_every=1, **faults)
    try:
        yield
    finally:
        await pair.prefill.set_faults()
