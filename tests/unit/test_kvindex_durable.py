"""Pending writes: coalesced, bounded, and never partial."""

from __future__ import annotations

import hashlib

from baton_kvindex.durable import WORKERS_MAX, Batch, Journal, WorkerChange, WorkerState, runs_of
from baton_kvindex.index import Run, link
from hypothesis import given
from hypothesis import strategies as st

STATE = WorkerState(generation=1, model_digest="digest", sequence=7)


def block(path: str) -> bytes:
    return hashlib.blake2b(path.encode(), digest_size=16).digest() if path else b""


def take(journal: Journal, held: list[Run] | None = None) -> Batch:
    return journal.take(5, lambda worker: STATE, lambda worker: held or [])


def change_of(batch: Batch, worker: str = "w") -> WorkerChange:
    change = batch.workers[worker]
    assert change is not None
    return change


def test_changes_of_a_block_overwrite_each_other() -> None:
    journal = Journal(blocks_max=100)
    assert not journal
    journal.store("w", b"", block("a") + block("ab"))
    journal.remove("w", block("ab") + block("x"))
    assert journal
    change = change_of(take(journal))
    assert change.runs is None
    assert change.stored == {block("a"): b""}
    assert set(change.removed) == {block("ab"), block("x")}
    assert change.state == STATE
    assert not journal


def test_too_many_changes_turn_into_one_rewrite() -> None:
    journal = Journal(blocks_max=10)
    held = [Run(parent=b"", blocks=block("a"))]
    for number in range(11):
        journal.store("w", b"", block(f"{number}"))
    change = change_of(take(journal, held))
    assert change.runs == held
    assert not change.stored


def test_a_batch_that_was_given_back_is_rewritten_whole_with_what_came_since() -> None:
    journal = Journal(blocks_max=100)
    journal.store("w", b"", block("a"))
    batch = take(journal)
    journal.store("v", b"", block("v"))
    journal.store("w", block("a"), block("ab"))
    journal.give_back(batch)
    held = [Run(parent=b"", blocks=block("a") + block("ab"))]
    second = take(journal, held)
    assert change_of(second).runs == held
    assert change_of(second, "v").runs is None


def test_a_worker_that_left_is_deleted() -> None:
    journal = Journal(blocks_max=100)
    journal.store("w", b"", block("a"))
    journal.rewrite("w")
    batch = journal.take(5, lambda worker: None, lambda worker: [])
    assert batch.workers == {"w": None}
    assert batch.stream_sequence == 5


@given(paths=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=12), gone=st.sets(st.integers(0, 40)))
def test_runs_hold_every_block_once_with_its_parent(paths: list[str], gone: set[int]) -> None:
    parents = {block(path[:end]): block(path[: end - 1]) for path in paths for end in range(1, len(path) + 1)}
    parents = {each: parent for number, (each, parent) in enumerate(parents.items()) if number not in gone}
    pairs = [pair for run in runs_of(parents) for pair in link(run.parent, run.blocks)]
    assert dict(pairs) == parents
    assert len(pairs) == len(parents)


def test_an_unbranched_prompt_is_one_run() -> None:
    path = "abcdefgh"
    parents = {block(path[:end]): block(path[: end - 1]) for end in range(len(path), 0, -1)}
    assert len(runs_of(parents)) == 1


def states(sequence: int, generation: int = 1) -> dict[str, WorkerState]:
    return {"w": WorkerState(generation=generation, model_digest="digest", sequence=sequence)}


def follow(journal: Journal, *events: int) -> None:
    """Note events of a worker, each of which stores a block of its number."""
    for event in events:
        journal.touch("w", event - 1)
        journal.store("w", b"", block(f"{event}"))


def test_who_goes_on_for_another_writes_what_that_one_lacks() -> None:
    journal = Journal(blocks_max=100)
    follow(journal, 1, 2, 3)
    journal.rotate()
    follow(journal, 4, 5)
    journal.go_on(states(3), states(5))
    change = change_of(take(journal))
    assert (change.runs, change.stored.keys()) == (None, {block("4"), block("5")})


def test_changes_are_known_for_one_rotation_and_before_it_all_is_written() -> None:
    held = [Run(parent=b"", blocks=block("a"))]
    for written, whole in ((2, False), (1, True)):
        journal = Journal(blocks_max=100)
        follow(journal, 1, 2)
        journal.rotate()
        follow(journal, 3, 4)
        journal.rotate()
        follow(journal, 5)
        journal.go_on(states(written), states(5))
        change = change_of(take(journal, held))
        assert (change.runs == held, set(change.stored)) == (whole, set() if whole else set(map(block, "345")))


def test_changes_that_were_dropped_are_not_left_out_of_what_is_written() -> None:
    held = [Run(parent=b"", blocks=block("a"))]
    journal = Journal(blocks_max=100)
    follow(journal, 1, 2)
    journal.rotate()
    follow(journal, 3)
    for number in range(WORKERS_MAX):
        journal.touch(f"other {number}", 0)
    follow(journal, 4)
    journal.go_on(states(1), states(4))
    assert change_of(take(journal, held)).runs == held


def test_what_is_written_already_does_not_wait_and_another_generation_is_written_whole() -> None:
    journal = Journal(blocks_max=100)
    follow(journal, 1, 2)
    journal.go_on(states(2), states(2))
    assert not journal
    follow(journal, 3)
    journal.go_on(states(2, generation=0), states(3))
    assert change_of(take(journal)).runs is not None
    journal.go_on({}, states(3))
    assert change_of(take(journal)).runs is not None
    journal.go_on(states(3) | {"gone": STATE}, states(3))
    assert journal.take(5, lambda worker: None, lambda worker: []).workers == {"gone": None}
