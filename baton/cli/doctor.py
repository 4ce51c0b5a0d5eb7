"""`baton doctor`: what this machine has for Baton, which way KV takes on it, and what to mend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from baton.devices.backends import Pair, nearest_adapters, pair_backends
from baton.devices.findings import Finding, find
from baton.devices.gpus import Gpu
from baton.devices.pci import Link
from baton.devices.rdma import Nic, nearest_nics
from baton.devices.survey import Survey

_LINKS = {
    Link.SWITCH: "same PCIe switch",
    Link.ROOT: "same root complex",
    Link.NODE: "same NUMA node",
    Link.FAR: "other NUMA node",
}


class Report(msgspec.Struct, frozen=True, kw_only=True):
    survey: Survey
    pairs: tuple[Pair, ...]
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> bool:
        return any(finding.kind == "problem" for finding in self.findings)


def examine(survey: Survey) -> Report:
    return Report(survey=survey, pairs=pair_backends(survey), findings=find(survey))


def describe(report: Report) -> str:
    """Return the report in lines for a terminal."""
    survey = report.survey
    lines = [
        *_about_gpus(survey),
        *_about_nics(survey.nics),
        *_about_host(survey),
        "",
        "KV between two workers",
        *(f"  {pair.between}: {pair.backend} ({pair.why})" for pair in report.pairs),
    ]
    if survey.gpus.gpus:
        lines.append("  KV leaves GPU memory so with KV_PATH=gpu, and always staged with KV_PATH=staged.")
        lines.append("  Otherwise workers on GPUs serve requests whole.")
    lines += ["", *describe_findings(report.findings)]
    return "\n".join(lines)


def describe_findings(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["nothing to mend"]
    return [line for one in findings for line in (f"{one.kind}: {one.what}", f"  fix: {one.fix}")]


def _about_gpus(survey: Survey) -> Iterator[str]:
    driver = survey.gpus.driver
    if driver is None:
        failed = survey.gpus.failure
        yield "GPUs that cannot be read" if failed else "no NVIDIA GPU: engines run on the CPU"
        return
    yield f"NVIDIA driver {driver.version}, CUDA up to {driver.cuda[0]}.{driver.cuda[1]}"
    for gpu in survey.gpus.gpus:
        sm = f"sm_{gpu.capability[0]}{gpu.capability[1]}"
        yield (
            f"GPU {gpu.index}  {gpu.name}, {sm}, {_gib(gpu.memory_bytes)} ({_gib(gpu.free_bytes)} free), "
            f"{gpu.place.address}, {_node(gpu.place.numa_node)}"
        )
        nics, link = nearest_nics(gpu.place, survey.nics, numa_nodes=survey.host.numa_nodes)
        near = ", ".join(f"{nic.device}:{nic.port}" for nic in nics)
        yield f"       reads {_peers(gpu)}; nearest adapter: {f'{near} ({_LINKS[link]})' if nics else 'none is up'}"
        if adapters := nearest_adapters(survey)[gpu.index]:
            yield f"       its worker's setting: agent_verbs_devices={','.join(adapters)}"


def _peers(gpu: Gpu) -> str:
    by_pci = [index for index in gpu.reads if index not in gpu.nvlinks]
    ways = [f"{_list(gpu.nvlinks)} over NVLink" if gpu.nvlinks else "", f"{_list(by_pci)} over PCIe" if by_pci else ""]
    return " and ".join(way for way in ways if way) or "no other GPU"


def _list(indexes: Sequence[int]) -> str:
    return f"GPU{'s' if len(indexes) > 1 else ''} {', '.join(map(str, indexes))}"


def _about_nics(nics: Sequence[Nic]) -> Iterator[str]:
    if not nics:
        yield "no RDMA adapter: workers of two hosts use TCP"
    for nic in nics:
        state = f"up, {nic.gbit_per_s:g} Gb/s" if nic.up else "down"
        where = f"{nic.place.address}, {_node(nic.place.numa_node)}" if nic.place.address else "not on PCI"
        yield f"RDMA {nic.device}:{nic.port}  {nic.link}, {state}, {where}"


def _about_host(survey: Survey) -> Iterator[str]:
    host = survey.host
    locked = "no limit" if host.locked_bytes_max is None else f"{host.locked_bytes_max / 2**20:g} MiB"
    yield f"memory that a process may lock (ulimit -l): {locked}"
    yield f"/dev/shm: {_gib(host.shm_bytes)} ({_gib(host.shm_free_bytes)} free)"


def _node(numa_node: int) -> str:
    return f"NUMA node {numa_node}" if numa_node >= 0 else "NUMA node unknown"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
