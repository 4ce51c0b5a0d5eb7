"""GPUs and their driver, as values."""

from __future__ import annotations

import msgspec

from baton.devices.pci import PciPlace


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    """Number by PCI address, as NVML and CUDA_DEVICE_ORDER=PCI_BUS_ID count."""
    name: str
    uuid: str
    memory_bytes: int
    free_bytes: int
    capability: tuple[int, int]
    place: PciPlace
    reads: tuple[int, ...] = ()
    """GPUs whose memory this one can read directly."""
    nvlinks: tuple[int, ...] = ()
    """GPUs among `reads` that it reaches over NVLink."""


class Driver(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    cuda: tuple[int, int]
    """Newest CUDA that it supports."""


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    driver: Driver | None = None
    gpus: tuple[Gpu, ...] = ()
    failure: str = ""
    """Reason why there are none, although this machine has a driver's device files."""
