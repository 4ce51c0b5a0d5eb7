"""The pages of `benchmarks.replay`: `benchmarks/results/replay.json`, and the tables in `docs/replay.md`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from baton_simulator.policies import BOUND

from benchmarks.report import RESULTS

RESULT: Final = RESULTS / "replay.json"
PAGE: Final = Path(__file__).parents[1] / "docs" / "replay.md"
BEGIN: Final = "<!-- the tables: python -m benchmarks.replay -->\n"
END: Final = "<!-- end of the tables -->\n"
ABLATION_BEGIN: Final = "<!-- the ablation: python -m benchmarks.replay_ablation -->\n"
ABLATION_END: Final = "<!-- end of the ablation -->\n"


def read_results() -> list[dict[str, Any]]:
    """Return the committed rows."""
    return json.loads(RESULT.read_text())["rows"]


def write_results(facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows, one line each."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    RESULT.write_text(f'{json.dumps(facts)[:-1]}, "rows": [\n{lines}\n]}}\n')


def write_page(rows: Sequence[dict[str, Any]], policies: Sequence[str]) -> None:
    found = {row["policy"] for row in rows}
    replace_lines(PAGE, BEGIN, END, tables(rows, [each for each in policies if each in found]))


def write_ablation(rows: Sequence[dict[str, Any]]) -> None:
    replace_lines(PAGE, ABLATION_BEGIN, ABLATION_END, _ablation(rows))


def replace_lines(page: Path, begin: str, end: str, lines: Iterable[str]) -> None:
    """Write lines between two marks of a page."""
    before, rest = page.read_text().split(begin)
    _, after = rest.split(end)
    page.write_text(before + begin + "".join(f"{line}\n" for line in lines) + end + after)


def _ablation(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    whole, *others = rows
    columns = [column for column in whole if column != "without"]
    yield f"\n| goodput, % | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    yield f"| all terms | {' | '.join('{:.1f}'.format(whole[each]['goodput'] * 100) for each in columns)} |"
    for row in others:
        changes = (f"{(row[each]['goodput'] - whole[each]['goodput']) * 100:+.1f}" for each in columns)
        yield f"| without: {row['without']} | {' | '.join(changes)} |"


def tables(rows: Sequence[dict[str, Any]], policies: Sequence[str]) -> Iterator[str]:
    """Yield a table of goodput, then one per column of all figures."""
    columns: dict[tuple[str, int, str, float, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        column = (row["trace"], row["workers"], row["mode"], row["load"], row["steps"])
        columns.setdefault(column, {})[row["policy"]] = row
    yield "\n**Goodput, %**\n"
    yield f"| trace, workers, load | {' | '.join(policies)} |"
    yield "|---" * (len(policies) + 1) + "|"
    for key, column in columns.items():
        best = max(row["goodput"] for policy, row in column.items() if policy != BOUND)
        cells = [_goodput(column[each]["goodput"], best, each) if each in column else "" for each in policies]
        yield f"| {_name(*key)} | {' | '.join(cells)} |"
    for key, column in columns.items():
        first = next(iter(column.values()))
        yield (
            f"\n**{_name(*key)}**: {first['requests']} requests, {first['duration_s']:.0f} s. "
            f"Cached share with an infinite shared cache: {first['ideal_cached']:.3f}, "
            f"with one LRU as large as all workers': {first['pooled_cached']:.3f}\n"
        )
        figures = "good/s | cached | TTFT p50 | p90 | p99, s | TPOT p50 | p99, ms | max/mean | refused"
        yield f"| policy | {figures} | predicted/actual p10 p90 | code |"
        yield "|---" * 12 + "|"
        for policy, row in column.items():
            ratios = (row["predicted_p10"], row["predicted_p90"])
            predicted = " ".join(f"{each:.2f}" for each in ratios if each is not None)
            yield (
                f"| {policy} | {row['good_per_s']:.2f} | {row['cached_share']:.3f} | {row['ttft_p50_s']:.2f} | "
                f"{row['ttft_p90_s']:.2f} | {row['ttft_p99_s']:.2f} | {row['tpot_p50_ms']:.0f} | "
                f"{row['tpot_p99_ms']:.0f} | {row['imbalance']:.2f} | {row['refused'] / row['requests']:.1%} | "
                f"{predicted} | {row['code'][:8]} |"
            )


def _name(trace: str, workers: int, mode: str, load: float, steps: str) -> str:
    name = f"{trace}, {workers} {mode}, {load:.0%}"
    return name if steps == "mocker" else f"{name}, {steps} steps"


def _goodput(share: float, best: float, policy: str) -> str:
    text = f"{share * 100:.0f}"
    return f"**{text}**" if share == best and policy != BOUND else text
