"""The table of targets in `docs/gateway-speed.md`, from the committed results: `python -m benchmarks.gateway_targets`.

Each target names the benchmark that its figure comes from; one whose results are missing has no figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

import msgspec

from benchmarks.gateway import TOKENS
from benchmarks.gateway_page import BATON, FLOOR, OPEN_LOOP, PACED, PAGE, SATURATED, SHORT, digits
from benchmarks.report import RESULTS, Row

BEGIN: Final = "<!-- the targets: python -m benchmarks.gateway_targets -->\n"
END: Final = "<!-- end of the targets -->\n"
HANDED_OVER, PACED_BATON = "baton-handed-over", "baton-paced"
BACKENDS: Final = ("direct", "shm", "cma", "tcp")
MODES: Final = ("aggregated", "separated", "auto")
WHOLE_PATH: Final = "cpu_s all but the engines"


class Report(msgspec.Struct, frozen=True):
    """The part of a committed result that is read here."""

    commit: str
    rows: list[Row]


def read_report(benchmark: str) -> Report | None:
    """Return a benchmark's committed results; None: there are none."""
    file = RESULTS / f"{benchmark}.json"
    return msgspec.json.decode(file.read_bytes(), type=Report) if file.exists() else None


class Results:
    """Rows of the committed results, by benchmark and name."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Row]] = {}

    def value(self, benchmark: str, row: str, contender: str = "") -> float:
        """Return a figure, ours unless a contender is named. Raises LookupError where it was not measured."""
        if benchmark not in self._rows:
            report = read_report(benchmark)
            self._rows[benchmark] = {each.name: each for each in report.rows} if report else {}
        found = self._rows[benchmark][row]
        return found.peers[contender] if contender else found.ours

    def gateway(self, measure: str, figure: str, contender: str = BATON) -> float:
        """Return a figure of `make bench-gateway`."""
        return self.value("gateway", f"{measure}: {figure}", "" if contender == BATON else contender)

    def token_us(self, contender: str) -> float:
        """Return the gateway's processor time for each token of 64 paced streams after the first."""
        long, short = (self.gateway(measure, "cpu_s gateway", contender) for measure in (PACED, SATURATED))
        return (long - short) / (TOKENS - 1) * 1e3


@dataclass(frozen=True, slots=True)
class Target:
    text: str
    benchmark: str
    figure: Callable[[Results], float]
    unit: str
    at_most: float = inf
    at_least: float = -inf

    def is_met(self, value: float) -> bool:
        return self.at_least <= value <= self.at_most


def against(contender: str, measure: str, figure: str) -> Callable[[Results], float]:
    """Return the ratio of Baton's figure to a contender's."""
    return lambda results: results.gateway(measure, figure) / results.gateway(measure, figure, contender)


def with_engines_s(results: Results) -> float:
    return results.gateway(SATURATED, WHOLE_PATH) + results.gateway(SATURATED, "cpu_s workers")


TARGETS: Final = (
    Target(
        "gateway CPU per request, 32 clients ≤ 3 × the bare FastAPI stream",
        "gateway",
        against(FLOOR, SATURATED, "cpu_s gateway"),
        "×",
        at_most=3,
    ),
    Target(
        "gateway, scheduler, index and NATS ≤ 5 × it",
        "gateway",
        against(FLOOR, SATURATED, WHOLE_PATH),
        "×",
        at_most=5,
    ),
    Target(
        "all of it, engines included, ≤ ⅕ of LiteLLM",
        "gateway",
        lambda results: with_engines_s(results) / results.gateway(SATURATED, WHOLE_PATH, "litellm"),
        "×",
        at_most=0.2,
    ),
    Target(
        "gateway CPU per token, 64 paced streams ≤ 9 µs", "gateway", lambda r: r.token_us(PACED_BATON), "µs", at_most=9
    ),
    Target(
        "the same < vllm-router",
        "gateway",
        lambda results: results.token_us(PACED_BATON) / results.token_us("vllm-router"),
        "×",
        at_most=1,
    ),
    Target(
        "≥ 100,000 tokens/s of the gateway's core, saturated",
        "gateway_tokens",
        lambda results: results.value("gateway_tokens", "saturated: tokens per second of one core"),
        "tokens/s",
        at_least=100_000,
    ),
    Target(
        "one event per token, also where a frame has two (met from 0.97)",
        "gateway_tokens",
        lambda results: results.value("gateway_tokens", "saturated, 2 tokens per frame: events per token"),
        "",
        at_least=0.97,
    ),
    Target(
        "worker beside its engine ≤ 15 µs per token",
        "worker",
        lambda results: results.value("worker", "a step every 10 ms: worker beside its engine"),
        "µs",
        at_most=15,
    ),
    Target(
        "simulated engine alone ≤ 5 µs per token, 64 streams",
        "worker",
        lambda results: results.value("worker", "steps of no time: both", "engine alone"),
        "µs",
        at_most=5,
    ),
    Target(
        "added TTFT p50, 1 client, aggregated ≤ 3 ms",
        "gateway",
        lambda results: results.gateway(SHORT, "ttft_p50_s"),
        "ms",
        at_most=3,
    ),
    Target(
        "the same, handed over ≤ 4 ms",
        "gateway",
        lambda results: results.gateway(SHORT, "ttft_p50_s", HANDED_OVER),
        "ms",
        at_most=4,
    ),
    Target(
        "open loop at half the saturation rate: p99 ≤ 25 ms",
        "gateway",
        lambda results: results.gateway(OPEN_LOOP, "ttft_p99_s"),
        "ms",
        at_most=25,
    ),
    Target(
        "3,000 words, body to plan ≤ 2 × the tokenizer",
        "plans",
        lambda results: (
            results.value("plans", "3,000 words, first turn: processor time")
            / results.value("plans", "3,000 words, first turn: processor time", "tokenizer")
        ),
        "×",
        at_most=2,
    ),
    Target(
        "8,000 words: second turn ≤ ⅕ of the first",
        "plans",
        lambda results: (
            results.value("plans", "8,000 words, second turn: processor time")
            / results.value("plans", "8,000 words, first turn: processor time")
        ),
        "×",
        at_most=0.2,
    ),
    Target(
        "scheduler CPU per request, 64 workers ≤ 0.25 ms (the dearest mode)",
        "scheduler",
        lambda r: max(r.value("scheduler", f"64 workers, {mode}: a request, 8 at a time") for mode in MODES) / 1e3,
        "ms",
        at_most=0.25,
    ),
    Target(
        "KV posted ready → seen, p50 ≤ 0.2 ms (the slowest backend)",
        "transfer_wake",
        lambda r: max(r.value("transfer_wake", f"{each}: posted to seen, p50") for each in BACKENDS) / 1e3,
        "ms",
        at_most=0.2,
    ),
    Target(
        "the same, p99 ≤ 1 ms",
        "transfer_wake",
        lambda r: max(r.value("transfer_wake", f"{each}: posted to seen, p99") for each in BACKENDS) / 1e3,
        "ms",
        at_most=1,
    ),
    Target(
        "2,000 streams, a tenth unread: p99 token gap of the others unchanged (met up to 1.05 ×)",
        "streams",
        lambda results: (
            results.value("streams", "p99 of the time between tokens, a tenth unread")
            / results.value("streams", "p99 of the time between tokens, a tenth unread", "all_read")
        ),
        "×",
        at_most=1.05,
    ),
)


def table(results: Results, targets: tuple[Target, ...] = TARGETS) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| target | figure | | from |"
    yield "|---|---|---|---|"
    for target in targets:
        command = f"`make bench-{target.benchmark.replace('_', '-')}`"
        try:
            value = target.figure(results)
        except LookupError:
            yield f"| {target.text} | – | not measured | {command} |"
            continue
        is_met = target.is_met(value)
        # Rounded, a narrow miss may look like a figure that meets the bound.
        figure = digits(value) if target.is_met(float(digits(value))) == is_met else f"{value:.3g}"
        yield f"| {target.text} | {figure} {target.unit} | {'met' if is_met else '**missed**'} | {command} |"


def commits(benchmarks: set[str]) -> Mapping[str, str]:
    """Return the commit of each benchmark's results."""
    return {each: report.commit for each in sorted(benchmarks) if (report := read_report(each))}


def main() -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    said = ", ".join(f"{name} {commit}" for name, commit in commits({each.benchmark for each in TARGETS}).items())
    lines = [*table(Results()), "", f"Commits of the results: {said}."]
    PAGE.write_text(before + BEGIN + "".join(f"{line}\n" for line in lines) + END + after)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
