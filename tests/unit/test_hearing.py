"""Silence while this process could hear nobody says nothing about others."""

from __future__ import annotations

import pytest

from baton.hearing import RETURN_S, Hearing


def test_who_hears_has_nothing_to_excuse() -> None:
    hearing = Hearing(interval_s=0.1)
    assert [hearing.deaf_s(tenths / 10, connected=True) for tenths in range(50)] == [0.0] * 50


@pytest.mark.parametrize(("interval_s", "late_s", "deaf"), [(0.1, 0.4, False), (0.1, 0.6, True), (2.0, 3.0, False)])
def test_a_pause_of_this_process_counts_once(interval_s: float, late_s: float, deaf: bool) -> None:
    hearing = Hearing(interval_s=interval_s)
    hearing.deaf_s(100.0, connected=True)
    assert hearing.deaf_s(100.0 + late_s, connected=True) == pytest.approx(late_s if deaf else 0.0)
    assert hearing.deaf_s(100.0 + late_s + interval_s, connected=True) == 0.0


def test_the_time_without_the_bus_counts_whole_and_others_have_time_to_return() -> None:
    hearing = Hearing(interval_s=0.1)
    now_s, deaf_s = 0.0, 0.0
    for connected in [True] * 10 + [False] * 40 + [True] * 30:
        deaf_s += hearing.deaf_s(now_s, connected=connected)
        now_s += 0.1
    assert deaf_s == pytest.approx(4.0 + RETURN_S, abs=0.2)
