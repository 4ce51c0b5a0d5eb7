"""The queue for slots, against a naive one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigurationError
from baton.pool.cells import CellTable
from baton.pool.slot_queue import SlotQueue, staging_slots

SLOTS = 8
Step = tuple[str, int]
STEPS = st.lists(st.tuples(st.sampled_from(["ask", "grant", "leave", "give back"]), st.integers(0, SLOTS)), max_size=60)


@given(STEPS)
def test_owners_get_all_they_need_in_order(steps: list[Step]) -> None:
    queue: SlotQueue[int] = SlotQueue(CellTable(0, spare=SLOTS))
    waiting: list[tuple[int, int]] = []
    held: dict[int, list[int]] = {}
    for owner, (step, number) in enumerate(steps):
        match step:
            case "ask":
                queue.ask(owner, number)
                waiting.append((owner, number))
            case "grant":
                free = SLOTS - sum(map(len, held.values()))
                granted = queue.grant()
                assert (granted is not None) == bool(waiting and waiting[0][1] <= free)
                if granted is not None:
                    assert (granted[0], len(granted[1])) == waiting.pop(0)
                    held[granted[0]] = granted[1]
            case "leave":
                assert queue.leave(number) == any(entry[0] == number for entry in waiting)
                waiting = [entry for entry in waiting if entry[0] != number]
            case _:
                if held:
                    queue.give_back(held.pop(sorted(held)[number % len(held)]))
        taken = [slot for slots in held.values() for slot in slots]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(SLOTS))
        assert queue.free == SLOTS - len(taken)


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="9 slots are needed, and there are 8"):
        SlotQueue[str](CellTable(0, spare=SLOTS)).ask("owner", 9)


def test_slots_hold_the_longest_context_or_the_whole_cache() -> None:
    assert staging_slots(0, 100, blocks=50, block_tokens=16) == 13
    assert staging_slots(0, 100, blocks=9, block_tokens=16) == 9
    assert staging_slots(1000, 100, blocks=50, block_tokens=16) == 50
    assert staging_slots(100, 100, blocks=50, block_tokens=16) == 7
    with pytest.raises(ConfigurationError, match="kv_staging_tokens=90 is less than the engine's longest context of 1"):
        staging_slots(90, 100, blocks=50, block_tokens=16)
