"""Places of devices in the PCI tree, from sysfs, and the distance between two of them."""

from __future__ import annotations

import re
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

UNKNOWN_NODE = -1


class PciPlace(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    """PCI address, such as 0000:3b:00.0; empty: no PCI device."""
    bridges: tuple[str, ...] = ()
    """Path from the root complex (pci0000:3a) down to the bridge above the device."""
    numa_node: int = UNKNOWN_NODE


class Link(IntEnum):
    """The farthest part of the way between two devices, nearest first; in the end `nvidia-smi topo -m`'s name."""

    SWITCH = 0
    """A PCIe switch, or only its ports: PIX, PXB."""
    ROOT = 1
    """The processor's root complex: PHB."""
    NODE = 2
    """Root complexes of one NUMA node: NODE."""
    FAR = 3
    """The link between NUMA nodes: SYS."""


class Way(NamedTuple):
    """Ways compare: the lesser is the shorter."""

    link: Link
    bridges: int
    """PCIe bridges that only one of the two devices is below."""


def pci_place(root: Path, address: str) -> PciPlace:
    """Return a device's place; only its address where sysfs does not know it, as in some containers."""
    folder = root / "sys/bus/pci/devices" / address.lower()
    try:
        path = folder.resolve(strict=True)
    except OSError:
        return PciPlace(address=address.lower())
    parts = [part for part in path.parts if re.fullmatch(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:.*", part)]
    node = UNKNOWN_NODE
    with suppress(OSError, ValueError):
        node = int((path / "numa_node").read_text())
    return PciPlace(address=path.name, bridges=tuple(parts[:-1]), numa_node=node)


def nodes_online(root: Path) -> int:
    """Return the number of NUMA nodes; 1 where sysfs does not say."""
    count = 0
    with suppress(OSError, ValueError):
        for span in (root / "sys/devices/system/node/online").read_text().strip().split(","):
            first, _, last = span.partition("-")
            count += int(last or first) - int(first) + 1
    return max(1, count)


def way_between(one: PciPlace, other: PciPlace, *, numa_nodes: int) -> Way:
    """Return the way between two devices. An unknown place is near only where nothing can be far."""
    shared = 0
    for own, theirs in zip(one.bridges, other.bridges, strict=False):
        if own != theirs:
            break
        shared += 1
    bridges = len(one.bridges) + len(other.bridges) - 2 * shared
    if shared > 1:
        return Way(Link.SWITCH, bridges)
    if shared == 1:
        return Way(Link.ROOT, bridges)
    one_node = numa_nodes == 1 or one.numa_node == other.numa_node != UNKNOWN_NODE
    return Way(Link.NODE if one_node else Link.FAR, bridges)
