"""Traces by name, packed with the simulator, or by file."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

from baton.errors import InvalidRequest
from baton_simulator.traffic import agents, azure, mooncake, skewed
from baton_simulator.traffic.trace import Trace

FOLDER: Final = Path(__file__).parent / "packed"
PACKED: Final = {
    "conversation": FOLDER / "mooncake_conversation.jsonl.gz",
    "agents": FOLDER / "claude_code_sessions.jsonl.gz",
}
SKEWED: Final = "skewed"
NAMES: Final = (*PACKED, SKEWED)
GZIP: Final = b"\x1f\x8b"


def load(name: str, seed: int) -> Trace:
    """Return a packed trace, or one from a file. Raises InvalidRequest."""
    if name == SKEWED:
        return skewed.generate()
    path = PACKED.get(name, Path(name))
    if not path.is_file():
        raise InvalidRequest(f"there is no trace {name}: name a file or one of {', '.join(NAMES)}")
    try:
        trace = _read(name, path, Random(f"{seed} trace"))
    except (EOFError, gzip.BadGzipFile, OSError) as error:
        raise InvalidRequest(f"{name} cannot be read: {error}") from error
    if not trace.requests:
        raise InvalidRequest(f"{name} has no requests")
    return trace


def _read(name: str, path: Path, random: Random) -> Trace:
    """Read a file in the format that its first line shows."""
    first = next(_lines(path), b"")
    if first.startswith(b"TIMESTAMP"):
        return azure.read(name, _lines(path))
    if b'"hash_runs"' in first:
        return agents.read(name, _lines(path), random)
    return mooncake.read(name, _lines(path), random)


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        is_packed = file.read(len(GZIP)) == GZIP
    with gzip.open(path) if is_packed else path.open("rb") as file:
        yield from file
