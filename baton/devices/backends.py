"""Which transfer backend moves KV between two workers, by what a machine has."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations

import msgspec

from baton.devices.gpus import Gpu
from baton.devices.rdma import nearest_nics
from baton.devices.survey import Survey


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    between: str
    backend: str
    """Name of a backend as in log, metrics and traces: `+staged` where host memory of both ends is between."""
    why: str


def pair_backends(survey: Survey) -> tuple[Pair, ...]:
    """Return each kind of pair, those of GPUs with KV_PATH=gpu.

    The handshake of two agents decides; this is what it will find here.
    """
    far = _between_hosts(survey)
    return (_on_one_host(survey), far, *_between_gpus(survey.gpus.gpus, far, survey.host.gpu_memory_by))


def nearest_adapters(survey: Survey) -> dict[int, tuple[str, ...]]:
    """Return the ports nearest to each GPU, as `agent_verbs_devices` names them; none where none is up.

    Adapters that may not be opened count only if no other is there.
    """
    nics = [nic for nic in survey.nics if nic.usable] or survey.nics
    near = {gpu.index: nearest_nics(gpu.place, nics, numa_nodes=survey.host.numa_nodes) for gpu in survey.gpus.gpus}
    return {index: tuple(f"{nic.device}:{nic.port}" for nic in found) for index, (found, _) in near.items()}


def _on_one_host(survey: Survey) -> Pair:
    between = "host memory, workers of this host"
    if survey.host.shm_free_bytes:
        return Pair(between=between, backend="shm", why="/dev/shm; direct, for pools in memory that agents share")
    if survey.host.ptrace_scope < 2:
        return Pair(between=between, backend="cma", why="there is no /dev/shm, and processes may read each other")
    return Pair(between=between, backend="tcp", why="there is no /dev/shm, and Yama forbids reading other processes")


def _between_hosts(survey: Survey) -> Pair:
    between = "host memory, workers of two hosts"
    if ready := [nic for nic in survey.nics if nic.up and nic.usable]:
        return Pair(between=between, backend="verbs", why=", ".join(f"{nic.device}:{nic.port}" for nic in ready))
    return Pair(between=between, backend="tcp", why="no RDMA adapter here is up and may be used")


def _between_gpus(gpus: tuple[Gpu, ...], far: Pair, gpu_memory_by: str) -> Iterable[Pair]:
    """Yield the pairs of GPUs, those of one kind together; directions may differ. `far`: host memory of two hosts."""
    if gpus:
        yield Pair(between="GPU memory, workers that share a GPU", backend="cuda-ipc", why="within the GPU")
    kinds: dict[tuple[str, str], list[str]] = {}
    for sink, source in permutations(gpus, 2):
        if source.index in sink.nvlinks:
            kind = ("cuda-ipc", "NVLink")
        elif source.index in sink.reads:
            kind = ("cuda-ipc", "PCIe")
        else:
            kind = ("direct+staged", "the driver allows no peer access")
        kinds.setdefault(kind, []).append(f"{source.index}→{sink.index}")
    for (backend, why), pairs in kinds.items():
        which = "any two" if len(kinds) == 1 and len(pairs) > 1 else ", ".join(pairs)
        yield Pair(between=f"GPU memory, {which}", backend=backend, why=why)
    if not gpus:
        return
    backend, why = f"{far.backend}+staged", far.why
    if far.backend == "verbs" and gpu_memory_by:
        backend, why = "gpudirect", f"{far.why}, by {gpu_memory_by}; from GPU to GPU"
    elif far.backend == "verbs":
        why = f"{far.why}; adapters cannot reach GPU memory here"
    yield Pair(between="GPU memory, workers of two hosts", backend=backend, why=why)
