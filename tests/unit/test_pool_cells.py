"""Cells that slots and staged hand-offs share, against a naive model that copies contents."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.pool.cells import CellTable

SLOTS, SPARE = 4, 3
Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "drop", "write", "share"]), st.integers(0, SLOTS - 1), st.integers(0, SPARE)),
    max_size=80,
)


@given(STEPS)
def test_neither_a_slot_nor_a_hand_off_ever_sees_what_was_written_for_another(steps: list[Step]) -> None:
    cells = CellTable(SLOTS, spare=SPARE)
    memory: dict[int, int] = {}
    slots: dict[int, int] = {}
    """Expected content by slot."""
    hand_offs: list[tuple[list[int], int]] = []
    """Cells and expected content."""
    for content, (step, slot, number) in enumerate(steps):
        match step:
            case "take" if number <= SPARE - sum(len(taken) for taken, _ in hand_offs):
                taken = cells.take(number)
                memory |= dict.fromkeys(taken, content)
                hand_offs.append((taken, content))
            case "drop" if hand_offs:
                cells.drop(hand_offs.pop(number % len(hand_offs))[0])
            case "write":
                (cell,) = cells.renew((slot,))
                memory[cell] = slots[slot] = content
            case "share" if hand_offs and hand_offs[number % len(hand_offs)][0]:
                taken, there = hand_offs[number % len(hand_offs)]
                cells.share(slot, taken[content % len(taken)])
                slots[slot] = there
            case _:
                pass
        assert all(memory[cell] == there for taken, there in hand_offs for cell in taken)
        assert all(memory[cells.of((slot,))[0]] == there for slot, there in slots.items())


def test_slots_are_in_cells_of_their_own_number_until_something_is_shared() -> None:
    cells = CellTable(SLOTS)
    assert cells.renew(range(SLOTS)) == cells.of(range(SLOTS)) == tuple(range(SLOTS))
