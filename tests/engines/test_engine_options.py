"""Engine options, environment and KV events on their way between Baton and an engine; no engine runs here."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from vllm.engine import arg_utils
from vllm.engine.arg_utils import EngineArgs
from vllm.usage.usage_lib import UsageContext

from baton.engines.engine import EngineBlocksCleared, EngineBlocksRemoved, EngineBlocksStored
from baton.engines.gpu_profiles import VLLM_FLAGS, gpu_options
from baton.engines.kv_events import KvEventListener, decode_batch
from baton.engines.options import (
    WHOLE_ON_CUDA,
    Device,
    Dialect,
    KvPath,
    choose_handoff,
    choose_pool,
    engine_arguments,
    engine_environment,
    local_model,
    on_gpu,
    split_options,
)
from baton.engines.sglang.options import DIALECT as SGLANG
from baton.engines.sglang.options import shared_cores, tensor_parallel_ranks
from baton.engines.vllm.options import DIALECT, check_handoff, choose_executor
from baton.errors import ConfigurationError, EngineFailed
from baton.messages.index import Tier
from baton.messages.workers import Role
from baton.pool.memory import available_bytes
from baton.worker.settings import WorkerSettings, create_engine
from tests.harness.limits import HANG_S

CPU = DIALECT.profiles[Device.CPU]
KNOWN = ("dtype", "block_size", "max_num_seqs", "enforce_eager", "kv_cache_memory_bytes", "data_parallel_size")


def test_profile_is_overridden_by_options() -> None:
    arguments = engine_arguments({"block_size": 64, "dtype": "float32"}, KNOWN, CPU, DIALECT)
    assert arguments == {**CPU.options, "block_size": 64, "dtype": "float32"}


GPU_NAMES = (
    ("NVIDIA A100-SXM4-80GB", 80, (2048, 256)),
    ("NVIDIA A100-PCIE-40GB", 40, (2048, 256)),
    ("NVIDIA L4", 24, (2048, 256)),
    ("NVIDIA L40S", 48, (2048, 256)),
    ("NVIDIA H100 80GB HBM3", 80, (8192, 1024)),
    ("NVIDIA H200", 141, (8192, 1024)),
    ("NVIDIA B200", 180, (16384, 1024)),
)


@pytest.mark.parametrize(("name", "memory_gib", "expected"), GPU_NAMES)
def test_a_gpus_flags_are_what_vllm_itself_takes_as_a_server(
    monkeypatch: pytest.MonkeyPatch, name: str, memory_gib: int, expected: tuple[int, int]
) -> None:
    options = gpu_options(VLLM_FLAGS, name)
    assert (options["max_num_batched_tokens"], options["max_num_seqs"]) == expected
    platform = SimpleNamespace(
        get_device_total_memory=lambda: memory_gib << 30,
        get_device_name=lambda: name,
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    of_server = (limits[UsageContext.OPENAI_API_SERVER] for limits in EngineArgs.get_batch_defaults(1))
    assert tuple(of_server) == expected


def test_a_gpus_flags_reach_the_engine_and_the_users_win() -> None:
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    cuda = DIALECT.profiles[Device.CUDA]
    profile = on_gpu(cuda, gpu_options(VLLM_FLAGS, "NVIDIA H100 80GB HBM3"))
    arguments = engine_arguments({"max_num_seqs": 8}, known, profile, DIALECT)
    assert arguments == {**cuda.options, "max_num_batched_tokens": 8192, "max_num_seqs": 8}
    assert {flag.option for flags in VLLM_FLAGS.values() for flag in flags} <= set(known)
    assert gpu_options(VLLM_FLAGS, "Quadro RTX 6000") == {}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_num_seq": 8}, "max_num_seq; did you mean max_num_seqs"),
        ({"no_such_thing": 1}, "no_such_thing"),
        ({"kv_transfer_config": {}}, "kv_transfer_config"),
        ({"block_size": 16}, "block_size"),
        ({"block_size": "big"}, "block_size"),
    ],
)
def test_option_that_cannot_be_is_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        engine_arguments(options, KNOWN, CPU, DIALECT)


@pytest.mark.parametrize(
    ("options", "dialect", "named"),
    [
        ({"data_parallel_size": 2}, DIALECT, "vLLM's option data_parallel_size is 1"),
        ({"pp_size": 2}, SGLANG, "SGLang's option pp_size is 1 in Baton: it hands off between ranks that divide heads"),
        ({"dcp_size": 2}, SGLANG, "SGLang's option dcp_size is 1"),
        ({"nnodes": 2}, SGLANG, "SGLang's option nnodes is 1 in Baton: its ranks share a host"),
    ],
)
def test_option_that_has_to_be_1_is_named_before_anything_is_loaded(
    options: dict[str, object], dialect: Dialect, named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        split_options(options, dialect)
    split_options(dict.fromkeys(options, 1), dialect)


def test_ranks_of_a_worker_are_refused_where_its_engine_has_one() -> None:
    settings = WorkerSettings(model="m", engine="simulated", tensor_parallel=2)
    with pytest.raises(ConfigurationError, match="the simulated engine has one rank"):
        create_engine(Role.DECODE, settings)


def test_sglangs_ranks_are_counted_and_share_the_cores() -> None:
    assert tensor_parallel_ranks({}) == 1
    assert tensor_parallel_ranks({"tp_size": 4}) == 4
    for malformed in (0, -1, "2", None):
        with pytest.raises(ConfigurationError, match="tp_size"):
            tensor_parallel_ranks({"tp_size": malformed})
    assert shared_cores(2, {3, 0, 1}) == "0,1,3|0,1,3"


def chosen_path(role: Role, here: Device, **options: object) -> KvPath | None:
    return choose_handoff(split_options(options, DIALECT)[0], role, here)


def test_on_a_gpu_nothing_is_handed_off_unless_the_user_asks_for_it(caplog: pytest.LogCaptureFixture) -> None:
    assert chosen_path(Role.DECODE, Device.CUDA) is None
    assert [record.getMessage() for record in caplog.records] == [WHOLE_ON_CUDA]
    assert chosen_path(Role.DECODE, Device.CUDA, handoff=False) is None
    for handoff, role in ((True, Role.DECODE), (None, Role.PREFILL), (False, Role.PREFILL)):
        with pytest.raises(ConfigurationError, match=WHOLE_ON_CUDA):
            chosen_path(role, Device.CUDA, handoff=handoff)
    for role in Role:
        assert chosen_path(role, Device.CUDA, kv_path="staged") is KvPath.STAGED
        assert chosen_path(role, Device.CUDA, kv_path="gpu") is KvPath.GPU
    assert chosen_path(Role.DECODE, Device.CUDA, kv_path="staged", handoff=False) is None


def test_on_a_cpu_kv_is_handed_off_unless_the_user_says_no() -> None:
    for role in Role:
        assert [chosen_path(role, Device.CPU, handoff=wanted) for wanted in (None, True, False)] == [
            KvPath.DIRECT,
            KvPath.DIRECT,
            None,
        ]
        assert chosen_path(role, Device.CPU, kv_path="staged") is KvPath.STAGED
        assert chosen_path(role, Device.CPU, kv_path="direct") is KvPath.DIRECT


def test_a_pool_takes_its_share_of_free_memory_where_no_size_is_given() -> None:
    sizes = [split_options({"kv_pool_bytes": "auto", "kv_pool_workers": workers}, DIALECT)[0] for workers in (0, 1000)]
    assert all(own.kv_pool_auto for own in sizes)
    # Half the quarter, since what is free changes meanwhile.
    assert available_bytes() / 8 / 1000 < sizes[1].kv_pool_bytes < sizes[0].kv_pool_bytes <= 4 << 30
    assert not split_options({"kv_pool_bytes": 9}, DIALECT)[0].kv_pool_auto


def test_an_engine_that_hands_nothing_off_has_no_pool(caplog: pytest.LogCaptureFixture) -> None:
    file = {"kv_file": "/kv", "kv_file_bytes": 9}
    own, _ = split_options({"kv_pool_bytes": "auto"} | file, DIALECT)
    assert choose_pool(own, KvPath.DIRECT) is own
    without = choose_pool(own, None)
    assert (without.kv_pool_bytes, without.kv_file, without.kv_file_bytes) == (0, "", 0)
    assert [record.getMessage() for record in caplog.records] == [
        "this engine runs without a KV pool: that needs an engine that hands off KV (on a GPU: kv_path=staged or gpu)"
    ]
    own, _ = split_options({"kv_pool_bytes": 9}, DIALECT)
    with pytest.raises(ConfigurationError, match="kv_pool_bytes needs an engine that hands off"):
        choose_pool(own, None)
    own, _ = split_options({}, DIALECT)
    assert choose_pool(own, None) is own


def test_ranks_that_divide_layers_or_tokens_hand_nothing_over() -> None:
    check_handoff({"tensor_parallel_size": 2, "pipeline_parallel_size": 1})
    with pytest.raises(ConfigurationError, match="decode_context_parallel_size"):
        check_handoff({"tensor_parallel_size": 2, "decode_context_parallel_size": 2})


@pytest.mark.parametrize("option", [{"distributed_executor_backend": "ray"}, {"nnodes": 2}])
def test_ranks_on_several_hosts_hand_nothing_over(option: dict[str, object]) -> None:
    (name,) = option
    with pytest.raises(ConfigurationError, match=f"{name}=.* spreads ranks over hosts"):
        check_handoff({"tensor_parallel_size": 2, **option})
    check_handoff({"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "nnodes": 1})


def test_one_rank_with_free_threads_computes_beside_the_scheduler() -> None:
    def chosen(environ: Mapping[str, str], **arguments: object) -> object:
        choose_executor(arguments, environ)
        return arguments.get("distributed_executor_backend")

    assert str(chosen(CPU.environment)).endswith("UniProcExecutor")
    assert chosen(CPU.environment, tensor_parallel_size=2) is None
    assert chosen(CPU.environment, pipeline_parallel_size=2) is None
    assert chosen(CPU.environment, distributed_executor_backend="mp") == "mp"
    assert chosen({"VLLM_CPU_OMP_THREADS_BIND": "0-31"}) is None, "the user binds the rank's threads to cores"
    assert chosen({}) is None, "vLLM does it by itself on a GPU"


@pytest.mark.parametrize(
    "options",
    [
        {"device": "tpu"},
        {"handoff": "yes"},
        {"connector": "module.Class"},
        {"kv_path": "fast"},
        {"kv_staging_tokens": -1},
        {"kv_pool_bytes": -1},
        {"kv_pool_bytes": "much"},
        {"kv_pool_workers": -1},
        {"kv_file_bytes": "much"},
        {"kv_file": 1},
    ],
)
def test_own_option_that_is_malformed_is_named(options: dict[str, object]) -> None:
    (name,) = options
    with pytest.raises(ConfigurationError, match=name):
        split_options(options, DIALECT)


@pytest.mark.parametrize(
    "options", [{"kv_file": "/kv"}, {"kv_file_bytes": 9}, {"kv_file": "/kv", "kv_file_bytes": 9}], ids=str
)
def test_a_file_needs_its_size_and_a_pool(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="kv_file"):
        split_options(options, DIALECT)
    own, left = split_options({"kv_file": "/kv", "kv_file_bytes": 9, "kv_pool_bytes": 9}, DIALECT)
    assert (own.kv_file, own.kv_file_bytes, left) == ("/kv", 9, {})


def test_environment_is_restored_and_the_users_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    before = dict(os.environ)
    with engine_environment(DIALECT, CPU):
        assert os.environ["OMP_NUM_THREADS"] == "7"
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        os.environ["SET_BY_VLLM"] = "1"
        os.environ["OMP_NUM_THREADS"] = "1"
    assert dict(os.environ) == before


def test_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        local_model(str(tmp_path))
    with pytest.raises(ConfigurationError, match="there is no model folder"):
        local_model(str(tmp_path / "nothing"))


STORED = {
    "type": "BlockStored",
    "block_hashes": [1, (1 << 64) - 1],
    "parent_block_hash": None,
    "token_ids": [5, 6, 7, 8],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "extra_keys": [["tenant"], None],
    "a_field_of_a_newer_version": 1,
}


def published(*events: Mapping[str, object]) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def test_events_are_decoded() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [b"\1" * 8], "medium": "GPU"}
    elsewhere = {"type": "BlockRemoved", "block_hashes": [3], "medium": "CPU"}
    batch = decode_batch((0).to_bytes(8, "big"), published(STORED, removed, elsewhere, {"type": "AllBlocksCleared"}))
    assert batch.sequence == 1
    assert batch.events == (
        EngineBlocksStored(
            parent=None,
            hashes=(b"\0" * 7 + b"\1", b"\xff" * 8),
            tokens=(5, 6, 7, 8),
            block_tokens=2,
            cache_salt="tenant",
        ),
        EngineBlocksRemoved(hashes=(b"\1" * 8,)),
        EngineBlocksCleared(tier=Tier.DEVICE),
    )


async def test_listener_delivers_in_order_keeps_gaps_and_ends() -> None:
    endpoint = "ipc://@baton-test-events"
    listener = KvEventListener("vLLM", endpoint)
    listener.start()
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.bind(endpoint)
        await listener.connected(HANG_S)
        await asyncio.to_thread(publisher.recv)  # The subscription.
        for sequence in (0, 1, 3):
            publisher.send_multipart((b"", sequence.to_bytes(8, "big"), published(STORED)))
        events = listener.events()
        assert [(await anext(events)).sequence for _ in range(3)] == [1, 2, 4]
        listener.close()
        with pytest.raises(EngineFailed):
            await anext(events)


@pytest.mark.parametrize(("sent", "numbers"), [((0, 1, 2), [1, 2, 3]), ((1, 2), [1, 2]), ((2, 3), [2, 3])])
async def test_what_an_engine_publishes_as_it_starts_may_be_missed_or_not(
    sent: tuple[int, ...], numbers: list[int]
) -> None:
    """A first batch that comes late has the events of the first prompt, too."""
    endpoint = f"ipc://@baton-test-start-{sent[0]}"
    listener = KvEventListener("SGLang", endpoint, initial_batches=1)
    listener.start()
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.bind(endpoint)
        await listener.connected(HANG_S)
        await asyncio.to_thread(publisher.recv)
        for sequence in sent:
            publisher.send_multipart((b"", sequence.to_bytes(8, "big"), published(STORED)))
        events = listener.events()
        assert [(await anext(events)).sequence for _ in sent] == numbers
    listener.close()


async def test_events_that_cannot_be_read_end_the_stream_with_the_reason() -> None:
    endpoint = "ipc://@baton-test-broken"
    listener = KvEventListener("vLLM", endpoint)
    listener.start()
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.bind(endpoint)
        await listener.connected(HANG_S)
        await asyncio.to_thread(publisher.recv)
        publisher.send_multipart((b"", bytes(8), published({"type": "BlockMoved"})))
        with pytest.raises(EngineFailed, match="cannot read"):
            await anext(listener.events())
    listener.close()


async def test_publisher_that_never_comes_is_an_error() -> None:
    listener = KvEventListener("vLLM", "ipc://@baton-test-nobody")
    listener.start()
    with pytest.raises(ConfigurationError):
        await listener.connected(0.2)
    listener.close()
