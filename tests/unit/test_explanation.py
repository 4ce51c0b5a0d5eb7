"""`baton explain`: records by any id, as text and as JSON, within bounds, on the bus in memory."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton import subjects
from baton.bus import Bus, MemoryBus, MemoryNetwork, Retention
from baton.bus.delivery import check_subject, matches
from baton.cli.explain import RECORDS_MAX, look_up
from baton.cli.explanation import NOT_USED, Explanation, describe, draw
from baton.clock import ManualClock
from baton.errors import InvalidRequest, MalformedMessage, Unavailable
from baton.messages.base import ErrorReport
from baton.messages.decisions import AttemptReport, Considered, Decision, NamedRequest, Verdict
from baton.messages.placement import Candidate
from baton.messages.workers import GatewayBeat

REQUEST = "0123456789abcdef0123456789abcdef"
PAIR = Candidate(
    decode="d1",
    prefill="p1",
    cached_tokens=64,
    predicted_ttft_s=0.25,
    ttft_bound_s=0.35,
    waiting_s=0.1,
    tail_s=0.02,
    cost_s=0.75,
)
PREFILL = Considered(
    leg="prefill",
    workers=("p2", "p1"),
    terms=("cost_s", "waiting_s", "cached_tokens"),
    values=array("f", (0.9, 0.5, 0.3, 0.1, 0.0, 64.0)).tobytes(),
    left_out=7,
)


def decision(verdict: Verdict = Verdict.PLACED, *, attempt: int = 0, choice: int = 0, **changes: object) -> Decision:
    made = Decision(
        request=f"{REQUEST}-{choice}",
        attempt=attempt,
        scheduler="scheduler-1",
        at_s=1_790_000_000.5,
        verdict=verdict,
        policy="predicted",
        model="tiny",
        prompt_tokens=100,
        output_tokens_max=16,
        reason="prefill on p1, decode on d1: 36 of 100 tokens to compute.",
        candidates=(PAIR, Candidate(decode="d2", predicted_ttft_s=0.5, cost_s=1.5)),
        considered=(PREFILL,),
    )
    return msgspec.structs.replace(made, **changes)


def report(end: str = "stop", *, attempt: int = 0, choice: int = 0, **changes: object) -> AttemptReport:
    made = AttemptReport(
        request=f"{REQUEST}-{choice}",
        attempt=attempt,
        gateway="gw",
        at_s=1_790_000_001.0,
        end=end,
        prefill="p1",
        decode="d1",
        scheduler="scheduler-1",
        predicted=PAIR,
        ttft_s=0.3,
        token_interval_s=0.02,
        cached_tokens=32,
        output_tokens=5,
        spent=(("read", 0.1), ("placing", 0.3)),
    )
    return msgspec.structs.replace(made, **changes)


def explanation(*records: Decision | AttemptReport) -> Explanation:
    decisions = tuple(record for record in records if isinstance(record, Decision))
    reports = tuple(record for record in records if isinstance(record, AttemptReport))
    return Explanation(REQUEST, decisions, reports)


def text(*records: Decision | AttemptReport) -> list[str]:
    """Return the lines, with single spaces."""
    return [" ".join(line.split()) for line in draw(explanation(*records))]


def as_json(*records: Decision | AttemptReport) -> list[Any]:
    """Return the attempts, as a reader of the JSON gets them."""
    return msgspec.json.decode(msgspec.json.encode(describe(explanation(*records))))["attempts"]


def test_the_text_has_decision_outcome_terms_and_times() -> None:
    lines = text(decision(held_s=0.8), report(positions=((0.1, 3), (0.4, 0))))
    assert "attempt 0: prefill on p1, decode on d1; ended by stop" in lines
    assert "scheduler schedule: after 800.0 ms in its queue, placed by the policy predicted: prefill" in " ".join(lines)
    assert "Requests before it in the queue: 3 after 100.0 ms, 0 after 400.0 ms." in lines
    assert "time to first token 250.0 ms 300.0 ms" in lines
    assert "its upper bound 350.0 ms" in lines
    assert "cached tokens 64 32" in lines
    assert "> p1 → d1 750.0 ms 250.0 ms 100.0 ms 20.0 ms 0.0 ms 64" in lines
    terms = lines.index("prefill cost waiting cached")
    assert lines[terms + 1 : terms + 3] == ["> p1 500.0 ms 100.0 ms 64", "p2 900.0 ms 300.0 ms 0"], "cheapest first"
    assert "and 7 workers more" in lines[terms + 3]
    assert "asked schedulers 300.0 ms 75%" in lines


def test_a_failed_attempt_and_the_next_one_are_apart() -> None:
    lost = report("worker_lost", detail="worker d1 left", token_interval_s=None)
    lines = text(decision(), lost, decision(attempt=1, avoided=("d1",)), report(attempt=1))
    assert "attempt 0: prefill on p1, decode on d1; ended by worker_lost (worker d1 left)" in lines
    assert "attempt 1: prefill on p1, decode on d1; ended by stop" in lines
    assert any("they had failed, refused or were full: d1." in " ".join(lines[n : n + 2]) for n in range(len(lines)))


@pytest.mark.parametrize("used_first", [True, False])
def test_of_two_placements_of_an_attempt_the_one_that_was_not_used_is_marked(used_first: bool) -> None:
    used, late = decision(reason="the one."), decision(scheduler="scheduler-2", reason="too late.", considered=())
    both = (used, late) if used_first else (late, used)
    said = " ".join(text(*both, report()))
    assert f"placed by the policy predicted: too late. {NOT_USED}" in said
    assert said.count(NOT_USED) == 1
    assert "prefill cost waiting cached" in said, "the terms are those of the placement that was used"
    assert NOT_USED not in " ".join(text(*both)), "it has not ended, so this is not known yet"
    (attempt,) = as_json(*both, report())
    unused = {each["scheduler"]: each["unused"] for each in attempt["decisions"]}
    assert unused == {"scheduler-1": False, "scheduler-2": True}


def test_of_two_placements_by_one_scheduler_the_prediction_tells_which_was_used() -> None:
    early = decision(reason="too early.", candidates=(Candidate(decode="d2", predicted_ttft_s=0.4),))
    said = " ".join(text(early, decision(reason="the one."), report()))
    assert f"too early. {NOT_USED}" in said
    assert said.count(NOT_USED) == 1


def test_what_is_missing_is_said() -> None:
    held = decision(Verdict.HELD, considered=(), candidates=())
    refused = decision(Verdict.REFUSED, error=ErrorReport(code="no_workers", detail="none is live"), candidates=())
    said = " ".join(text(held, refused))
    assert "it has not ended, or its gateway has" in said
    assert "held: requests before it are judged first" in said
    assert "refused, no_workers: none is live" in said
    said = " ".join(text(report("no_workers", prefill="", decode="", predicted=None, ttft_s=None), report(choice=1)))
    assert "choice 0, attempt 0: not placed; ended by no_workers" in said
    assert "Its decision is not kept" in said


def test_choices_come_in_their_order() -> None:
    said = text(*(report(choice=choice) for choice in (10, 2, 1)))
    assert [line.partition(",")[0] for line in said if "attempt" in line] == ["choice 1", "choice 2", "choice 10"]


def test_json_has_every_term_by_name() -> None:
    (attempt,) = as_json(decision(), report())
    (leg,) = attempt["decisions"][0]["considered"]
    assert leg["left_out"] == 7
    assert [row["worker"] for row in leg["workers"]] == ["p1", "p2"]
    assert leg["workers"][0]["waiting_s"] == pytest.approx(0.1)
    assert attempt["decisions"][0]["candidates"][0]["tail_s"] == 0.02
    assert attempt["report"]["end"] == "stop"


@given(st.text(max_size=3), st.binary(max_size=64), st.lists(st.text(max_size=3), max_size=4))
def test_values_that_do_not_fit_their_terms_are_malformed(term: str, values: bytes, workers: Sequence[str]) -> None:
    considered = Considered(leg="prefill", workers=tuple(workers), terms=(term,), values=values)
    try:
        rows = considered.rows()
    except MalformedMessage:
        assert len(values) != 4 * len(workers)
    else:
        assert [set(row) for row in rows] == [{term}] * len(workers)
        list(draw(Explanation(REQUEST, (decision(considered=(considered,)),), ())))


# ---------------------------------------------------------------- reading


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    network = MemoryNetwork(clock=ManualClock())
    bus = MemoryBus(network)
    await bus.keep(subjects.DECISIONS_STREAM, subjects.DECISIONS_ALL, Retention(age_s_max=7200.0, bytes_max=1 << 20))
    yield bus
    await bus.close()
    await network.close()


async def record(bus: Bus, *records: Decision | AttemptReport) -> None:
    for each in records:
        await bus.publish(subjects.decisions(each.request), each)


async def test_a_request_is_found_by_its_id_by_its_answers_and_by_its_clients(bus: Bus) -> None:
    await record(bus, decision(), decision(choice=1), report())
    await bus.publish(subjects.request_name("mine"), NamedRequest(request="older"))
    await bus.publish(subjects.request_name("mine"), NamedRequest(request=REQUEST))
    found = await look_up(bus, REQUEST)
    assert found == Explanation(REQUEST, (decision(), decision(choice=1)), (report(),))
    for name in (f"chatcmpl-{REQUEST}", f"cmpl-{REQUEST}", "mine"):
        assert await look_up(bus, name) == found


async def test_a_clients_name_never_hides_another_request(bus: Bus) -> None:
    await record(bus, decision())
    other = msgspec.structs.replace(decision(), request="other-0")
    await record(bus, other)
    await bus.publish(subjects.request_name(f"chatcmpl-{REQUEST}"), NamedRequest(request="other"))
    assert (await look_up(bus, f"chatcmpl-{REQUEST}")).decisions == (decision(),)


async def test_an_unknown_request_names_how_long_decisions_are_kept(bus: Bus) -> None:
    await bus.publish(subjects.request_name("gone"), NamedRequest(request="too-old"))
    for name in ("unknown", "gone"):
        with pytest.raises(InvalidRequest, match="kept for 2 h, and for less where they exceed 1 MB"):
            await look_up(bus, name)


async def test_without_a_stream_nothing_is_kept() -> None:
    bus = MemoryBus()
    with pytest.raises(Unavailable, match="no decisions are kept"):
        await look_up(bus, "any")
    await bus.close()


async def test_a_bounded_number_of_records_is_read(bus: Bus) -> None:
    for number in range(RECORDS_MAX + 1):
        await record(bus, decision(attempt=number, considered=()))
    # Records of another kind, as a newer version may publish, are passed over.
    found = await look_up(bus, REQUEST)
    assert (len(found.decisions), found.is_cut) == (RECORDS_MAX, True)
    await bus.publish(subjects.decisions("mixed"), GatewayBeat(gateway="g"))
    await record(bus, msgspec.structs.replace(decision(), request="mixed-0"))
    assert len((await look_up(bus, "mixed")).decisions) == 1


@given(st.text())
def test_any_id_is_a_subject_of_the_stream(name: str) -> None:
    for subject in (subjects.decisions(name), subjects.request_name(name)):
        check_subject(subject)
        assert matches(subjects.DECISIONS_ALL, subject)
        assert len(subject) < 64
    assert subjects.decisions(name) != subjects.request_name(name)
