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
