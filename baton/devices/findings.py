"""What stands in the way on a machine, each with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from baton.devices.gpus import Gpus
from baton.devices.pci import Link
from baton.devices.rdma import Nic, nearest_nics
from baton.devices.survey import Host, Survey

CUDA_MIN: Final = (13, 0)
"""CUDA of the locked environments vllm-cuda and sglang-cuda; it needs driver 580 or newer."""
FREE_SHARE_MIN: Final = 0.9
"""Free share of a GPU's memory below which workers with their default share may not start."""
LOCKED_BYTES_MIN: Final = 1 << 30
SHM_BYTES_MIN: Final = 256 << 20
"""8 MiB for each pair of workers, 32 pairs; Docker's default is 64 MiB."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    kind: Literal["problem", "advice"]
    """A problem: something here does not work as it is."""
    what: str
    fix: str


def find(survey: Survey) -> tuple[Finding, ...]:
    return (
        *_about_gpus(survey.gpus),
        *_about_adapters(survey.nics, survey.host),
        *_about_places(survey),
        *_about_gpudirect(survey),
        *_about_memory(survey.host),
    )


def _about_gpus(gpus: Gpus) -> Iterator[Finding]:
    if gpus.failure:
        yield Finding(
            kind="problem",
            what=f"this machine has an NVIDIA driver, but its GPUs cannot be read: {gpus.failure}",
            fix="see that nvidia-smi works: reboot after a driver's update; in Docker, give GPUs to the container",
        )
    if gpus.driver and gpus.driver.cuda < CUDA_MIN:
        has, needs = (".".join(map(str, cuda)) for cuda in (gpus.driver.cuda, CUDA_MIN))
        yield Finding(
            kind="problem",
            what=f"driver {gpus.driver.version} supports CUDA {has}, and the engines are built for CUDA {needs}",
            fix="install driver 580 or newer",
        )
    for gpu in gpus.gpus:
        if gpu.free_bytes < FREE_SHARE_MIN * gpu.memory_bytes:
            used_gib = (gpu.memory_bytes - gpu.free_bytes) / 2**30
            yield Finding(
                kind="problem",
                what=f"other processes use {used_gib:.1f} GiB of GPU {gpu.index}, so a worker may not fit",
                fix="end them, leave the GPU out (CUDA_VISIBLE_DEVICES), or give workers a smaller share "
                '(ENGINE_OPTIONS={"gpu_memory_utilization": …})',
            )


def _about_adapters(nics: tuple[Nic, ...], host: Host) -> Iterator[Finding]:
    for nic in nics:
        if nic.up and not nic.usable:
            yield Finding(
                kind="problem",
                what=f"the RDMA adapter {nic.device} is up, but this process may not open it",
                fix="let this user open /dev/infiniband/uverbs*; in Docker, RDMA_DEVICES=/dev/infiniband",
            )
    locked = host.locked_bytes_max
    if any(nic.up for nic in nics) and locked is not None and locked < LOCKED_BYTES_MIN:
        yield Finding(
            kind="problem",
            what=f"a process may lock {locked} bytes of memory, too few to register KV with an adapter",
            fix="ulimit -l unlimited; in systemd LimitMEMLOCK=infinity, in Docker ulimits memlock -1",
        )


def _about_places(survey: Survey) -> Iterator[Finding]:
    for gpu in survey.gpus.gpus:
        nics, link = nearest_nics(gpu.place, survey.nics, numa_nodes=survey.host.numa_nodes)
        if nics and not gpu.place.bridges:
            yield Finding(
                kind="advice",
                what=f"sysfs does not show where GPU {gpu.index} ({gpu.place.address}) is, nor what is near it",
                fix="in a container or virtual machine, choose adapters by hand: agent_verbs_devices",
            )
        elif nics and link is Link.FAR:
            yield Finding(
                kind="advice",
                what=f"no RDMA adapter that is up is on the NUMA node of GPU {gpu.index}",
                fix=f"use {nics[0].device} for its worker, or bring up an adapter near it",
            )


def _about_gpudirect(survey: Survey) -> Iterator[Finding]:
    if survey.gpus.gpus and any(nic.up for nic in survey.nics) and not survey.host.gpu_memory_by:
        yield Finding(
            kind="advice",
            what="RDMA adapters cannot reach the GPUs' memory, so KV for other hosts is copied to host memory first",
            fix="install NVIDIA's open kernel modules, or load the module nvidia-peermem",
        )


def _about_memory(host: Host) -> Iterator[Finding]:
    if not host.shm_bytes:
        yield Finding(
            kind="problem",
            what="there is no /dev/shm: workers of this host exchange KV in slower ways",
            fix="mount a tmpfs there",
        )
    elif host.shm_free_bytes < SHM_BYTES_MIN:
        yield Finding(
            kind="advice",
            what=f"/dev/shm has {host.shm_free_bytes >> 20} MiB free; each pair of workers takes 8 MiB",
            fix="make it larger: mount -o remount,size=1g /dev/shm; in Docker, SHM_SIZE=1g",
        )
