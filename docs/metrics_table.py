"""Writes the table of all metrics into `metrics.md`, from the catalogue: `python docs/metrics_table.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from baton.telemetry import catalogue
from baton.telemetry.catalogue import EVERYONE, PREFILL_DECODE, Kind, Row

DOCUMENT: Final = Path(__file__).parent / "metrics.md"
BEGIN: Final = "<!-- the table: python docs/metrics_table.py -->\n"
END: Final = "<!-- end of the table -->\n"

_GROUPS: Final[dict[tuple[str, ...], str]] = {EVERYONE: "every service", PREFILL_DECODE: "prefill, decode"}


def table() -> str:
    """Return the rows, each once, by the services that show them."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in catalogue.rows():
        groups.setdefault(row.services, []).append(row)
    return "".join(line + "\n" for services, rows in groups.items() for line in _group(services, rows))


def _group(services: tuple[str, ...], rows: list[Row]) -> Iterator[str]:
    yield f"\n**{_GROUPS.get(services) or ', '.join(services)}**\n"
    yield "| metric | kind | unit | labels | what it is |"
    yield "|---|---|---|---|---|"
    for row in rows:
        labels = ", ".join(f"`{label}`" for label in row.labels)
        if row.known:
            labels += ": " + ", ".join(row.known)
        if row.buckets:
            labels += (" " if labels else "") + f"boundaries {row.buckets[0]:g} to {row.buckets[-1]:g}"
        yield f"| `{row.name}` | {row.kind} | {_unit(row)} | {labels} | {row.help} |"


def _unit(row: Row) -> str:
    """Return the unit, with which every name ends that has one; else things are counted, or a state is 0 or 1."""
    stem = row.name.removesuffix("_total")
    units = ("tokens_per_second", "bytes_per_second", "seconds", "bytes", "tokens", "blocks", "ratio", "messages")
    found = next((unit for unit in units if stem.endswith(f"_{unit}")), "")
    if found:
        return found.replace("_per_", "/")
    return "count" if row.kind is not Kind.GAUGE or not row.help.startswith("1") else "0 or 1"


if __name__ == "__main__":
    before, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + table() + END + rest.split(END)[1])
