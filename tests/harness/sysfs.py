"""Parts of recorded file systems, laid out in a folder."""

from __future__ import annotations

from pathlib import Path

SAMPLES = Path(__file__).parents[1] / "samples" / "sysfs"


def lay_out(sample: str, root: Path) -> Path:
    """Make the files (`path = content`) and links (`path -> target`) of a sample; return the root."""
    for line in (SAMPLES / f"{sample}.txt").read_text().splitlines():
        name, kind, content = (*line.split(" ", 2), "")[:3]
        if name == "#":
            continue
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "->":
            path.symlink_to(content)
            (path.parent / content).mkdir(parents=True, exist_ok=True)
        else:
            path.write_text(content + "\n")
    return root


def let_adapters_reach_gpus(root: Path, way: str) -> None:
    """Write what Linux shows of the driver's own modules, or of nvidia-peermem."""
    if way == "dma-buf":
        version = root / "proc/driver/nvidia/version"
        version.parent.mkdir(parents=True)
        version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n")
    elif way:
        (root / "sys/module/nvidia_peermem").mkdir(parents=True)
