"""A trace as text: a line for each span, with its bar, and below them the outcome of the attempts. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from baton.cli.trace_tree import Node, Tree

COLUMNS_MIN: Final = 60
COLUMNS_MAX: Final = 200
TIME_COLUMNS: Final = 9
_WAITS: Final = {
    ("gateway", "read"): "for the request's body",
    ("gateway", "tokenise"): "for the tokenizer",
    ("gateway", "queue"): "for a worker to become free",
    ("gateway", "place"): "for a scheduler",
    ("scheduler", "place"): "for the index",
    ("gateway", "first token"): "for the workers",
    ("gateway", "stream"): "for the tokens after it",
    ("gateway", "send"): "for the client to take the rest",
    ("worker", "queue"): "for the engine to begin",
    ("worker", "compute"): "for the prompt to be computed",
    ("worker", "first token"): "for the engine's next step",
    ("worker", "generate"): "for the engine's steps",
}
"""Use of the time, by the span's service and name."""


@dataclass(frozen=True, slots=True)
class Look:
    """The terminal's capabilities for drawing."""

    columns: int = 100
    colour: bool = False
    unicode: bool = True


def draw(tree: Tree, look: Look, *, left_out: int = 0, older: Sequence[str] = ()) -> Iterator[str]:
    columns = min(max(look.columns, COLUMNS_MIN), COLUMNS_MAX)
    bar_columns = columns // 4
    label_columns = columns - bar_columns - 2 * TIME_COLUMNS - 3
    start_ns, total_ns = tree.start_ns, max(1, tree.end_ns - tree.start_ns)
    began = datetime.fromtimestamp(start_ns / 1e9, UTC)
    yield from textwrap.wrap(f"trace {tree.trace}, {began:%Y-%m-%d %H:%M:%S} UTC, {format_time(total_ns)}", columns)
    yield ""
    yield f"{'':<{label_columns}} {'begins':>{TIME_COLUMNS}} {'takes':>{TIME_COLUMNS}}"
    for node in tree.walk():
        label = _clip(_branch(node, look) + _label(node), label_columns, look)
        begins, takes = format_time(node.start_ns - start_ns), format_time(node.end_ns - node.start_ns)
        takes = f">{takes}" if node.is_open else takes
        bar = _bar(node.start_ns - start_ns, node.end_ns - start_ns, total_ns, bar_columns, look)
        line = f"{label:<{label_columns}} {begins:>{TIME_COLUMNS}} {takes:>{TIME_COLUMNS}} {bar}".rstrip()
        yield f"\x1b[31m{line}\x1b[0m" if look.colour and node.span.record.error else line
    notes = [note for node in tree.walk() for note in _notes(node)]
    notes += [f"the clock of {host} was moved by {shift_ns / 1e6:+.1f} ms" for host, shift_ns in tree.shifts_ns.items()]
    if any(node.is_open for node in tree.walk()):
        notes.append("> has not ended")
    if left_out:
        notes.append(f"{left_out} spans were not remembered")
    if older:
        notes.append(f"older traces go by the same name: {', '.join(older)}")
    yield ""
    for note in notes:
        yield from textwrap.wrap(note, columns, subsequent_indent="  ")


def format_time(duration_ns: float) -> str:
    """Return a duration in four digits or so."""
    ms = duration_ns / 1e6
    if ms >= 10_000:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.0f} ms" if ms >= 1000 else f"{ms:.1f} ms"


def _branch(node: Node, look: Look) -> str:
    return ("│ " if look.unicode else "| ") * node.depth


def _label(node: Node) -> str:
    """Return a span's name, its process if not its parent's, and what it waited for."""
    attributes = node.attributes
    service = node.span.service if node.span.service in ("gateway", "scheduler", "kvindex") else "worker"
    where = node.span.instance if service == "worker" else service
    match node.name:
        case "attempt":
            workers = [attributes.get(f"baton.placement.{role}", "") for role in ("prefill", "decode")]
            return f"attempt {attributes.get('baton.attempt', '')}  {', '.join(str(one) for one in workers if one)}"
        case "dispatch":
            return f"dispatch  for {attributes.get('baton.worker', 'a worker')} to accept"
        case "transfer":
            return f"transfer  for {_size(attributes.get('baton.transfer.bytes'))} of KV"
        case "layers":
            return _layers_label(node)
        case "place" | "match" if service != "gateway":
            waits = _WAITS.get((service, node.name), "")
            return f"{node.name} ({where})  {waits}".rstrip()
        case "prefill" | "decode" | "whole":
            return f"{node.name} ({where})"
        case name:
            waits = _WAITS.get((service, name), "")
            return f"{name}  {waits}".rstrip()


def _layers_label(node: Node) -> str:
    attributes = node.attributes
    first, layers = attributes.get("baton.transfer.first_layer"), attributes.get("baton.transfer.layers")
    size, backend = _size(attributes.get("baton.transfer.bytes")), attributes.get("baton.transfer.backend", "")
    span = f"layer {first}"
    if isinstance(first, int) and isinstance(layers, int) and layers > 1:
        span = f"layers {first}-{first + layers - 1}"
    waited = attributes.get("baton.transfer.waiting_s")
    shown = f", {waited * 1000:.1f} ms of it waiting" if isinstance(waited, float) else ""
    return f"{span}  {size} by {backend}{shown}"


def _notes(node: Node) -> Iterator[str]:
    """Yield how an attempt was placed and how it ended; for other spans, only that they failed."""
    record, attributes = node.span.record, node.attributes
    failure = f"{attributes.get('error.type', 'error')}: {record.error}" if record.error else ""
    failure = failure or str(attributes.get("baton.end", ""))
    if node.name != "attempt":
        if failure and not node.children:
            yield f"{node.name} ({node.span.instance}): {failure}"
        if loaded := attributes.get("baton.loaded_tokens"):
            yield f"{node.name} ({node.span.instance}): {loaded} of the promoted tokens were in the pool's file."
        return
    parts = [str(attributes.get("baton.placement.reason", "not placed"))]
    for what, unit, actual, predicted in (
        ("First token after", "s", "baton.ttft_s", "baton.predicted.ttft_s"),
        ("Cached", "tokens", "baton.cached_tokens", "baton.predicted.cached_tokens"),
    ):
        if actual in attributes and predicted in attributes:
            parts.append(f"{what} {_number(attributes[actual])} {unit} ({_number(attributes[predicted])} predicted).")
    if promoted := attributes.get("baton.promoted_tokens"):
        parts.append(f"{promoted} of them promoted from the pool.")
    if failure:
        parts.append(f"Ended by {failure}.")
    yield f"attempt {attributes.get('baton.attempt', '')}: {' '.join(parts)}"


def _number(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _size(value: object) -> str:
    if not isinstance(value, int):
        return "?"
    return f"{value / 1e6:.1f} MB" if value >= 1_000_000 else f"{value / 1e3:.1f} kB"


def _clip(text: str, columns: int, look: Look) -> str:
    return text if len(text) <= columns else text[: columns - 1] + ("…" if look.unicode else ".")


def _bar(start_ns: int, end_ns: int, total_ns: int, columns: int, look: Look) -> str:
    """Return a bar that covers its share of the columns; the shortest is one thin mark."""
    first = min(columns - 1, start_ns * columns // total_ns)
    last = min(columns, max(first, round(end_ns * columns / total_ns)))
    full, thin = ("█", "▏") if look.unicode else ("#", "|")
    return " " * first + (full * (last - first) or thin)
