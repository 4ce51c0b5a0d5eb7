"""The rows of the replays' tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.replay import Point, merged


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
