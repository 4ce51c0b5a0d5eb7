"""What was decided about a request and what became of it, as text and as JSON. Pure."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from baton.cli.waterfall import format_time
from baton.messages.decisions import AttemptReport, Considered, Decision, Verdict
from baton.messages.placement import Candidate

COLUMNS: Final = 110
LEGEND: Final = (
    "cost = wait for room + queue of prompts + own prompt + delay of others + pressure on KV memory; of a pair: both "
    "workers' costs + tail of the pull. Cached: tokens of the prompt. `baton trace` shows the stages in the workers."
)
NOT_USED: Final = "Not used by the gateway: another placement came first, or the attempt had ended."
RANKED: Final = ("placement", "cost", "TTFT", "of it wait", "of it tail", "interval", "cached")
_PHASES: Final = {
    "read": "read and tokenised",
    "placing": "asked schedulers",
    "queued": "held by a scheduler",
    "dispatched": "sent to workers, until they accepted",
    "waiting": "waited for the first token",
    "streaming": "further tokens",
}
Row = Sequence[str]


@dataclass(frozen=True, slots=True)
class Explanation:
    """All records of one request, in the order of the stream."""

    request: str
    decisions: tuple[Decision, ...]
    reports: tuple[AttemptReport, ...]
    is_cut: bool = False
    """There are more records than were read."""

    @property
    def is_empty(self) -> bool:
        return not (self.decisions or self.reports)

    def attempts(self) -> list[Attempt]:
        """Return the attempts of all choices, in order."""
        found = defaultdict[tuple[str, int], list[Decision | AttemptReport]](list)
        for record in (*self.decisions, *self.reports):
            found[record.request, record.attempt].append(record)
        return [
            Attempt(
                *key,
                tuple(record for record in found[key] if isinstance(record, Decision)),
                next((record for record in found[key] if isinstance(record, AttemptReport)), None),
            )
            # Choices are numbered at the end of their ids: 10 comes after 9.
            for key in sorted(found, key=lambda key: (len(key[0]), key))
        ]


@dataclass(frozen=True, slots=True)
class Attempt:
    request: str
    attempt: int
    decisions: tuple[Decision, ...]
    report: AttemptReport | None
    """None: it has not ended, or its gateway did."""

    def unused(self) -> list[Decision]:
        """Return the placements that the gateway did not use: another one came first, or the attempt had ended."""
        if self.report is None:
            return []
        placed = [each for each in self.decisions if each.verdict is Verdict.PLACED]
        used = next((each for each in placed if _is_of(each, self.report)), None)
        return [each for each in placed if each is not used]


def _is_of(decision: Decision, report: AttemptReport) -> bool:
    """Return whether a decision is the one that the gateway used."""
    return decision.scheduler == report.scheduler and decision.candidates[:1] == (report.predicted,)


def describe(explanation: Explanation) -> dict[str, object]:
    """Return the content for JSON. Raises MalformedMessage."""
    return {
        "request": explanation.request,
        "is_cut": explanation.is_cut,
        "attempts": [
            {
                "request": each.request,
                "attempt": each.attempt,
                "decisions": [_describe(decision, each.unused()) for decision in each.decisions],
                "report": _plain(each.report) if each.report else None,
            }
            for each in explanation.attempts()
        ],
    }


def _describe(decision: Decision, unused: Sequence[Decision]) -> dict[str, object]:
    considered = [
        {
            "leg": each.leg,
            "workers": [{"worker": name, **terms} for name, terms in _by_cost(each)],
            "left_out": each.left_out,
        }
        for each in decision.considered
    ]
    return {**_plain(decision), "considered": considered, "unused": decision in unused}


def _plain(record: Decision | AttemptReport) -> dict[str, object]:
    """Return a record's fields, defaults included."""
    names = (name for name in record.__struct_fields__ if name != "considered")
    return {name: msgspec.to_builtins(getattr(record, name)) for name in names}


def _by_cost(considered: Considered) -> list[tuple[str, dict[str, float]]]:
    rows = zip(considered.workers, considered.rows(), strict=True)
    return sorted(rows, key=lambda row: row[1].get("cost_s", 0.0))


# ---------------------------------------------------------------- as text


def draw(explanation: Explanation) -> Iterator[str]:
    """Yield the text line by line. Raises MalformedMessage."""
    attempts = explanation.attempts()
    yield f"request {explanation.request}"
    choices = len({each.request for each in attempts})
    for each in attempts:
        yield ""
        yield from _attempt(each, choices)
    yield ""
    if explanation.is_cut:
        yield "There are further records, which are not shown."
    yield from textwrap.wrap(LEGEND, COLUMNS)


def _attempt(attempt: Attempt, choices: int) -> Iterator[str]:
    report = attempt.report
    choice = f"choice {attempt.request.rpartition('-')[2]}, " if choices > 1 else ""
    yield from _wrapped(f"{choice}attempt {attempt.attempt}: {_ended(report)}", "")
    unused = attempt.unused()
    for decision in attempt.decisions:
        note = f" {NOT_USED}" if decision in unused else ""
        yield from _wrapped(_decided(decision) + note, "  ")
    if not attempt.decisions:
        yield "  Its decision is not kept: it was dropped under load, or is too old."
    if report and report.positions:
        positions = ", ".join(f"{position} after {format_time(_ns(at_s))}" for at_s, position in report.positions)
        yield from _wrapped(f"Requests before it in the queue: {positions}.", "  ")
    shown = next((each for each in reversed(attempt.decisions) if each.considered and each not in unused), None)
    if report and report.predicted:
        yield ""
        yield from _table(("", "predicted", "actual"), _outcome(report, report.predicted))
    if shown:
        chosen = shown.candidates[0] if shown.candidates else None
        yield ""
        yield from _table(RANKED, _ranked(shown))
        for leg in shown.considered:
            yield ""
            yield from _leg(leg, chosen)
    if report:
        total_s = sum(seconds for _, seconds in report.spent) or 1.0
        rows = [
            (_PHASES.get(phase, phase), format_time(_ns(seconds)), f"{seconds / total_s:.0%}")
            for phase, seconds in report.spent
        ]
        yield ""
        yield from _table(("where the time went", "", ""), rows)


def _ended(report: AttemptReport | None) -> str:
    if report is None:
        return "it has not ended, or its gateway has"
    where = f"everything on {report.decode}" if report.decode else "not placed"
    if report.prefill:
        where = f"prefill on {report.prefill}, decode on {report.decode}"
    detail = f" ({report.detail})" if report.detail else ""
    return f"{where}; ended by {report.end}{detail}"


def _decided(decision: Decision) -> str:
    at = datetime.fromtimestamp(decision.at_s, UTC)
    text = f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03d} UTC, scheduler {decision.scheduler[:8]}: "
    match decision.verdict:
        case Verdict.PLACED:
            held = f"after {format_time(_ns(decision.held_s))} in its queue, " if decision.held_s else ""
            text += f"{held}placed by the policy {decision.policy}: {decision.reason}"
        case Verdict.HELD:
            best = decision.candidates[0] if decision.candidates else None
            why = "requests before it are judged first"
            if best:
                why = f"the best placement would wait {format_time(_ns(best.waiting_s))} for room: {decision.reason}"
            text += f"held: {why}"
        case Verdict.REFUSED:
            text += "refused" + (f", {decision.error.code}: {decision.error.detail}" if decision.error else "")
    if decision.avoided:
        more = f" and {decision.avoided_left_out} more" if decision.avoided_left_out else ""
        text += f" Left out, since they had failed, refused or were full: {', '.join(decision.avoided)}{more}."
    return text


def _outcome(report: AttemptReport, predicted: Candidate) -> Iterator[Row]:
    yield "time to first token", format_time(_ns(predicted.predicted_ttft_s)), _time(report.ttft_s)
    if predicted.ttft_bound_s:
        yield "its upper bound", format_time(_ns(predicted.ttft_bound_s)), ""
    interval_s = predicted.predicted_token_interval_s
    yield "time per output token", format_time(_ns(interval_s)), _time(report.token_interval_s)
    yield "cached tokens", str(predicted.cached_tokens), str(report.cached_tokens)
    if predicted.promoted_tokens or report.promoted_tokens:
        yield "of them promoted", str(predicted.promoted_tokens), str(report.promoted_tokens)
    if predicted.lender:
        yield f"borrowed from {predicted.lender}", str(predicted.borrowed_tokens), ""
    yield "output tokens", "", str(report.output_tokens)


def _ranked(decision: Decision) -> Iterator[Row]:
    for rank, each in enumerate(decision.candidates):
        yield (
            _marked(f"{each.prefill} → {each.decode}" if each.prefill else each.decode, is_chosen=rank == 0),
            format_time(_ns(each.cost_s)),
            format_time(_ns(each.predicted_ttft_s)),
            format_time(_ns(each.waiting_s)),
            format_time(_ns(each.tail_s)),
            format_time(_ns(each.predicted_token_interval_s)),
            str(each.cached_tokens),
        )


def _leg(considered: Considered, chosen: Candidate | None) -> Iterator[str]:
    names: set[str] = set()
    if chosen is not None and bool(chosen.prefill) == (considered.leg != "aggregated"):
        names = {chosen.prefill if considered.leg == "prefill" else chosen.decode}
    header = (considered.leg, *(term.removesuffix("_s").removesuffix("_tokens") for term in considered.terms))
    rows = [
        (
            _marked(name, is_chosen=name in names),
            *(format_time(_ns(value)) if term.endswith("_s") else f"{value:.0f}" for term, value in terms.items()),
        )
        for name, terms in _by_cost(considered)
    ]
    yield from _table(header, rows)
    if considered.left_out:
        yield f"    and {considered.left_out} workers more, each at a higher cost than those listed but the chosen one"


def _marked(name: str, *, is_chosen: bool) -> str:
    return f"{'>' if is_chosen else ' '} {name}"


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_time(_ns(seconds))


def _ns(seconds: float) -> float:
    return seconds * 1e9


def _wrapped(text: str, indent: str) -> Iterator[str]:
    yield from textwrap.wrap(text, COLUMNS, initial_indent=indent, subsequent_indent=indent + "  ")


def _table(header: Row, rows: Iterable[Row]) -> Iterator[str]:
    lines = [header, *rows]
    first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    for name, *cells in lines:
        cut = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        yield f"  {name:<{first}}  {cut}".rstrip()
