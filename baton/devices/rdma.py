"""RDMA adapters, from sysfs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from baton.devices.pci import Link, PciPlace, pci_place, way_between


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """A port of an RDMA adapter."""

    device: str
    """Name of the adapter as in `agent_verbs_devices`, such as mlx5_0."""
    port: int
    up: bool
    gbit_per_s: float
    link: str
    """InfiniBand or Ethernet (RoCE)."""
    place: PciPlace
    usable: bool
    """Whether this process may open the adapter's device file."""


def read_nics(root: Path) -> tuple[Nic, ...]:
    folder = root / "sys/class/infiniband"
    devices = sorted(folder.iterdir()) if folder.is_dir() else []
    return tuple(nic for device in devices for nic in _ports(root, device))


def _ports(root: Path, device: Path) -> Iterator[Nic]:
    usable = _is_usable(root, device)
    # Some adapters are not on PCI: those made of software, such as rxe.
    address = (device / "device").resolve().name if (device / "device").exists() else ""
    place = pci_place(root, address) if address else PciPlace(address="")
    for port in sorted((device / "ports").glob("[0-9]*"), key=lambda path: int(path.name)):
        yield Nic(
            device=device.name,
            port=int(port.name),
            up=_text(port / "state").endswith("ACTIVE"),
            gbit_per_s=_gbit_per_s(_text(port / "rate")),
            link=_text(port / "link_layer"),
            place=place,
            usable=usable,
        )


def _is_usable(root: Path, device: Path) -> bool:
    for known in (root / "sys/class/infiniband_verbs").glob("uverbs*"):
        if _text(known / "ibdev") == device.name:
            file = root / "dev/infiniband" / known.name
            try:
                with file.open("r+b", buffering=0):
                    return True
            except OSError:
                return False
    return False


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _gbit_per_s(rate: str) -> float:
    found = re.match(r"([0-9.]+) Gb/sec", rate)
    return float(found[1]) if found else 0.0


def nearest_nics(place: PciPlace, nics: Sequence[Nic], *, numa_nodes: int) -> tuple[tuple[Nic, ...], Link]:
    """Return the ports that are up and nearest to a device, the fastest first, and what lies between."""
    ways = [(way_between(place, nic.place, numa_nodes=numa_nodes), nic) for nic in nics if nic.up]
    if not ways:
        return (), Link.FAR
    nearest = min(way for way, _ in ways)
    chosen = [nic for way, nic in ways if way == nearest]
    return tuple(sorted(chosen, key=lambda nic: (-nic.gbit_per_s, nic.device, nic.port))), nearest.link
