"""Plots of a replay as PNG, and one HTML page that holds them and the table."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

from baton.errors import ConfigurationError
from baton_simulator.goals import GOAL_TPOT_S, GOAL_TTFT_S
from baton_simulator.replay import Outcome
from baton_simulator.report import LOAD_WINDOW_S, Summary, is_good, table

Draw = Callable[[Any], None]
"""Draws onto matplotlib's axes, whose types are incomplete."""

STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; } th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; } img { max-width: 100%; margin-top: 1.5rem; }
"""


def require_plots() -> None:
    """Raise ConfigurationError unless plots can be drawn."""
    if find_spec("matplotlib") is None:
        raise ConfigurationError("--out draws plots with matplotlib, which is not installed: pip install matplotlib")


def write(
    folder: Path,
    title: str,
    outcomes: Mapping[str, Sequence[Outcome]],
    summaries: Mapping[str, Summary],
    result: str,
) -> None:
    """Write replay.json, the plots and replay.html."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "replay.json").write_text(result + "\n")
    ttfts = {policy: [each.ttft_s for each in served if each.ttft_s is not None] for policy, served in outcomes.items()}
    tpots = {policy: [each.tpot_s for each in served if each.tpot_s is not None] for policy, served in outcomes.items()}
    images = [folder / name for name in ("ttft.png", "tpot.png", "goodput.png")]
    _draw_shares(images[0], "time to first token, s", ttfts, GOAL_TTFT_S)
    _draw_shares(images[1], "time per output token, s", tpots, GOAL_TPOT_S)
    _draw_goodput(images[2], outcomes)
    (folder / "replay.html").write_text(_page(title, table(summaries), images))


def _draw_shares(path: Path, label: str, values: Mapping[str, Sequence[float]], goal: float) -> None:
    """Draw which share of the requests stayed below each time."""

    def draw(axes: Any) -> None:
        for policy, times in values.items():
            ordered = sorted(times)
            axes.step(ordered, [(n + 1) / len(ordered) for n in range(len(ordered))], label=policy, where="post")
        axes.axvline(goal, color="grey", linestyle=":")
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("share of served requests")

    _draw(path, draw)


def _draw_goodput(path: Path, outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    """Draw the share of good requests among those that arrived in each minute."""

    def draw(axes: Any) -> None:
        for policy, each in outcomes.items():
            minutes: dict[int, list[bool]] = {}
            for outcome in each:
                minutes.setdefault(int(outcome.arrived_s / LOAD_WINDOW_S), []).append(is_good(outcome))
            shares = [sum(minutes[minute]) / len(minutes[minute]) for minute in sorted(minutes)]
            axes.plot(sorted(minutes), shares, label=policy)
        axes.set_ylim(0, 1)
        axes.set_xlabel("minute of arrival")
        axes.set_ylabel("goodput")

    _draw(path, draw)


def _draw(path: Path, draw: Draw) -> None:
    # Imported here: it takes a second, and only plots need it.
    from matplotlib.figure import Figure

    figure = cast("Any", Figure)(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    draw(axes)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")  # Where there is most room takes long to find.
    figure.savefig(path, dpi=120)


def _page(title: str, rows: Sequence[Sequence[str]], images: Sequence[Path]) -> str:
    heading, *body = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    lines = "\n".join(f"<tr>{row}</tr>" for row in body)
    pictures = "\n".join(
        f'<img alt="{image.stem}" src="data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}">'
        for image in images
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style></head>
<body><h1>{escape(title)}</h1>
<table><thead><tr>{heading.replace("td>", "th>")}</tr></thead>
<tbody>
{lines}
</tbody></table>
{pictures}
</body></html>
"""
