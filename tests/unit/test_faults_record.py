"""The report of `python -m tests.faults`: which fault a wait is put down to, and what is counted."""

from __future__ import annotations

from random import Random

from tests.faults.record import UNDISTURBED, Fault, Stream, cause, report, summary, tabulate
from tests.faults.strikes import plan, process_name, victim_names

KILL = Fault(how="kill", victim="decode-1", at_s=4.0)
STOP = Fault(how="stop", victim="nats", at_s=8.0, lasts_s=2.0)
FAULTS = [KILL, STOP]


def test_a_wait_is_put_down_to_the_fault_in_it_else_to_the_last_before() -> None:
    assert cause(FAULTS, 1.0, 3.0) is None
    assert cause(FAULTS, 3.0, 9.0) is KILL
    assert cause(FAULTS, 5.0, 6.0) is KILL
    assert cause(FAULTS, 7.9, 8.1) is STOP
    assert cause(FAULTS, 20.0, 30.0) is STOP


def test_rows_have_the_longest_waits_and_what_failed() -> None:
    whole = Stream(name="whole", began_s=1.0, ended_s=5.1)
    failed = Stream(name="failed", began_s=7.0, error="503", ended_s=10.0)
    wrong = Stream(name="wrong", began_s=11.0, wrong=True, ended_s=11.3)
    for stream, events_s in ((whole, (1.5, 3.9, 5.0, 5.05)), (failed, (7.5,)), (wrong, (11.2, 11.25))):
        for event_s in events_s:
            stream.hear("x", event_s)
    assert (whole.text, whole.events, whole.gaps) == ("xxxx", 4, [(1.5, 3.9), (3.9, 5.0)])
    streams = [whole, failed, wrong]
    rows = tabulate(streams, FAULTS)
    assert rows.keys() == {"kill decode", "stop nats", UNDISTURBED}
    assert rows["kill decode"].gap_max_s == 5.0 - 3.9
    assert rows["kill decode"].first_max_s == 0.5
    assert (rows["stop nats"].faults, rows["stop nats"].failed, rows["stop nats"].wrong) == (1, 1, 1)
    assert rows[UNDISTURBED].gap_max_s == 3.9 - 1.5
    lines = list(report(streams, FAULTS))
    assert lines[-1] == summary(streams, FAULTS)
    assert "2 faults, 3 requests, 1 failed, 1 with wrong bytes, longest gap 2.40 s" in lines[-1]
    assert sum(line.startswith(("failed,", "wrong,")) for line in lines) == 2, "each by its name"


def test_a_seed_decides_victims_and_times_and_spares_the_gateway() -> None:
    def planned(seed: int) -> list[Fault]:
        return list(plan(victim_names(2, 3), Random(seed), every_s=4.0, until_s=600.0, stop_s_max=3.0))

    assert planned(1) == planned(1) != planned(2)
    assert {fault.victim for fault in planned(1)} == {
        *("nats", "redis", "kvindex", "scheduler"),
        *("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"),
    }
    assert {fault.how for fault in planned(1)} == {"kill", "stop"}
    assert all(0 < fault.lasts_s <= 3.0 for fault in planned(1) if fault.how == "stop")


def test_processes_are_known_by_their_command_lines() -> None:
    commands = {
        "nats": ["/venv/bin/nats-server", "--config", "/tmp/nats.conf"],
        # As it calls itself.
        "redis": ["/venv/bin/redis-server 127.0.0.1:21000", "", ""],
        "kvindex": ["/usr/bin/python3", "-m", "baton_kvindex", "--status-port", "1"],
        "decode-2": ["/usr/bin/python3", "-m", "baton_decode", "--worker", "decode-2"],
        "": ["/usr/bin/python3", "-m", "baton.cli", "up"],
    }
    assert {name: process_name(command) for name, command in commands.items()} == {name: name for name in commands}
