"""GPUs as NVML tells them, over a stand-in for its library."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_library import FakeNvml

from baton.cli.doctor import examine
from baton.devices.gpus import Driver
from baton.devices.nvml import read_gpus
from baton.devices.pci import PciPlace
from baton.devices.survey import read_survey
from tests.harness.sysfs import lay_out, let_adapters_reach_gpus

TWO_GPUS = """\
driver 580.95.05 13000
gpu 00000000:34:00.0 85520809984 85000000000 9 0 GPU-aaaa NVIDIA H100 80GB HBM3
gpu 00000000:B7:00.0 85520809984 85000000000 9 0 GPU-bbbb NVIDIA H100 80GB HBM3
way 0 1 0
way 0 1 2
way 1 0 0
"""


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that says what the library finds."""
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "nvml"))
    return tmp_path / "nvml"


def place_of(address: str) -> PciPlace:
    return PciPlace(address=address)


def test_gpus_are_read_with_their_ways(nvml: Path) -> None:
    nvml.write_text(TWO_GPUS)
    found = read_gpus(FakeNvml.compiled(), place_of, root=Path("/nowhere"))
    assert found.driver == Driver(version="580.95.05", cuda=(13, 0))
    first, second = found.gpus
    assert (first.index, first.name, first.uuid) == (0, "NVIDIA H100 80GB HBM3", "GPU-aaaa")
    assert (first.memory_bytes, first.free_bytes, first.capability) == (85520809984, 85000000000, (9, 0))
    assert (first.place.address, second.place.address) == ("0000:34:00.0", "0000:b7:00.0")
    assert (first.reads, first.nvlinks, second.reads, second.nvlinks) == ((1,), (1,), (0,), ())


def test_a_survey_puts_gpus_and_sysfs_together(nvml: Path, tmp_path: Path) -> None:
    nvml.write_text(TWO_GPUS)
    let_adapters_reach_gpus(lay_out("dgx2", tmp_path), "dma-buf")
    survey = read_survey(tmp_path, FakeNvml.compiled())
    assert [gpu.place.numa_node for gpu in survey.gpus.gpus] == [0, 1]
    assert not any("GPU" in finding.what for finding in examine(survey).findings)


def test_failures_of_the_library_are_told(nvml: Path) -> None:
    (nvml.parent / "dev").mkdir()
    (nvml.parent / "dev" / "nvidiactl").touch()
    loaded = read_gpus(FakeNvml.compiled(), place_of, root=nvml.parent)
    assert loaded.failure == "nvmlInit_v2: Driver Not Loaded"
    nvml.write_text("driver 580 13000\ngpu 00000000:34:00.0 0 0 9 0 GPU-a broken\n")
    broken = read_gpus(FakeNvml.compiled(), place_of, root=nvml.parent)
    assert (broken.gpus, broken.failure) == ((), "nvmlDeviceGetMemoryInfo: Not Supported")
