"""Fixtures for a backend of the transfer agent. A module gives `way`: a backend and its resources."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from baton_native import DeviceMemory, GpuUnavailable

from tests.contract.fake_library import FakeGpu, FakeVerbs
from tests.contract.transfer_rig import RAILS, Fabric
from tests.contract.ucx_library import ucx_library


@pytest.fixture(scope="session")
def fake_verbs_library(tmp_path_factory: pytest.TempPathFactory) -> FakeVerbs:
    return FakeVerbs(tmp_path_factory.mktemp("tables"))


@pytest.fixture
def fake_verbs(fake_verbs_library: FakeVerbs) -> Iterator[FakeVerbs]:
    """Provide the fake RDMA adapters; afterwards none of their resources may be in use."""
    fake_verbs_library.reset()
    yield fake_verbs_library
    assert not fake_verbs_library.left_open()


@pytest.fixture(scope="session")
def fake_gpu_library(tmp_path_factory: pytest.TempPathFactory) -> FakeGpu:
    return FakeGpu(tmp_path_factory.mktemp("tables"))


@pytest.fixture
def fake_gpu(fake_gpu_library: FakeGpu) -> Iterator[FakeGpu]:
    """Provide the fake GPUs; afterwards none of their resources may be in use."""
    fake_gpu_library.reset()
    yield fake_gpu_library
    if fake_gpu_library.left_open():
        gc.collect()  # Memory in a cycle that a test has let go. It takes longer than most tests do.
    assert not fake_gpu_library.left_open()


@pytest.fixture
def backend(way: str) -> str:
    return way.split()[0].removesuffix("+staged")


@pytest.fixture
def fabric(request: pytest.FixtureRequest, way: str, monkeypatch: pytest.MonkeyPatch) -> Fabric:
    """Return the options that the backend needs on this machine."""
    lanes: Fabric = {"rails": RAILS, "streams": 2, "lane_bytes": 1} if way.endswith("lanes") else {}
    if way.startswith("verbs"):
        fake: FakeVerbs = request.getfixturevalue("fake_verbs")
        return {"verbs_library": fake.library, **lanes}
    if way.endswith("on a GPU"):
        try:
            DeviceMemory(1)
        except GpuUnavailable as error:
            pytest.skip(f"{error}: `make test-gpu`, on a machine with an NVIDIA GPU")
        return {"gpu_library": ""}
    if way.startswith("gpudirect"):
        adapters: FakeVerbs = request.getfixturevalue("fake_verbs")
        memory: FakeGpu = request.getfixturevalue("fake_gpu")
        return {"verbs_library": adapters.library, "gpu_library": memory.library, **lanes}
    if way.startswith("cuda") or way.endswith("with a device"):
        gpu: FakeGpu = request.getfixturevalue("fake_gpu")
        if "+staged for cuda-ipc" in way:
            gpu.set(no_map=1)
        return {"gpu_library": gpu.library}
    if way.startswith("ucx"):
        monkeypatch.setenv("UCX_TLS", way.split()[-1])
        return {"ucx_library": ucx_library()}
    return lanes
