"""A machine's adapters and GPUs over recorded sysfs trees; what follows from them, and how it is told."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
from msgspec.structs import replace

from baton.cli.doctor import describe, examine
from baton.devices.backends import pair_backends
from baton.devices.findings import find
from baton.devices.gpus import Driver, Gpu, Gpus
from baton.devices.pci import Link, PciPlace, Way, nodes_online, pci_place, way_between
from baton.devices.rdma import nearest_nics, read_nics
from baton.devices.survey import Host, Survey, read_survey
from tests.harness.sysfs import lay_out, let_adapters_reach_gpus

GIB = 1 << 30
DRIVER = Driver(version="580.95.05", cuda=(13, 0))
HOST = Host(locked_bytes_max=None, shm_bytes=64 * GIB, shm_free_bytes=64 * GIB, ptrace_scope=0, numa_nodes=2)
DGX2_GPUS = ("34", "36", "39", "3b", "57", "59", "5c", "5e", "b7", "b9", "bc", "be", "e0", "e2", "e5", "e7")


def make_gpu(index: int = 0, place: PciPlace | None = None, *, free_gib: int = 80, **ways: tuple[int, ...]) -> Gpu:
    return Gpu(
        index=index,
        name="NVIDIA H100 80GB HBM3",
        uuid=f"GPU-{index}",
        memory_bytes=80 * GIB,
        free_bytes=free_gib * GIB,
        capability=(9, 0),
        place=place or PciPlace(address=f"0000:{index:02x}:00.0"),
        **ways,
    )


def survey_of(*gpus: Gpu, root: Path | None = None, host: Host = HOST) -> Survey:
    if root:
        host = replace(host, gpu_memory_by=read_survey(root, nvml_library="none").host.gpu_memory_by)
    return Survey(gpus=Gpus(driver=DRIVER, gpus=gpus), nics=read_nics(root) if root else (), host=host)


@pytest.fixture
def dgx2(tmp_path: Path) -> Path:
    return lay_out("dgx2", tmp_path)


# ---------------------------------------------------------------- sysfs


def test_a_recorded_infiniband_adapter_is_read(tmp_path: Path) -> None:
    (nic,) = read_nics(lay_out("qib-four-nodes", tmp_path))
    assert (nic.device, nic.port, nic.up, nic.gbit_per_s, nic.link) == ("qib0", 1, True, 40.0, "InfiniBand")
    assert nic.place == PciPlace(address="0000:43:00.0", bridges=("pci0000:40", "0000:40:03.0"), numa_node=2)
    assert not nic.usable, "the record has no device files"
    assert nodes_online(tmp_path) == 4


def test_an_adapter_made_of_software_is_nowhere(tmp_path: Path) -> None:
    """A recorded `scif0` has no ports and no PCI device; the adapter beside it is read all the same."""
    nics = read_nics(lay_out("mlx4-and-scif", tmp_path))
    assert [(nic.device, nic.gbit_per_s) for nic in nics] == [("mlx4_0", 56.0)]


def test_ways_in_a_recorded_dgx2_are_as_its_switches(dgx2: Path) -> None:
    places = {bus: pci_place(dgx2, f"0000:{bus}:00.0") for bus in DGX2_GPUS}

    def way(one: str, other: str) -> Way:
        return way_between(places[one], places[other], numa_nodes=2)

    assert way("34", "36") == (Link.SWITCH, 2), "ports of one switch"
    assert way("34", "39") == (Link.SWITCH, 6), "two switches below one"
    assert way("34", "57")[0] is Link.NODE
    assert way("34", "b7")[0] is Link.FAR
    for one, other in permutations(DGX2_GPUS, 2):
        assert way(one, other) == way(other, one)
        assert way(one, one) < way(one, other)


def test_the_nearest_adapter_is_that_of_the_same_switch(dgx2: Path) -> None:
    nics = read_nics(dgx2)

    def nearest(bus: str) -> tuple[list[str], Link]:
        found, link = nearest_nics(pci_place(dgx2, f"0000:{bus}:00.0"), nics, numa_nodes=2)
        return [nic.device for nic in found], link

    assert nearest("34") == (["mlx5_0"], Link.SWITCH)
    assert nearest("3b") == (["mlx5_0"], Link.SWITCH), "farther, but of the same tree"
    assert nearest("5c") == (["mlx5_0"], Link.NODE), "mlx5_3, in its own switch, is down"
    assert nearest("b7") == (["mlx5_1"], Link.SWITCH)
    assert nearest("e0") == (["mlx5_2"], Link.NODE), "fewer bridges than mlx5_1"


def test_a_place_that_sysfs_does_not_show_is_near_only_on_a_single_node(tmp_path: Path) -> None:
    unknown = pci_place(tmp_path, "0000:65:00.0")
    assert unknown == PciPlace(address="0000:65:00.0")
    other = PciPlace(address="0000:17:00.0", bridges=("pci0000:16",), numa_node=0)
    assert way_between(unknown, other, numa_nodes=1).link is Link.NODE
    assert way_between(unknown, other, numa_nodes=2).link is Link.FAR
    assert way_between(unknown, unknown, numa_nodes=2).link is Link.FAR


def test_a_machine_without_anything_is_a_survey_like_any_other(tmp_path: Path) -> None:
    survey = read_survey(tmp_path, nvml_library="libno-such-thing.so")
    assert (survey.gpus, survey.nics) == (Gpus(), ())
    assert (survey.host.shm_bytes, survey.host.numa_nodes) == (0, 1)
    said = describe(examine(survey))
    assert "no NVIDIA GPU: engines run on the CPU" in said
    assert "problem: there is no /dev/shm" in said


def test_a_driver_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    survey = read_survey(tmp_path, nvml_library="libno-such-thing.so")
    assert "libno-such-thing.so" in survey.gpus.failure
    report = examine(survey)
    assert report.problems
    assert "its GPUs cannot be read" in describe(report)
    assert "no NVIDIA GPU" not in describe(report)


# ---------------------------------------------------------------- what follows


def backends(survey: Survey) -> dict[str, str]:
    return {pair.between: pair.backend for pair in pair_backends(survey)}


def test_gpus_of_one_kind_are_one_line() -> None:
    linked = survey_of(
        make_gpu(0, reads=(1, 2), nvlinks=(1, 2)),
        make_gpu(1, reads=(0, 2), nvlinks=(0, 2)),
        make_gpu(2, reads=(0, 1), nvlinks=(0, 1)),
    )
    assert backends(linked)["GPU memory, any two"] == "cuda-ipc"
    mixed = survey_of(make_gpu(0, reads=(1,)), make_gpu(1, reads=(0,), nvlinks=(0,)), make_gpu(2))
    assert backends(mixed) == {
        "host memory, workers of this host": "shm",
        "host memory, workers of two hosts": "tcp",
        "GPU memory, workers that share a GPU": "cuda-ipc",
        "GPU memory, 1→0": "cuda-ipc",
        "GPU memory, 2→0, 2→1, 0→2, 1→2": "direct+staged",
        "GPU memory, 0→1": "cuda-ipc",
        "GPU memory, workers of two hosts": "tcp+staged",
    }


def test_adapters_that_may_be_opened_carry_kv_between_hosts(dgx2: Path) -> None:
    pair = pair_backends(survey_of(root=dgx2))[1]
    assert (pair.backend, pair.why) == ("verbs", "mlx5_0:1, mlx5_1:1")


@pytest.mark.parametrize(("shm_free_bytes", "ptrace_scope", "backend"), [(GIB, 3, "shm"), (0, 1, "cma"), (0, 2, "tcp")])
def test_host_memory_of_one_host(shm_free_bytes: int, ptrace_scope: int, backend: str) -> None:
    host = Host(
        locked_bytes_max=None,
        shm_bytes=GIB,
        shm_free_bytes=shm_free_bytes,
        ptrace_scope=ptrace_scope,
        numa_nodes=1,
    )
    assert backends(survey_of(host=host))["host memory, workers of this host"] == backend


@pytest.mark.parametrize(
    ("way", "backend", "why"),
    [
        ("dma-buf", "gpudirect", "mlx5_0:1, mlx5_1:1, by dma-buf; from GPU to GPU"),
        ("nvidia-peermem", "gpudirect", "mlx5_0:1, mlx5_1:1, by nvidia-peermem; from GPU to GPU"),
        ("", "verbs+staged", "mlx5_0:1, mlx5_1:1; adapters cannot reach GPU memory here"),
    ],
)
def test_gpus_of_two_hosts(dgx2: Path, way: str, backend: str, why: str) -> None:
    let_adapters_reach_gpus(dgx2, way)
    survey = survey_of(make_gpu(0, pci_place(dgx2, "0000:34:00.0")), root=dgx2)
    pair = pair_backends(survey)[-1]
    assert (pair.backend, pair.why) == (backend, why)
    assert any("cannot reach the GPUs' memory" in found.what for found in find(survey)) == (not way)


def test_a_machine_in_order_has_no_findings(dgx2: Path) -> None:
    let_adapters_reach_gpus(dgx2, "dma-buf")
    gpu = make_gpu(0, pci_place(dgx2, "0000:34:00.0"))
    found = find(survey_of(gpu, root=dgx2))
    assert [one.what for one in found] == ["the RDMA adapter mlx5_2 is up, but this process may not open it"]


@pytest.mark.parametrize(
    ("survey", "kind", "words"),
    [
        (survey_of(make_gpu(free_gib=40)), "problem", "other processes use 40.0 GiB of GPU 0"),
        (
            Survey(gpus=Gpus(driver=Driver(version="550.90", cuda=(12, 4))), nics=(), host=HOST),
            "problem",
            "driver 550.90 supports CUDA 12.4, and the engines are built for CUDA 13.0",
        ),
        (
            survey_of(
                host=Host(
                    locked_bytes_max=None, shm_bytes=64 << 20, shm_free_bytes=60 << 20, ptrace_scope=0, numa_nodes=1
                )
            ),
            "advice",
            "/dev/shm has 60 MiB free",
        ),
    ],
)
def test_what_stands_in_the_way_is_found(survey: Survey, kind: str, words: str) -> None:
    (found,) = find(survey)
    assert found.kind == kind
    assert words in found.what
    assert found.fix


@pytest.mark.parametrize("locked_bytes_max", [0, 8 << 20])
def test_locked_memory_matters_where_an_adapter_is_up(tmp_path: Path, locked_bytes_max: int) -> None:
    limited = Host(locked_bytes_max=locked_bytes_max, shm_bytes=GIB, shm_free_bytes=GIB, ptrace_scope=0, numa_nodes=4)
    assert find(survey_of(host=limited)) == ()
    nic = survey_of(root=lay_out("qib-four-nodes", tmp_path), host=limited)
    assert any(f"may lock {locked_bytes_max} bytes of memory" in one.what for one in find(nic))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (
            PciPlace(address="0000:09:00.0", bridges=("pci0000:00",), numa_node=0),
            "no RDMA adapter that is up is on the NUMA node of GPU 3",
        ),
        (PciPlace(address="0000:09:00.0"), "sysfs does not show where GPU 3"),
    ],
)
def test_a_gpu_without_a_near_adapter_is_told(tmp_path: Path, place: PciPlace, words: str) -> None:
    found = find(survey_of(make_gpu(3, place), root=lay_out("qib-four-nodes", tmp_path)))
    assert any(words in one.what and one.kind == "advice" for one in found)


def test_the_report_names_each_gpus_adapter_and_its_setting(dgx2: Path) -> None:
    gpus = [
        make_gpu(0, pci_place(dgx2, "0000:34:00.0"), reads=(1,), nvlinks=(1,)),
        make_gpu(1, pci_place(dgx2, "0000:b7:00.0"), reads=(0,)),
    ]
    said = describe(examine(survey_of(*gpus, root=dgx2)))
    assert "GPU 0  NVIDIA H100 80GB HBM3, sm_90, 80.0 GiB (80.0 GiB free), 0000:34:00.0, NUMA node 0" in said
    assert "reads GPU 1 over NVLink; nearest adapter: mlx5_0:1 (same PCIe switch)" in said
    assert "agent_verbs_devices=mlx5_1:1" in said
    assert "reads GPU 0 over PCIe" in said
    assert (
        "GPU memory, workers of two hosts: verbs+staged (mlx5_0:1, mlx5_1:1; adapters cannot reach GPU memory here)"
        in said
    )
    assert "KV leaves GPU memory so with KV_PATH=gpu" in said
