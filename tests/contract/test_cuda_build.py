"""The CUDA part, built by CUDA's compiler from packages (`make environment-nvcc`), on a machine without a driver."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton.errors import ConfigurationError
from baton.transfer.device import cuda_copies
from tests.contract.fake_library import NATIVE

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

ARCHITECTURES = {"sm_80", "sm_90a", "sm_100"}


@pytest.fixture(scope="session")
def tools() -> Path:
    """Return the folder of nvcc and cuobjdump."""
    for folder in (NATIVE.parent / ".venv-nvcc" / "lib").glob("python3*/site-packages/nvidia/cu*/bin"):
        return folder
    pytest.skip("CUDA's compiler is not installed here: `make environment-nvcc`")


@pytest.fixture(scope="session")
def library(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library, built as a wheel's build does it."""
    build = tmp_path_factory.mktemp("cuda")
    cmake = str(Path(sys.executable).parent / "cmake")
    options = [f"-DPython_EXECUTABLE={sys.executable}", "-DBATON_CUDA=ON", f"-DBATON_NVCC={tools / 'nvcc'}"]
    configure = [cmake, "-S", str(NATIVE), "-B", str(build), *options]
    subprocess.run(configure, check=True)
    subprocess.run([cmake, "--build", str(build), "--target", "baton_gpu"], check=True)
    return build / "libbaton_gpu.so"


def test_it_has_code_for_every_kind_of_gpu(tools: Path, library: Path) -> None:
    listed = subprocess.run([tools / "cuobjdump", "--list-elf", library], check=True, capture_output=True, text=True)
    assert set(re.findall(r"\.(sm_\d+a?)\.", listed.stdout)) == ARCHITECTURES


def test_it_exports_the_whole_boundary(library: Path) -> None:
    declared = set(re.findall(r"\b(baton_gpu_\w+)\(", (NATIVE / "gpu" / "baton_gpu.h").read_text()))
    listed = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True)
    exported = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert {name for name in exported if name.startswith("baton_")} == declared


def test_it_loads_and_says_that_there_is_no_driver(library: Path) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has a driver: `make test-gpu`")
    with pytest.raises(ConfigurationError, match="there is no NVIDIA driver here"):
        cuda_copies(0, library=str(library))
