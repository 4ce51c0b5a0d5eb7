"""One scrape of several processes: their metrics side by side, told apart by the label `process`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

END: Final = "# EOF"


def merge_scrapes(texts: Mapping[str, str], *, openmetrics: bool) -> str:
    """Return one exposition of those that the named processes have rendered, all in OpenMetrics or all in plain text.

    Series are labelled, not added up: the counters of a process that dies start again at 0, and Prometheus sees such a
    reset only in that process's own series; a sum would seem to fall, and `rate` would count the rest once more.
    """
    families: dict[str, list[str]] = {}
    """Lines of each metric, which must stay together; by the line that says what it is."""
    lines: list[str] = []
    for process, text in texts.items():
        for line in text.split("\n"):  # Not splitlines: a label may contain other ends of lines, such as U+2028.
            if line.startswith("# HELP "):
                lines = families.setdefault(line, [])
            elif line.startswith("#"):
                if line not in lines and line != END:
                    lines.append(line)
            elif line:
                lines.append(_labelled(line, process))
    merged = [line for head, rest in families.items() for line in (head, *rest)]
    if openmetrics:
        merged.append(END)
    return "".join(f"{line}\n" for line in merged)


def _labelled(sample: str, process: str) -> str:
    """Return a sample line with the label `process`; whatever follows its labels stays as it is."""
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f'{name}{{process="{process}",{rest}'
    name, _, rest = sample.partition(" ")
    return f'{name}{{process="{process}"}} {rest}'
