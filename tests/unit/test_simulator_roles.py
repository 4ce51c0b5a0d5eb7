"""Roles that change in a replay: the supervisor's decisions over the scheduler's own loads."""

from __future__ import annotations

from baton_scheduler.supervisor import SupervisorOptions
from baton_simulator.replay import Fleet

from baton.messages.workers import Role
from benchmarks.roles import goodput, play, shifting

QUICK = SupervisorOptions(dwell_s=2.0, rest_s=4.0, smoothing_s=2.0)
FLEET = Fleet(prefill=1, decode=3, link_bytes_per_s=50e9)


def test_workers_follow_the_load_and_nothing_is_lost() -> None:
    trace = shifting([("long prompts", 5.0, (8_000, 14_000), (32, 64))], phase_s=25.0)
    fixed, none = play(trace, FLEET, supervisor=None)
    changing, changes = play(trace, FLEET, supervisor=QUICK)
    assert not none
    assert [role for _, _, role in changes] == [Role.PREFILL]
    assert all(outcome.last_s is not None for outcome in changing)
    assert goodput(changing) > goodput(fixed) + 0.2
