"""The report of a benchmark: a table for people and a JSON file that is committed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of Baton beside its peers' in the same run. `ratio` is Baton's divided by the first peer's."""

    name: str
    unit: str
    ours: float
    peers: dict[str, float] = field(default_factory=dict[str, float])
    ratio: float | None = None

    @classmethod
    def against(cls, name: str, unit: str, ours: float, **peers: float) -> Row:
        first = next(iter(peers.values()), 0.0)
        return cls(name=name, unit=unit, ours=ours, peers=peers, ratio=ours / first if first else None)


def machine() -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores, {model}, Python {platform.python_version()}"


def commit() -> str:
    """Return the commit, with `-dirty` if anything but results, and docs that have tables of them, differs from it."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=RESULTS.parent)

    paths = (":/", f":(exclude){RESULTS.name}", ":(top,exclude)docs")
    differs = git("diff", "--quiet", "HEAD", "--", *paths).returncode == 1
    return (git("describe", "--always").stdout.strip() or "unknown") + "-dirty" * differs


def report(name: str, rows: Sequence[Row], *, notes: str = "") -> None:
    """Print the rows and write `benchmarks/results/<name>.json`."""
    width = max(len(row.name) for row in rows)
    for row in rows:
        peers = "  ".join(f"{peer} {value:.4g}" for peer, value in row.peers.items())
        ratio = "" if row.ratio is None else f"  ratio {row.ratio:.3f}"
        print(f"{row.name:<{width}}  {row.ours:.4g} {row.unit}  {peers}{ratio}")
    if notes:
        print(notes)
    RESULTS.mkdir(exist_ok=True)
    content = {"machine": machine(), "commit": commit(), "notes": notes, "rows": [asdict(row) for row in rows]}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
