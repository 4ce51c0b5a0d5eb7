"""A service's memory of its spans, their export, and its answers to queries."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton import subjects
from baton.bus import MemoryBus, MemoryNetwork
from baton.cli.trace import ask, check_name
from baton.clock import SystemClock
from baton.errors import InvalidRequest, WorkerLost
from baton.messages.traces import SpanRecord, TraceQuery, TraceWanted
from baton.telemetry import TelemetrySettings, Tracing
from baton.telemetry.recorder import TRACE_SPANS_MAX, Recorder

ROOT = {"baton.request_id": "mine"}


def traced(share: float) -> tuple[Tracing, list[SpanRecord]]:
    exported: list[SpanRecord] = []
    return Tracing("gateway", TelemetrySettings(trace_share=share), export=exported.append), exported


def trace_id(traceparent: str) -> str:
    return traceparent.split("-")[1]


def traced_within(now_s: Callable[[], float] = lambda: 0.0, **bounds: float) -> tuple[Tracing, Recorder]:
    """Spans that are remembered within other bounds than usual."""
    tracing = Tracing("gateway")
    recorder = Recorder(None, now_s=now_s, **bounds)  # pyright: ignore[reportArgumentType]
    tracing._recorder = recorder  # pyright: ignore[reportPrivateUsage]
    return tracing, recorder


def want(tracing: Tracing, traceparent: str) -> None:
    recorder = tracing._recorder  # pyright: ignore[reportPrivateUsage]
    assert recorder is not None
    recorder.want(trace_id(traceparent))


# ---------------------------------------------------------------- sampling


def test_the_share_of_sampled_traces_is_kept_and_follows_from_their_ids() -> None:
    tracing, _ = traced(0.25)
    flags: dict[str, str] = {}
    for _ in range(2000):
        with tracing.span("request") as span:
            flags[trace_id(span.trace)] = span.trace[-2:]
    sampled = sum(flag == "01" for flag in flags.values())
    assert 400 <= sampled <= 600
    # Any other gateway with this share would decide the same for the same id.
    assert {flag for trace, flag in flags.items() if int(trace[16:], 16) < 1 << 62} == {"01"}
    assert {flag for trace, flag in flags.items() if int(trace[16:], 16) >= 1 << 62} == {"00"}


def test_nothing_of_an_unsampled_trace_is_exported_unless_it_is_wanted() -> None:
    tracing, exported = traced(0.0)
    with tracing.span("request", ROOT) as root:
        with tracing.span("before", parent=root.trace):
            pass
        assert exported == []
        want(tracing, root.trace)
        want(tracing, root.trace)
        with pytest.raises(WorkerLost), tracing.span("after", parent=root.trace):
            raise WorkerLost("it is gone")
    spans = {span.name: span for span in exported}
    assert sorted(spans) == ["after", "before", "request"]
    assert len(exported) == 3, "each once"
    assert spans["after"].error == "it is gone"
    assert spans["after"].attributes == {"error.type": "worker_lost"}
    assert spans["after"].parent == spans["before"].parent == spans["request"].span


def test_a_sampled_trace_that_is_wanted_as_well_is_not_exported_twice() -> None:
    tracing, exported = traced(1.0)
    with tracing.span("request") as root:
        pass
    want(tracing, root.trace)
    assert len(exported) == 1


# ---------------------------------------------------------------- bounds


def test_the_oldest_traces_make_room_whole() -> None:
    tracing, remembered = traced_within(spans_max=10)
    traces: list[str] = []
    for _ in range(6):
        with tracing.span("request") as root, tracing.span("below", parent=root.trace):
            traces.append(trace_id(root.trace))
    assert [len(remembered.find(trace)[0]) for trace in traces] == [0, 2, 2, 2, 2, 2]


def test_traces_are_forgotten_after_a_while_but_not_while_spans_are_added() -> None:
    now_s = 0.0
    tracing, remembered = traced_within(lambda: now_s, age_s_max=60.0)
    with tracing.span("long") as long:
        with tracing.span("short") as short:
            pass
        for _ in range(4):
            now_s += 25
            with tracing.span("below", parent=long.trace):
                pass
    assert remembered.find(trace_id(short.trace)) == ([], 0)
    assert len(remembered.find(trace_id(long.trace))[0]) == 5
    now_s += 61
    assert remembered.find(trace_id(long.trace)) == ([], 0)


def test_one_huge_trace_does_not_push_out_the_others_and_says_what_is_missing() -> None:
    tracing, remembered = traced_within()
    with tracing.span("small") as small:
        pass
    with tracing.span("huge") as huge:
        for _ in range(TRACE_SPANS_MAX + 5):
            with tracing.span("below", parent=huge.trace):
                pass
    spans, left_out = remembered.find(trace_id(huge.trace))
    assert (len(spans), left_out) == (TRACE_SPANS_MAX, 6)
    assert len(remembered.find(trace_id(small.trace))[0]) == 1


def test_wanting_unknown_traces_is_bounded() -> None:
    _, remembered = traced_within(spans_max=10)
    for number in range(1000):
        remembered.want(f"{number:032x}")
    assert len(remembered._traces) <= 10  # pyright: ignore[reportPrivateUsage]


# ---------------------------------------------------------------- over the bus


@pytest.mark.parametrize("sampled", [True, False])
async def test_services_tell_what_they_remember_of_a_request_while_it_runs_and_after(sampled: bool) -> None:
    network = MemoryNetwork(clock=SystemClock())
    bus = MemoryBus(network, name="test")
    settings = TelemetrySettings(trace_share=float(sampled))
    gateway, worker = Tracing("gateway", settings), Tracing("decode", instance="decode-0")
    for tracing in (gateway, worker):
        await tracing.answer(bus)
    with gateway.span("chat", ROOT) as root:
        with worker.span("decode", parent=root.trace):
            pass
        running = await ask(bus, "mine")
        assert [(span.record.name, span.record.end_ns) for span in running.spans] == [("chat", 0)]
        assert running.services == 2, "those that know nothing answer, too"
    ended = await ask(bus, trace_id(root.trace))
    assert {(span.service, span.instance if span.service == "decode" else "") for span in ended.spans} == {
        ("gateway", ""),
        ("decode", "decode-0"),
    }
    assert all(span.record.end_ns >= span.record.start_ns > 0 for span in ended.spans)
    assert (await ask(bus, "theirs")).spans == ()
    await bus.close()
    await network.close()


async def test_long_traces_come_in_pages_and_a_wanted_one_is_exported_everywhere() -> None:
    network = MemoryNetwork(clock=SystemClock(), payload_bytes_max=1 << 20)
    bus = MemoryBus(network, name="test")
    tracing, exported = traced(0.0)
    await tracing.answer(bus)
    with tracing.span("chat", {**ROOT, "long": "x" * 100_000}) as root:
        for _ in range(500):
            with tracing.span("below", {"long": "x" * 100_000}, parent=root.trace):
                pass
    answers = await ask(bus, "mine")
    assert len(answers.spans) == 501
    assert not exported
    await bus.publish(subjects.TRACES, TraceWanted(trace=trace_id(root.trace)))
    # The same subscription handles messages in order: once this is answered, the other has been dealt with.
    await ask(bus, "mine")
    assert len(exported) == 501
    await bus.publish(subjects.TRACES, TraceQuery(id="mine", asker="not a subject *"))
    assert (await ask(bus, "mine")).services == 1, "a malformed question does no harm"
    await bus.close()
    await network.close()


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a\nb", "ünfug", "$(id)"])
def test_a_malformed_id_is_one_clear_sentence(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is no request's id: take the x-request-id"):
        check_name(name)
