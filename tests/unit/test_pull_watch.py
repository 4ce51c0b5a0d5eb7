"""Layer groups from what an agent reports of a pull."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.transfer import EventKind, PullWatch, RailShare, TransferEvent
from baton.transfer.pull_watch import GROUPS_MAX


def progress(layers: int, waiting_s: float, moving_s: float, moved_bytes: int) -> TransferEvent:
    return TransferEvent(
        kind=EventKind.PULL_PROGRESS,
        key=b"",
        layers=layers,
        waiting_s=waiting_s,
        moving_s=moving_s,
        bytes=moved_bytes,
        backend="shm",
    )


def test_each_group_has_its_own_share_of_time_and_bytes() -> None:
    watch = PullWatch(100.0, "host:1")
    watch.note(progress(2, waiting_s=0.5, moving_s=0.1, moved_bytes=20))
    watch.note(progress(3, waiting_s=0.7, moving_s=0.2, moved_bytes=30))
    watch.note(progress(3, waiting_s=0.7, moving_s=0.2, moved_bytes=30))
    first, second = watch.groups()
    assert (first.first_layer, first.layers, first.moved_bytes, first.backend, first.rail) == (
        0,
        2,
        20,
        "shm",
        "host:1",
    )
    assert (first.began_s, first.ended_s, first.waiting_s) == (100.0, pytest.approx(100.6), 0.5)
    assert (second.first_layer, second.layers, second.moved_bytes) == (2, 1, 10)
    assert (second.began_s, second.ended_s) == (first.ended_s, pytest.approx(100.9))
    assert second.waiting_s == pytest.approx(0.2)


def test_each_group_names_the_rails_that_carried_it() -> None:
    def share(rail: str, moved_bytes: int) -> RailShare:
        return RailShare(rail=rail, bytes=moved_bytes, chunks=1, retired=0, bytes_per_s=1.0)

    watch = PullWatch(0.0, "host:1")
    watch.note(replace(progress(1, 0.0, 0.1, 30), rails=(share("a", 10), share("b", 20))))
    watch.note(replace(progress(2, 0.0, 0.2, 50), rails=(share("a", 10), share("b", 40))))
    assert [group.rail for group in watch.groups()] == ["a: 10, b: 20", "b"]


@pytest.mark.parametrize("layers", [0, 1, 8, 9, 36, 126])
def test_the_number_of_groups_is_bounded_and_none_of_the_layers_is_lost(layers: int) -> None:
    watch = PullWatch(0.0, "host:1")
    for layer in range(1, layers + 1):
        watch.note(progress(layer, waiting_s=layer * 0.1, moving_s=0.0, moved_bytes=layer))
    groups = watch.groups()
    assert len(groups) <= GROUPS_MAX
    assert sum(group.layers for group in groups) == sum(group.moved_bytes for group in groups) == layers
    assert [group.first_layer for group in groups] == [sum(g.layers for g in groups[:n]) for n in range(len(groups))]


def test_a_pull_that_began_again_never_counts_fewer_than_no_bytes() -> None:
    watch = PullWatch(0.0, "host:1")
    watch.note(progress(1, waiting_s=0.1, moving_s=0.1, moved_bytes=50))
    watch.note(progress(2, waiting_s=0.2, moving_s=0.1, moved_bytes=20))
    assert [group.moved_bytes for group in watch.groups()] == [50, 0]
