"""`baton trace` as text: the tree, the bars, what is said below them, and clocks that disagree."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import dedent

import pytest

from baton.cli.trace_tree import ServiceSpan, Tree, build_tree
from baton.cli.waterfall import Look, draw, format_time
from baton.messages.traces import AttributeValue, SpanRecord

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
MS = 1_000_000
START_NS = 1_790_000_000_000_000_000


def span(
    span: str,
    parent: str,
    start_ms: float,
    end_ms: float | None,
    *,
    name: str = "",
    who: str = "gateway",
    host: str = "a",
    error: str = "",
    attributes: Mapping[str, AttributeValue] | None = None,
) -> ServiceSpan:
    record = SpanRecord(
        trace=TRACE,
        span=span,
        parent=parent,
        name=name or span,
        start_ns=START_NS + int(start_ms * MS),
        end_ns=START_NS + int(end_ms * MS) if end_ms is not None else 0,
        error=error,
        attributes=dict(attributes or {}),
    )
    return ServiceSpan(who.partition("-")[0], who, host, record)


def tree(*spans: ServiceSpan, now_ms: float = 1000) -> Tree:
    return build_tree(spans, TRACE, now_ns=START_NS + int(now_ms * MS))


PLACED: dict[str, AttributeValue] = {
    "baton.attempt": 0,
    "baton.placement.prefill": "prefill-0",
    "baton.placement.decode": "decode-0",
    "baton.placement.reason": "prefill on prefill-0, decode on decode-0.",
    "baton.predicted.ttft_s": 0.0213,
    "baton.ttft_s": 0.0301,
    "baton.predicted.cached_tokens": 64,
    "baton.cached_tokens": 32,
    "error.type": "worker_lost",
}
PLACED_AGAIN: dict[str, AttributeValue] = {"baton.attempt": 1, "baton.placement.reason": "everything on decode-1."}
LAYERS: dict[str, AttributeValue] = {
    "baton.transfer.first_layer": 0,
    "baton.transfer.layers": 4,
    "baton.transfer.bytes": 2_400_000,
    "baton.transfer.backend": "shm",
    "baton.transfer.waiting_s": 0.008,
}
REQUEST = (
    span("chat", "client", 0, 200, name="chat tiny"),
    span("read", "chat", 0, 1),
    span("attempt0", "chat", 2, 100, name="attempt", error="worker decode-0 is gone", attributes=PLACED),
    span("place", "attempt0", 2, 4),
    span("placed", "place", 2.5, 3.5, name="place", who="scheduler-1"),
    span("dispatch", "attempt0", 4, 6, attributes={"baton.worker": "decode-0"}),
    span("decode", "dispatch", 5, None, who="decode-0"),
    span("transfer", "decode", 10, 20, who="decode-0", attributes={"baton.transfer.bytes": 2_400_000}),
    span("layers", "transfer", 10, 20, who="decode-0", attributes=LAYERS),
    span("stream", "attempt0", 30, 100),
    span("attempt1", "chat", 100, 199, name="attempt", attributes=PLACED_AGAIN),
    span("stream1", "attempt1", 110, 199, name="stream"),
)  # fmt: skip


def test_the_waterfall_of_a_request_that_was_tried_twice() -> None:
    lines = list(draw(tree(*REQUEST, now_ms=190), Look(columns=96)))
    assert "\n".join(lines) == dedent("""\
        trace 4bf92f3577b34da6a3ce929d0e0e4736, 2026-09-21 14:13:20 UTC, 200.0 ms

                                                               begins     takes
        chat tiny                                              0.0 ms  200.0 ms ████████████████████████
        │ read  for the request's body                         0.0 ms    1.0 ms ▏
        │ attempt 0  prefill-0, decode-0                       2.0 ms   98.0 ms ████████████
        │ │ place  for a scheduler                             2.0 ms    2.0 ms ▏
        │ │ │ place (scheduler)  for the index                 2.5 ms    1.0 ms ▏
        │ │ dispatch  for decode-0 to accept                   4.0 ms    2.0 ms █
        │ │ │ decode (decode-0)                                5.0 ms >185.0 ms ███████████████████████
        │ │ │ │ transfer  for 2.4 MB of KV                    10.0 ms   10.0 ms  █
        │ │ │ │ │ layers 0-3  2.4 MB by shm, 8.0 ms of it …   10.0 ms   10.0 ms  █
        │ │ stream  for the tokens after it                   30.0 ms   70.0 ms    █████████
        │ attempt 1                                          100.0 ms   99.0 ms             ████████████
        │ │ stream  for the tokens after it                  110.0 ms   89.0 ms              ███████████

        attempt 0: prefill on prefill-0, decode on decode-0. First token after 0.030 s (0.021
          predicted). Cached 32 tokens (64 predicted). Ended by worker_lost: worker decode-0 is gone.
        attempt 1: everything on decode-1.
        > has not ended""")


@pytest.mark.parametrize("columns", [20, 60, 80, 120, 500])
@pytest.mark.parametrize("unicode", [True, False])
def test_every_line_fits_the_terminal(columns: int, unicode: bool) -> None:
    lines = list(draw(tree(*REQUEST), Look(columns=columns, unicode=unicode), left_out=3, older=["0" * 32] * 9))
    assert all(len(line) <= max(columns, 60) for line in lines)
    assert unicode or "\n".join(lines).isascii()


def test_colour_marks_what_failed_and_only_where_it_is_wanted() -> None:
    plain, coloured = (list(draw(tree(*REQUEST), Look(colour=colour))) for colour in (False, True))
    assert not any("\x1b" in line for line in plain)
    assert [line for line in coloured if "\x1b" in line] == [line for line in coloured if "attempt 0  " in line]


def test_what_lost_its_parent_stands_after_the_request() -> None:
    orphaned = tree(span("chat", "", 0, 50), span("lost", "nobody", -5, 20, who="decode-0"), span("read", "chat", 0, 1))
    assert [node.name for node in orphaned.roots] == ["chat", "lost"]
    assert [node.name for node in orphaned.walk()] == ["chat", "read", "lost"]
    assert list(draw(orphaned, Look()))


def test_clocks_that_fit_are_left_alone() -> None:
    fits = tree(span("chat", "", 0, 50), span("place", "chat", 10, 12, who="scheduler-1", host="b"))
    assert fits.shifts_ns == {}


@pytest.mark.parametrize("skew_ms", [-40.0, 40.0])
def test_a_clock_is_moved_by_the_least_that_lets_causes_come_first(skew_ms: float) -> None:
    skewed = tree(
        span("chat", "", 0, 50),
        span("place", "chat", 10, 20),
        span("placed", "place", 12 + skew_ms, 14 + skew_ms, who="scheduler-1", host="b"),
        span("dispatch", "chat", 20, 24),
        span("decode", "dispatch", 22 + skew_ms, 48 + skew_ms, who="decode-0", host="b"),
        span("matched", "placed", 13 + skew_ms, 13.5 + skew_ms, who="kvindex-1", host="c"),
    )
    shift_ms = skewed.shifts_ns["b"] / MS
    assert -skew_ms - 2 <= shift_ms <= -skew_ms + 2
    starts = {node.name: (node.start_ns - START_NS) / MS for node in skewed.walk()}
    assert 10 <= starts["placed"] <= 20
    assert 20 <= starts["decode"] <= 24
    assert starts["placed"] <= starts["matched"]
    assert any(line.startswith("the clock of b was moved by") for line in draw(skewed, Look()))


def test_times_have_about_four_digits() -> None:
    assert [format_time(int(ms * MS)) for ms in (0, 0.04, 12.34, 999.94, 1000, 12_340)] == [
        "0.0 ms",
        "0.0 ms",
        "12.3 ms",
        "999.9 ms",
        "1000 ms",
        "12.3 s",
    ]


def test_what_came_from_the_pools_file_is_told() -> None:
    loaded: dict[str, AttributeValue] = {"baton.promoted_tokens": 96, "baton.loaded_tokens": 64}
    spans = span("request", "", 0, 90), span("leg", "request", 10, 80, name="whole", who="decode-0", attributes=loaded)
    text = "\n".join(draw(tree(*spans), Look()))
    assert "whole (decode-0): 64 of the promoted tokens were in the pool's file." in text
