"""Records of streams, and the fault that caused each disturbance. Pure functions and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

UNDISTURBED = "no fault yet"
GAP_S_MIN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    how: str
    """`kill` or `stop`."""
    victim: str
    """Name of the process, such as `decode-1`."""
    at_s: float
    lasts_s: float = 0.0

    @property
    def kind(self) -> str:
        return f"{self.how} {self.victim.rstrip('-0123456789')}"

    def __str__(self) -> str:
        lasting = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.how} {self.victim}{lasting} at {self.at_s:.1f} s"


@dataclass(slots=True, kw_only=True)
class Stream:
    """One request and its outcome."""

    name: str
    """The request's x-request-id."""
    began_s: float
    events: int = 0
    """Pieces of text received."""
    first_s: float | None = None
    last_s: float = 0.0
    gaps: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Begin and end of each wait between two pieces that is longer than the engine's pace."""
    text: str = ""
    error: str = ""
    wrong: bool = False
    """Whether the text differs from the undisturbed run."""
    ended_s: float = 0.0

    def hear(self, text: str, now_s: float) -> None:
        """Note a piece of the answer."""
        if self.first_s is None:
            self.first_s = now_s
        elif now_s - self.last_s > GAP_S_MIN:
            self.gaps.append((self.last_s, now_s))
        self.events += 1
        self.last_s = now_s
        self.text += text


@dataclass(slots=True)
class Row:
    """Combined effect of all faults of one kind."""

    faults: int = 0
    failed: int = 0
    wrong: int = 0
    gap_max_s: float = 0.0
    """Longest wait between two pieces of an answer; 0 if none exceeds GAP_S_MIN."""
    first_max_s: float = 0.0
    """Longest time to first token."""


def cause(faults: Sequence[Fault], began_s: float, ended_s: float) -> Fault | None:
    """Return the fault blamed for a wait: the first during it, otherwise the last one before it."""
    inside = (fault for fault in faults if began_s <= fault.at_s <= ended_s)
    before = (fault for fault in reversed(faults) if fault.at_s < began_s)
    return next(inside, None) or next(before, None)


def tabulate(streams: Iterable[Stream], faults: Sequence[Fault]) -> dict[str, Row]:
    """Return one row per kind of fault, keyed by its name."""
    rows = {kind: Row() for kind in sorted({fault.kind for fault in faults})}
    for fault in faults:
        rows[fault.kind].faults += 1

    def row(began_s: float, ended_s: float) -> Row:
        fault = cause(faults, began_s, ended_s)
        return rows.setdefault(fault.kind if fault else UNDISTURBED, Row())

    for stream in streams:
        if stream.first_s is not None:
            first = row(stream.began_s, stream.first_s)
            first.first_max_s = max(first.first_max_s, stream.first_s - stream.began_s)
        for began_s, ended_s in stream.gaps:
            gap = row(began_s, ended_s)
            gap.gap_max_s = max(gap.gap_max_s, ended_s - began_s)
        if stream.error or stream.wrong:
            # The failure falls into the wait after the last event.
            end = row(stream.last_s if stream.events else stream.began_s, stream.ended_s)
            end.failed += bool(stream.error)
            end.wrong += stream.wrong
    return rows


def report(streams: Sequence[Stream], faults: Sequence[Fault]) -> Iterator[str]:
    """Yield the lines of the final report."""
    rows = tabulate(streams, faults)
    heads = ("fault", "times", "failed", "wrong bytes", "longest gap", "longest first token")
    yield " | ".join(f"{head:>{max(len(head), 14)}}" for head in heads)
    for kind, row in rows.items():
        cells = (kind, row.faults, row.failed, row.wrong, f"{row.gap_max_s:.2f} s", f"{row.first_max_s:.2f} s")
        yield " | ".join(f"{cell:>{max(len(head), 14)}}" for cell, head in zip(cells, heads, strict=True))
    for stream in streams:
        if stream.error or stream.wrong:
            near = [fault for fault in faults if fault.at_s <= stream.ended_s][-3:]
            what = stream.error or "the text is another than undisturbed"
            yield (
                f"{stream.name}, begun at {stream.began_s:.1f} s, ended at {stream.ended_s:.1f} s after "
                f"{stream.events} events: {what}; faults before: {', '.join(map(str, near)) or 'none'}"
            )
    yield summary(streams, faults)


def summary(streams: Sequence[Stream], faults: Sequence[Fault]) -> str:
    """Return one line about all streams that have ended."""
    rows = tabulate(streams, faults).values()
    failed, wrong = sum(row.failed for row in rows), sum(row.wrong for row in rows)
    gap_s, first_s = (max((getattr(row, name) for row in rows), default=0.0) for name in ("gap_max_s", "first_max_s"))
    return (
        f"{len(faults)} faults, {len(streams)} requests, {failed} failed, {wrong} with wrong bytes, "
        f"longest gap {gap_s:.2f} s, longest time to first token {first_s:.2f} s"
    )
