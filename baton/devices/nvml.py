"""GPUs, from NVIDIA's management library, which comes with the driver, needs no CUDA and occupies no memory of a GPU.

Structures and numbers are those of nvml.h; calls carry the version that fixed their form (`_v2`, `_v3`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from baton.devices.gpus import Driver, Gpu, Gpus
from baton.devices.pci import PciPlace

NVML: Final = "libnvidia-ml.so.1"
_TEXT_BYTES: Final = 96
_P2P_READ, _P2P_NVLINK = 0, 2
_DRIVER_FILE: Final = "dev/nvidiactl"


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Pci(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class _Failed(Exception):
    pass


class _Nvml:
    """The library, initialised; calls raise _Failed."""

    def __init__(self, library: str) -> None:
        try:
            self._calls = ctypes.CDLL(library)
            self._calls.nvmlErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise _Failed(f"the driver's management library {library} cannot be loaded: {error}") from error
        self.call("nvmlInit_v2")

    def call(self, name: str, *arguments: object) -> None:
        try:
            status = getattr(self._calls, name)(*arguments)
        except AttributeError as error:
            raise _Failed(f"the driver's management library is too old: {error}") from error
        if status != 0:
            raise _Failed(f"{name}: {self._calls.nvmlErrorString(status).decode(errors='replace')}")

    def text(self, name: str, *arguments: object) -> str:
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self.call(name, *arguments, buffer, _TEXT_BYTES)
        return buffer.value.decode(errors="replace")

    def number(self, name: str, *arguments: object) -> int:
        value = ctypes.c_uint()
        self.call(name, *arguments, ctypes.byref(value))
        return value.value

    def holds(self, one: ctypes.c_void_p, other: ctypes.c_void_p, capability: int) -> bool:
        """Return whether the way between two GPUs has a capability."""
        try:
            return self.number("nvmlDeviceGetP2PStatus", one, other, capability) == 0
        except _Failed:
            return False


def read_gpus(library: str, place: Callable[[str], PciPlace], *, root: Path) -> Gpus:
    """Return the GPUs, whatever CUDA_VISIBLE_DEVICES says; none, without a failure, where there is no driver."""
    try:
        nvml = _Nvml(library)
    except _Failed as error:
        return Gpus(failure=str(error) if (root / _DRIVER_FILE).exists() else "")
    try:
        return _read(nvml, place)
    except _Failed as error:
        return Gpus(failure=str(error))
    finally:
        with suppress(_Failed):
            nvml.call("nvmlShutdown")


def _read(nvml: _Nvml, place: Callable[[str], PciPlace]) -> Gpus:
    cuda = nvml.number("nvmlSystemGetCudaDriverVersion_v2")
    driver = Driver(version=nvml.text("nvmlSystemGetDriverVersion"), cuda=(cuda // 1000, cuda % 1000 // 10))
    handles: list[ctypes.c_void_p] = []
    for index in range(nvml.number("nvmlDeviceGetCount_v2")):
        handle = ctypes.c_void_p()
        nvml.call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        handles.append(handle)
    return Gpus(driver=driver, gpus=tuple(_gpu(nvml, index, handles, place) for index in range(len(handles))))


def _gpu(nvml: _Nvml, index: int, handles: Sequence[ctypes.c_void_p], place: Callable[[str], PciPlace]) -> Gpu:
    handle = handles[index]
    memory, pci = _Memory(), _Pci()
    nvml.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    nvml.call("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvml.call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    others = [(number, other) for number, other in enumerate(handles) if number != index]
    return Gpu(
        index=index,
        name=nvml.text("nvmlDeviceGetName", handle),
        uuid=nvml.text("nvmlDeviceGetUUID", handle),
        memory_bytes=memory.total,
        free_bytes=memory.free,
        capability=(major.value, minor.value),
        place=place(_sysfs_address(pci.bus_id.decode())),
        reads=tuple(number for number, other in others if nvml.holds(handle, other, _P2P_READ)),
        nvlinks=tuple(number for number, other in others if nvml.holds(handle, other, _P2P_NVLINK)),
    )


def _sysfs_address(bus_id: str) -> str:
    """Return a PCI address with a domain of four digits; NVML's have eight."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"
