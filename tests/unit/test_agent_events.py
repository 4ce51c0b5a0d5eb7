"""Events of agents around other agents, and the descriptor by which their callers wait."""

from __future__ import annotations

import select

from baton.pool.agent_events import AgentEvents
from baton.transfer import EventKind, TransferEvent


def is_readable(events: AgentEvents) -> bool:
    return bool(select.select([events.fileno()], [], [], 0)[0])


def test_it_is_readable_while_there_are_events() -> None:
    events = AgentEvents()
    assert not is_readable(events)
    event = TransferEvent(kind=EventKind.PULL_DONE, key=b"k")
    events.tell(event)
    assert is_readable(events)
    assert events.take() == [event]
    assert not is_readable(events)


def test_a_caller_waits_again_after_all_events_were_dropped() -> None:
    """Otherwise it would look for events without a pause."""
    events = AgentEvents()
    events.tell(TransferEvent(kind=EventKind.LEASE_STAGED, key=b"k"))
    events.forget_staged(b"k")
    assert events.take() == []
    assert not is_readable(events)


def test_only_that_a_lease_is_staged_is_forgotten() -> None:
    events = AgentEvents()
    told = [
        TransferEvent(kind=EventKind.LEASE_STAGED, key=b"other"),
        TransferEvent(kind=EventKind.LEASE_ENDED, key=b"k"),
    ]
    for event in told:
        events.tell(event)
    events.forget_staged(b"k")
    assert events.take() == told
