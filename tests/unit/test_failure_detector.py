"""Pauses of this process, in which it could receive nothing, are measured completely and once."""

from __future__ import annotations

import pytest

from baton.node.failure_detector import RETURN_S, PauseDetector


def test_a_process_that_hears_all_the_time_has_no_pause() -> None:
    detector = PauseDetector(interval_s=0.1)
    assert [detector.local_pause_s(tenths / 10, connected=True) for tenths in range(50)] == [0.0] * 50


@pytest.mark.parametrize(("interval_s", "late_s", "paused"), [(0.1, 0.4, False), (0.1, 0.6, True), (2.0, 3.0, False)])
def test_a_pause_of_this_process_counts_once(interval_s: float, late_s: float, paused: bool) -> None:
    detector = PauseDetector(interval_s=interval_s)
    detector.local_pause_s(100.0, connected=True)
    assert detector.local_pause_s(100.0 + late_s, connected=True) == pytest.approx(late_s if paused else 0.0)
    assert detector.local_pause_s(100.0 + late_s + interval_s, connected=True) == 0.0


def test_the_time_without_the_bus_counts_whole_and_others_have_time_to_return() -> None:
    detector = PauseDetector(interval_s=0.1)
    now_s, paused_s = 0.0, 0.0
    for connected in [True] * 10 + [False] * 40 + [True] * 30:
        paused_s += detector.local_pause_s(now_s, connected=connected)
        now_s += 0.1
    assert paused_s == pytest.approx(4.0 + RETURN_S, abs=0.2)
