"""The spans of one trace as a tree, on one clock. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from baton.messages.traces import AttributeValue, SpanRecord


@dataclass(frozen=True, slots=True)
class ServiceSpan:
    """A span, and the service that reported it."""

    service: str
    instance: str
    host: str
    record: SpanRecord


@dataclass(slots=True, eq=False)
class Node:
    span: ServiceSpan
    start_ns: int
    """Begin, on the clock of the root's host."""
    end_ns: int
    """End, on the same clock; now if the span has not ended."""
    depth: int = 0
    children: list[Node] = field(default_factory=list["Node"])

    @property
    def name(self) -> str:
        return self.span.record.name

    @property
    def attributes(self) -> Mapping[str, AttributeValue]:
        return self.span.record.attributes

    @property
    def is_open(self) -> bool:
        return not self.span.record.end_ns


@dataclass(frozen=True, slots=True)
class Tree:
    trace: str
    roots: tuple[Node, ...]
    """The request first, then spans whose parent is unknown, for example because its process died."""
    shifts_ns: Mapping[str, int]
    """Host → correction added to its clock."""

    @property
    def start_ns(self) -> int:
        return min(node.start_ns for node in self.walk())

    @property
    def end_ns(self) -> int:
        return max(node.end_ns for node in self.walk())

    def walk(self) -> Iterator[Node]:
        """Yield every span, parents before children."""
        waiting = list(reversed(self.roots))
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))


def build_tree(spans: Iterable[ServiceSpan], trace: str, *, now_ns: int) -> Tree:
    """Return the tree of one trace. A span that is reported more than once counts once."""
    known = {span.record.span: span for span in spans if span.record.trace == trace}
    root = min(known.values(), key=lambda span: (span.record.parent in known, span.service != "gateway", _start(span)))
    shifts_ns = align_clocks(known, root.host)
    nodes: dict[str, Node] = {}
    for name, span in known.items():
        shift_ns = shifts_ns.get(span.host, 0)
        end_ns = span.record.end_ns + shift_ns if span.record.end_ns else max(now_ns, span.record.start_ns)
        nodes[name] = Node(span, span.record.start_ns + shift_ns, end_ns)
    tops: list[Node] = []
    for node in sorted(nodes.values(), key=lambda node: (node.start_ns, -node.end_ns)):
        parent = nodes.get(node.span.record.parent)
        (tops if parent is None else parent.children).append(node)
    tops.sort(key=lambda node: node.span is not root)
    tree = Tree(trace, tuple(tops), {host: shift_ns for host, shift_ns in shifts_ns.items() if shift_ns})
    for node in tree.walk():
        for child in node.children:
            child.depth = node.depth + 1
    return tree


def align_clocks(known: Mapping[str, ServiceSpan], host: str) -> dict[str, int]:
    """Return what to add to each host's clock, so that the trace makes sense on the clock of `host`.

    Hosts disagree by milliseconds. What is certain is that a span which another host's span caused begins
    while that one runs. Where the clocks say so already, they are left alone; where not, one is moved by
    the least that makes it so.
    """
    shifts_ns = {host: 0}
    while True:
        bounds: dict[str, tuple[float, float]] = {}
        for span in known.values():
            parent = known.get(span.record.parent)
            if parent is None or span.host in shifts_ns or parent.host not in shifts_ns:
                continue
            start_ns = span.record.start_ns
            earliest = parent.record.start_ns + shifts_ns[parent.host] - start_ns
            latest = parent.record.end_ns + shifts_ns[parent.host] - start_ns if parent.record.end_ns else inf
            low, high = bounds.get(span.host, (-inf, inf))
            bounds[span.host] = (max(low, earliest), min(high, latest))
        if not bounds:
            return shifts_ns
        for other, (low, high) in bounds.items():
            shifts_ns[other] = round(low if low > 0 else min(high, 0)) if low <= high else round((low + high) / 2)


def _start(span: ServiceSpan) -> int:
    return span.record.start_ns
