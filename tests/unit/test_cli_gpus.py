"""Deployments of `baton up` on machines with GPUs: which worker has which, and what hands off KV."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.cli.deployment import gpu_shares, resolve, worker_programs
from baton.cli.gpu_shares import share_gpus, visible_gpus
from baton.cli.up import describe_gpus
from baton.devices.backends import nearest_adapters
from baton.devices.gpus import Gpu, Gpus
from baton.devices.pci import PciPlace, pci_place
from baton.devices.rdma import read_nics
from baton.devices.survey import Host, Survey
from baton.engines.options import KvPath
from baton.errors import ConfigurationError
from baton.messages.placement import Disaggregation
from tests.harness.deployments import NATS_URL, all_programs, flags, make_deployment
from tests.harness.limits import HANG_S
from tests.harness.sysfs import lay_out

ROOT = Path(__file__).parents[2]
GPUS = tuple(
    Gpu(
        index=index,
        name="H100",
        uuid=f"GPU-{index}abc",
        memory_bytes=80 << 30,
        free_bytes=80 << 30,
        capability=(9, 0),
        place=PciPlace(address=""),
    )
    for index in range(3)
)


def test_on_a_gpu_decode_workers_serve_whole(tmp_path: Path) -> None:
    """`make up` on a machine with an NVIDIA driver, without a device or a placement among its settings."""
    programs = {program.name: program for program in all_programs(make_deployment(tmp_path, decode=2), gpu=True)}
    assert sorted(programs) == ["decode-0", "decode-1", "gateway", "kvindex", "scheduler"]
    assert flags(programs["scheduler"])["--disaggregation"] == "never"
    assert flags(programs["decode-0"])["--device"] == "cuda"
    options = json.loads(flags(programs["decode-0"])["--engine-options"])
    assert options["gpu_memory_utilization"] == pytest.approx(0.425), "of the GPU, for each of the two that are there"


@pytest.mark.parametrize(
    ("gpus", "changes", "expected"),
    [
        ((0, 1, 2), {}, {"decode-0": ("0", 0.85), "decode-1": ("1", 0.85), "decode-2": ("2", 0.85)}),
        ((3,), {"decode": 2}, {"decode-0": ("3", 0.425), "decode-1": ("3", 0.425)}),
        ((0, 1), {"decode": 3}, {"decode-0": ("0", 0.425), "decode-1": ("1", 0.85), "decode-2": ("0", 0.425)}),
        (
            (0, 1, 2, 3, 4),
            {"engine_options": {"tensor_parallel_size": 2}},
            {"decode-0": ("0,1", 0.85), "decode-1": ("2,3", 0.85)},
        ),
        ((), {}, {"decode-0": (None, 0.85)}),
    ],
)
def test_each_gpu_has_a_worker(
    tmp_path: Path, gpus: tuple[int, ...], changes: dict[str, object], expected: dict[str, tuple[str | None, float]]
) -> None:
    deployment = resolve(make_deployment(tmp_path, **changes), gpu=True, find_gpus=lambda: gpus)
    environ = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"} if gpus else {}
    workers = worker_programs(deployment, model_path=Path("/model"), nats_url=NATS_URL, environ=environ)
    told = {
        worker.name: (
            worker.environ.get("CUDA_VISIBLE_DEVICES"),
            json.loads(flags(worker)["--engine-options"])["gpu_memory_utilization"],
        )
        for worker in workers
    }
    assert told == expected
    assert all(worker.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" for worker in workers if gpus)


def test_a_worker_that_needs_more_gpus_than_there_are_is_refused(tmp_path: Path) -> None:
    deployment = make_deployment(tmp_path, engine_options={"tensor_parallel_size": 4})
    with pytest.raises(ConfigurationError, match="4 tensor-parallel ranks needs as many GPUs: here are 2"):
        gpu_shares(resolve(deployment, gpu=True, find_gpus=lambda: (0, 1)))
    with pytest.raises(ConfigurationError, match="tensor_parallel_size is a number of GPUs, not 'two'"):
        resolve(make_deployment(tmp_path, engine_options={"tensor_parallel_size": "two"}), gpu=True)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, (0, 1, 2)), ("2,0", (2, 0)), ("GPU-1", (1,)), ("0, GPU-2", (0, 2))],
)
def test_gpus_are_those_that_the_environment_shows(visible: str | None, expected: tuple[int, ...]) -> None:
    assert visible_gpus(GPUS, visible) == expected
    assert visible_gpus((), visible) == ()


@pytest.mark.parametrize("visible", ["", "3", "GPU-", "one"])
def test_gpus_that_are_not_there_are_named(visible: str) -> None:
    with pytest.raises(ConfigurationError, match="CUDA_VISIBLE_DEVICES"):
        visible_gpus(GPUS, visible)


def test_each_worker_has_as_many_gpus_as_its_own_engine_needs(tmp_path: Path) -> None:
    options = {"sglang": {"tp_size": 2}, "vllm": {"tensor_parallel_size": 1}}
    engines: dict[str, Any] = {"prefill_engine": "sglang", "decode_engine": "vllm", "engine_options": options}
    asked = make_deployment(tmp_path, device="cuda", kv_path=KvPath.STAGED, prefill=1, **engines)
    deployment = resolve(asked, gpu=True, find_gpus=lambda: (0, 1, 2, 3))
    assert deployment.decode == 2
    shares = gpu_shares(deployment)
    assert {name: share.gpus for name, share in shares.items()} == {
        "prefill-0": (0, 1),
        "decode-0": (2,),
        "decode-1": (3,),
    }
    assert [share.workers for share in share_gpus([2, 1, 1], (0, 1))] == [2, 2, 2]
    assert [share.gpus for share in share_gpus([2, 1, 1, 2], (0, 1, 2))] == [(0, 1), (2,), (0,), (1, 2)]
    with pytest.raises(ConfigurationError, match="3 tensor-parallel ranks"):
        share_gpus([1, 3], (0, 1))


def test_the_start_says_which_gpu_a_worker_has_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    gpus = (GPUS[0], msgspec.structs.replace(GPUS[1], free_bytes=0))
    host = Host(locked_bytes_max=None, shm_bytes=1 << 30, shm_free_bytes=1 << 30, ptrace_scope=0, numa_nodes=1)
    survey = Survey(gpus=Gpus(gpus=gpus), nics=(), host=host)
    deployment = resolve(make_deployment(tmp_path), gpu=True, find_gpus=lambda: visible_gpus(gpus, None))
    problem, fix, *workers = describe_gpus(deployment, survey)
    assert problem == "problem: other processes use 80.0 GiB of GPU 1, so a worker may not fit"
    assert fix.startswith("  fix: ")
    assert workers == [
        f"decode-{index}: GPU {index} (H100), 85% of its memory if no option says otherwise" for index in (0, 1)
    ]


def test_a_worker_takes_the_adapters_nearest_to_its_gpus_as_the_doctor_says(tmp_path: Path) -> None:
    root = lay_out("dgx2", tmp_path / "root")
    gpus = tuple(
        msgspec.structs.replace(GPUS[0], index=index, place=pci_place(root, f"0000:{bus}:00.0"))
        for index, bus in enumerate(("34", "b7"))
    )
    host = Host(locked_bytes_max=None, shm_bytes=1 << 30, shm_free_bytes=1 << 30, ptrace_scope=0, numa_nodes=2)
    survey = Survey(gpus=Gpus(gpus=gpus), nics=read_nics(root), host=host)
    resolved = resolve(make_deployment(tmp_path), gpu=True, find_gpus=lambda: (0, 1))
    deployment = replace(resolved, adapters=nearest_adapters(survey))
    name = "BATON_DECODE_AGENT_VERBS_DEVICES"

    def told(environ: dict[str, str]) -> list[str]:
        workers = worker_programs(deployment, model_path=Path("/model"), nats_url=NATS_URL, environ=environ)
        return [worker.environ[name] for worker in workers]

    assert told({}) == ["mlx5_0:1", "mlx5_1:1"]
    assert told({name: "mlx5_9"}) == ["mlx5_9"] * 2, "a setting of the user's wins"
    both = share_gpus([2], (0, 1))
    assert [deployment.adapters_of(share) for share in both] == ["mlx5_0:1,mlx5_1:1"]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_handing_off_on_a_gpu_is_refused_with_the_reason(tmp_path: Path, device: str) -> None:
    deployment = make_deployment(tmp_path, device=device, disaggregation=Disaggregation.ALWAYS)
    with pytest.raises(ConfigurationError, match="DISAGGREGATION=always is not for GPUs: on CUDA decode workers serve"):
        resolve(deployment, gpu=True)


def test_kv_that_is_staged_is_handed_off_on_gpus(tmp_path: Path) -> None:
    deployment = make_deployment(tmp_path, device="cuda", kv_path=KvPath.STAGED, disaggregation=Disaggregation.ALWAYS)
    deployment = resolve(deployment, gpu=True, find_gpus=lambda: visible_gpus(GPUS, None))
    assert (deployment.disaggregation, deployment.prefill, deployment.decode) == (
        Disaggregation.ALWAYS,
        1,
        len(GPUS) - 1,
    )


def test_the_way_of_kv_reaches_the_workers(tmp_path: Path) -> None:
    def path(**changes: object) -> object:
        deployment = make_deployment(tmp_path, device="cpu", **changes)
        program = next(program for program in all_programs(deployment) if program.name == "prefill-0")
        return json.loads(flags(program)["--engine-options"]).get("kv_path")

    assert path() is None
    assert path(kv_path=KvPath.STAGED) == "staged"
    assert path(kv_path=KvPath.STAGED, engine_options={"kv_path": "direct"}) == "direct"
    assert path(kv_path=KvPath.STAGED, engine="simulated") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "cpu"},
        {"engine": "sglang"},
        {"decode_engine": "sglang"},
        {"engine": "simulated"},
        {"engine": "simulated", "device": "cuda"},
    ],
)
def test_a_gpu_changes_nothing_for_engines_that_do_not_use_it(tmp_path: Path, changes: dict[str, object]) -> None:
    deployment = resolve(make_deployment(tmp_path, **changes), gpu=True)
    assert (deployment.device, deployment.disaggregation, deployment.prefill) == ("cpu", Disaggregation.AUTO, 1)


@pytest.mark.parametrize(
    ("settings", "environment"),
    [
        ((), ".venv-vllm"),
        (("NVIDIA_DRIVER=/dev/null",), ".venv-vllm-cuda"),
        (("NVIDIA_DRIVER=/dev/null", "DEVICE=cpu"), ".venv-vllm"),
        (("NVIDIA_DRIVER=/dev/null", "DECODE_ENGINE=sglang"), ".venv-vllm"),
        (("NVIDIA_DRIVER=", "DEVICE=cuda"), ".venv-vllm-cuda"),
    ],
)
def test_make_takes_the_environment_of_the_same_device(settings: tuple[str, ...], environment: str) -> None:
    command = ["make", "-n", "up", "NVIDIA_DRIVER=", *settings]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=HANG_S).stdout
    assert f"--vllm-python {environment}/bin/python" in said
