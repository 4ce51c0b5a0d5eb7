"""What tests ask of a trace, wherever its spans were read from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class TracedSpan:
    trace: str
    span: str
    parent: str
    name: str
    service: str = ""
    start_ns: int
    end_ns: int
    error: str = ""
    attributes: Mapping[str, object] = field(default_factory=dict[str, object])
    links: tuple[str, ...] = ()
    kind: int = 0


class Trace:
    """All spans of one trace, which must be one tree."""

    def __init__(self, spans: Iterable[TracedSpan], *, after_kill: bool = False) -> None:
        """`after_kill`: leave out what a killed process had sent below spans that it could not send any more."""
        self.spans = {span.span: span for span in spans}
        while after_kill and (lost := [span for span in self.spans.values() if span.parent not in {"", *self.spans}]):
            for span in lost:
                del self.spans[span.span]
        assert len({span.trace for span in self.spans.values()}) == 1
        roots = [span for span in self.spans.values() if span.parent not in self.spans]
        assert len(roots) == 1, f"not one tree: {[(root.service, root.name) for root in roots]}"
        self.root = roots[0]

    def below(self, span: TracedSpan) -> list[TracedSpan]:
        return sorted((one for one in self.spans.values() if one.parent == span.span), key=lambda one: one.start_ns)

    def path(self, span: TracedSpan) -> list[str]:
        """Return the names from the root down to `span`."""
        names = [span.name]
        while span.span != self.root.span:
            span = self.spans[span.parent]
            names.append(span.name)
        return names[::-1]

    def paths(self) -> set[str]:
        return {" / ".join(self.path(span)) for span in self.spans.values()}

    def named(self, name: str) -> list[TracedSpan]:
        return sorted((one for one in self.spans.values() if one.name == name), key=lambda one: one.start_ns)

    def leaf_coverage(self) -> float:
        """Return the share of the root's time in which at least one span without children ran."""
        parents = {span.parent for span in self.spans.values()}
        leaves = [span for span in self.spans.values() if span.span not in parents]
        return _union_ns(leaves, self.root.start_ns, self.root.end_ns) / (self.root.end_ns - self.root.start_ns)


def _union_ns(spans: Sequence[TracedSpan], start_ns: int, end_ns: int) -> int:
    covered_ns, until_ns = 0, start_ns
    for span in sorted(spans, key=lambda one: one.start_ns):
        begins_ns, ends_ns = max(span.start_ns, until_ns), min(span.end_ns, end_ns)
        if ends_ns > begins_ns:
            covered_ns += ends_ns - begins_ns
            until_ns = ends_ns
    return covered_ns
