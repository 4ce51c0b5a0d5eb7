"""The tables of `benchmarks.gateway`, in `docs/gateway-speed.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[1] / "docs" / "gateway-speed.md"
BEGIN: Final = "<!-- the tables: python -m benchmarks.gateway -->\n"
END: Final = "<!-- end of the tables -->\n"
BATON: Final = "baton"
FLOOR: Final = "fastapi"
CPU: Final = "cpu_s "
"""Prefix of the figures of processor time per answer, by role."""
GATEWAY: Final = CPU + "gateway"
OFF_PATH: Final = "workers"
SHORT, SATURATED, STREAMING, PACED = "1 client", "32 clients", "64 streams", "64 paced streams"

OPEN_LOOP: Final = "half the rate of 32 clients, open loop"
STEADY: Final = "100 requests/s"

Figures = dict[str, float]
Medians = Mapping[str, Mapping[str, Figures]]
"""Figures by contender and measure."""


def path_s(figures: Mapping[str, float]) -> float:
    """Return the processor time per answer of all processes but the engines."""
    return sum(value for name, value in figures.items() if name.startswith(CPU) and name != CPU + OFF_PATH)


def token_figures(measures: Mapping[str, Figures], tokens: int) -> Figures:
    """Return the processor time of each token after the first, by role: an answer's, less a one-token answer's."""
    long, short = measures[PACED], measures[SATURATED]
    return {name: (value - short[name]) / (tokens - 1) for name, value in long.items() if name.startswith(CPU)}


def digits(value: float | None) -> str:
    """Return two digits, and all before the decimal point."""
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"


def tables(medians: Medians, tokens: int) -> Iterator[str]:
    """Yield the lines of four tables."""
    yield from _requests(medians)
    yield from _tokens(medians, tokens)
    yield from _latencies(medians)
    yield from _prompts(medians)


def write_page(medians: Medians, tokens: int, notes: str) -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    lines = [*tables(medians, tokens), "", f"Run: {notes}."]
    PAGE.write_text(before + BEGIN + "".join(f"{line}\n" for line in lines) + END + after)


def _table(title: str, columns: Sequence[str], lines: Mapping[str, Iterable[str]]) -> Iterator[str]:
    yield f"\n**{title}**\n"
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, cells in lines.items():
        yield f"| {name} | {' | '.join(cells)} |"


def _roles(medians: Medians) -> list[str]:
    """Return the roles on Baton's path, the gateway first."""
    roles = [name.removeprefix(CPU) for name in medians[BATON][SATURATED] if name.startswith(CPU)]
    return sorted((role for role in roles if role != OFF_PATH), key=lambda role: (role != "gateway", role))


def _requests(medians: Medians) -> Iterator[str]:
    roles = _roles(medians)

    def against_floor(value: float, measure: str) -> str:
        floor = path_s(medians[FLOOR][measure]) if FLOOR in medians else 0.0
        return digits(value * 1e3) + (f" ({digits(value / floor)} ×)" if floor else "")

    def cells(measures: Mapping[str, Figures]) -> Iterator[str]:
        yield from (against_floor(measures[each][GATEWAY], each) for each in (SHORT, STEADY, SATURATED))
        yield from (against_floor(path_s(measures[each]), each) for each in (STEADY, SATURATED))
        shares = (measures[SATURATED].get(CPU + role) for role in (*roles[1:], OFF_PATH))
        yield from (digits(share and share * 1e3) for share in shares)
        yield digits(measures[SATURATED]["memory_bytes"] / 1e6)

    yield from _table(
        "Processor time per request of 100 words and 1 token, ms",
        (
            *(f"gateway, {each}" for each in (SHORT, STEADY, SATURATED)),
            *(f"whole path, {each}" for each in (STEADY, SATURATED)),
            *(*roles[1:], "engines", "memory of the path, MB"),
        ),
        {name: cells(measures) for name, measures in medians.items()},
    )


def _tokens(medians: Medians, tokens: int) -> Iterator[str]:
    def cells(measures: Mapping[str, Figures]) -> Iterator[str]:
        cost = token_figures(measures, tokens)
        for value in (cost[GATEWAY], path_s(cost), cost.get(CPU + OFF_PATH)):
            yield digits(value and value * 1e6)
        paced, unpaced = measures[PACED], measures[STREAMING]
        yield from (digits(paced[each]) for each in ("events_per_token", "reads_per_token"))
        yield digits(paced["gap_p99_s"] * 1e3)
        yield from (digits(each["tokens_per_s"]) for each in (paced, unpaced))
        yield digits(unpaced["events_per_token"])

    yield from _table(
        "Processor time per token of 64 streams, µs; of the last two columns the engines take no time",
        (
            *("gateway", "whole path", "engines", "events per token", "client's reads per token"),
            *("p99 of the time between reads, ms", "tokens/s", "tokens/s at most", "events per token then"),
        ),
        {name: cells(measures) for name, measures in medians.items()},
    )


def _latencies(medians: Medians) -> Iterator[str]:
    kinds = (SHORT, "1 client, delayed acknowledgements", "8 clients", SATURATED, OPEN_LOOP, STEADY)

    def cells(measures: Mapping[str, Figures]) -> Iterator[str]:
        for each in (measures[kind] for kind in kinds):
            yield f"{digits(each['ttft_p50_s'] * 1e3)} / {digits(each['ttft_p99_s'] * 1e3)}"
        yield digits(measures[SATURATED]["requests_per_s"])

    yield from _table(
        "Time to first token, 100 words, p50 / p99, ms",
        (*kinds, f"requests/s, {SATURATED}"),
        {name: cells(measures) for name, measures in medians.items()},
    )


def _prompts(medians: Medians) -> Iterator[str]:
    turns = [f"{words} words{turn}" for words in ("100", "3,000", "8,000") for turn in ("", ", second turn")]
    measured = [SHORT if turn == "100 words" else turn for turn in turns]

    def cells(measures: Mapping[str, Figures]) -> Iterator[str]:
        for each in (measures[turn] for turn in measured):
            yield " / ".join(digits(value * 1e3) for value in (each["ttft_p50_s"], each[GATEWAY], path_s(each)))

    yield from _table(
        "Prompts by length, 1 client: p50 of the time to first token / processor time of gateway / of whole path, ms",
        turns,
        {name: cells(measures) for name, measures in medians.items()},
    )
