"""The rows of the replays' tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from baton_simulator.traffic.trace import Request, Trace

from benchmarks.replay import Point, merged
from benchmarks.replay_page import read_results, tables
from benchmarks.replay_speed import twice


def row(workers: int, load: float, policy: str, code: str) -> dict[str, Any]:
    point = Point("agents", workers, "aggregated", load, policy, 20.0)
    return {**asdict(point), "code": code}


def test_new_rows_replace_those_of_the_same_points_and_the_others_stay() -> None:
    old = [row(64, 0.9, "bound", "old"), row(8, 0.9, "sglang", "old"), row(8, 0.9, "baton", "old")]
    new = [row(8, 0.7, "baton", "new"), row(8, 0.9, "baton", "new")]
    found = [(each["workers"], each["load"], each["policy"], each["code"]) for each in merged(old, new)]
    assert found == [
        (8, 0.7, "baton", "new"),
        (8, 0.9, "baton", "new"),
        (8, 0.9, "sglang", "old"),
        (64, 0.9, "bound", "old"),
    ]


def test_rows_of_other_step_times_are_columns_of_their_own() -> None:
    mocker = next(each for each in read_results() if each["steps"] == "mocker" and each["policy"] == "baton")
    rough = {**mocker, "steps": "rough", "goodput": 0.123}
    rows = merged([rough], [mocker])
    assert [each["steps"] for each in rows] == ["mocker", "rough"]
    column = f"{mocker['trace']}, {mocker['workers']} {mocker['mode']}, {mocker['load']:.0%}"
    summary = [line for line in tables(rows, ["baton"]) if line.startswith(f"| {column}")]
    assert summary == [f"| {column} | **{mocker['goodput'] * 100:.0f}** |", f"| {column}, rough steps | **12** |"]
    assert [line.split("**")[1] for line in tables(rows, ["baton"]) if line.startswith("\n**")] == [
        "Goodput, %",
        column,
        f"{column}, rough steps",
    ]


def test_a_half_hour_twice_shares_nothing() -> None:
    first = [
        Request(0.0, (0, 1), 1200, 5, session="s"),
        Request(9.0, (0, 1, 2), 1700, 5, session="s", after=0, gap_s=3.0),
        Request(1799.0, (), 100, 5, session="t"),
    ]
    requests = twice(Trace("trace", 512, first)).requests
    assert list(requests[:3]) == first
    assert [(each.at_s, each.blocks, each.session, each.after, each.gap_s) for each in requests[3:]] == [
        (1800.0, (3, 4), "s/2", None, 0.0),
        (1809.0, (3, 4, 5), "s/2", 3, 3.0),
        (3599.0, (), "t/2", None, 0.0),
    ]
