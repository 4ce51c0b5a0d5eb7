"""The tables of `benchmarks.gateway`, in `docs/gateway-speed.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[1] / "docs" / "gateway-speed.md"
BEGIN: Final = "<!-- the tables: python -m benchmarks.gateway -->\n"
END: Final = "<!-- end of the tables -->\n"
BATON: Final = "baton"
FLOOR: Final = "fastapi"
CPU: Final = "cpu_s "
"""Prefix of the figures of processor time per answer, by role."""
OFF_PATH: Final = "workers"
SHORT, SATURATED, STREAMING, PACED = "1 client", "32 clients", "64 streams", "64 paced streams"

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


def tables(medians: Medians, tokens: int) -> Iterator[str]:
    yield from _cpu_table(medians, tokens)
    yield from _latency_table(medians)
    yield from _prompt_table(medians)


def write_page(medians: Medians, tokens: int, notes: str) -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    lines = [*tables(medians, tokens), "", f"Run: {notes}."]
    PAGE.write_text(before + BEGIN + "".join(f"{line}\n" for line in lines) + END + after)


def _table(title: str, *columns: str) -> Iterator[str]:
    yield f"\n**{title}**\n"
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"


def _line(name: str, *cells: str) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _times(value: float, floor: float | None) -> str:
    return f" ({value / floor:.1f}×)" if floor else ""


def _cpu_table(medians: Medians, tokens: int) -> Iterator[str]:
    roles = [
        name.removeprefix(CPU)
        for name in medians[BATON][SATURATED]
        if name.startswith(CPU) and name not in (CPU + "gateway", CPU + OFF_PATH)
    ]
    yield from _table(
        "Processor time: per request of 100 words and 1 token (ms), per streamed token of 64 paced streams (µs)",
        *("gateway, 1 client", "gateway, 32 clients", *roles, "whole path, 32 clients"),
        *("engines", "token: gateway", "token: whole path", "token: engines", "memory, MB"),
    )
    floor = medians.get(FLOOR)
    floor_s = {each: floor[each][CPU + "gateway"] if floor else None for each in (SHORT, SATURATED)}
    for name, measures in medians.items():
        one, many = measures[SHORT], measures[SATURATED]
        per_token = token_figures(measures, tokens)
        cells = [
            f"{each[CPU + 'gateway'] * 1e3:.3g}{_times(each[CPU + 'gateway'], floor_s[kind])}"
            for kind, each in ((SHORT, one), (SATURATED, many))
        ]
        cells += [f"{many[CPU + role] * 1e3:.2g}" if CPU + role in many else "–" for role in roles]
        cells.append(f"{path_s(many) * 1e3:.3g}{_times(path_s(many), floor_s[SATURATED])}")
        cells.append(f"{many[CPU + OFF_PATH] * 1e3:.2g}" if CPU + OFF_PATH in many else "–")
        cells += [f"{per_token[CPU + 'gateway'] * 1e6:.1f}", f"{path_s(per_token) * 1e6:.1f}"]
        cells.append(f"{per_token[CPU + OFF_PATH] * 1e6:.1f}" if CPU + OFF_PATH in per_token else "–")
        yield _line(name, *cells, f"{measures[PACED]['memory_bytes'] / 1e6:.0f}")


def _latency_table(medians: Medians) -> Iterator[str]:
    kinds = (SHORT, "1 client, delayed acknowledgements", "8 clients", SATURATED)
    yield from _table(
        "Time to first token of 100 words, p50 / p99 (ms); answers and tokens per second",
        *kinds,
        *(
            "requests/s, 32 clients",
            "tokens/s, 64 streams",
            "events per token",
            "events per token, paced",
            "reads per token, paced",
            "p99 token gap, paced, ms",
        ),
    )
    for name, measures in medians.items():
        cells = [
            f"{measures[each]['ttft_p50_s'] * 1e3:.2g} / {measures[each]['ttft_p99_s'] * 1e3:.2g}" for each in kinds
        ]
        streams, paced = measures[STREAMING], measures[PACED]
        cells += [f"{measures[SATURATED]['requests_per_s']:.0f}", f"{streams['tokens_per_s']:.0f}"]
        cells += [f"{each['events_per_token']:.2f}" for each in (streams, paced)]
        cells += [f"{paced['reads_per_token']:.2f}", f"{paced['gap_p99_s'] * 1e3:.2g}"]
        yield _line(name, *cells)


def _prompt_table(medians: Medians) -> Iterator[str]:
    turns = [f"{words} words{turn}" for words in ("3,000", "8,000") for turn in ("", ", second turn")]
    yield from _table(
        "Long prompts, 1 client: time to first token p50 (ms) / processor time of gateway, of whole path (ms)", *turns
    )
    for name, measures in medians.items():
        yield _line(
            name,
            *(
                f"{each['ttft_p50_s'] * 1e3:.2g} / {each[CPU + 'gateway'] * 1e3:.2g}, {path_s(each) * 1e3:.2g}"
                for each in (measures[turn] for turn in turns)
            ),
        )
