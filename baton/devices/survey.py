"""What a machine has, as values."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

import msgspec

from baton.devices.gpus import Gpus
from baton.devices.nvml import NVML, read_gpus
from baton.devices.pci import nodes_online, pci_place
from baton.devices.rdma import Nic, read_nics


class Host(msgspec.Struct, frozen=True, kw_only=True):
    locked_bytes_max: int | None
    """Memory that a process may lock (`ulimit -l`), which bounds registration for RDMA; None: no limit."""
    shm_bytes: int
    """Size of /dev/shm; 0: there is none."""
    shm_free_bytes: int
    ptrace_scope: int
    """Yama's restriction of reads by other processes; 0: none."""
    numa_nodes: int
    gpu_memory_by: str = ""
    """Name of what lets RDMA adapters reach GPU memory (GPUDirect); empty: nothing does."""


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    gpus: Gpus
    nics: tuple[Nic, ...]
    host: Host


def read_survey(root: Path = Path("/"), nvml_library: str = NVML) -> Survey:
    """Return what this machine has. `root`: where its file systems are, for recorded ones."""
    return Survey(
        gpus=read_gpus(nvml_library, lambda address: pci_place(root, address), root=root),
        nics=read_nics(root),
        host=_read_host(root),
    )


def _read_host(root: Path) -> Host:
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shm_bytes = shm_free_bytes = ptrace_scope = 0
    with suppress(OSError):
        shm = os.statvfs(root / "dev/shm")
        shm_bytes, shm_free_bytes = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    with suppress(OSError, ValueError):
        ptrace_scope = int((root / "proc/sys/kernel/yama/ptrace_scope").read_text())
    return Host(
        locked_bytes_max=None if locked == resource.RLIM_INFINITY else locked,
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        ptrace_scope=ptrace_scope,
        numa_nodes=nodes_online(root),
        gpu_memory_by=_gpu_memory_by(root),
    )


def _gpu_memory_by(root: Path) -> str:
    with suppress(OSError):
        if "Open Kernel Module" in (root / "proc/driver/nvidia/version").read_text():
            return "dma-buf"
    return "nvidia-peermem" if (root / "sys/module/nvidia_peermem").is_dir() else ""
