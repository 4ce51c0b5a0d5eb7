"""The stages of a prompt, from the instants that an engine knows."""

from __future__ import annotations

from baton.engines.stages import prompt_stages
from baton.transfer import LayerGroup


def group(first: int, began_s: float, ended_s: float, rail: str = "a:1") -> LayerGroup:
    return LayerGroup(
        first_layer=first,
        layers=2,
        began_s=began_s,
        ended_s=ended_s,
        waiting_s=0.1,
        moved_bytes=100,
        backend="tcp",
        rail=rail,
    )


def test_a_prompt_that_was_computed_waited_for_the_engine_and_then_for_itself() -> None:
    queue, compute = prompt_stages(entered_s=1.0, begun_s=1.5, ended_s=4.0)
    assert (queue.name, queue.began_s, queue.ended_s) == ("queue", 1.0, 1.5)
    assert (compute.name, compute.began_s, compute.ended_s) == ("compute", 1.5, 4.0)


def test_a_prompt_that_was_pulled_waited_for_all_ranks() -> None:
    pulled = [group(0, 1.5, 2.0), group(2, 2.0, 2.5), group(0, 1.6, 2.9, rail="b:1")]
    queue, transfer, first_token = prompt_stages(entered_s=1.0, begun_s=1.5, ended_s=3.5, pulled=pulled)
    assert (queue.ended_s, transfer.began_s, transfer.ended_s) == (1.5, 1.5, 2.9)
    assert (first_token.name, first_token.began_s, first_token.ended_s) == ("first token", 2.9, 3.5)
    assert transfer.facts == {"baton.transfer.bytes": 300}
    assert [part.facts["baton.transfer.rail"] for part in transfer.parts] == ["a:1", "a:1", "b:1"]


def test_instants_of_other_processes_never_make_a_time_negative() -> None:
    stages = prompt_stages(entered_s=2.0, begun_s=0.0, ended_s=3.0)
    stages += prompt_stages(entered_s=2.0, begun_s=2.1, ended_s=2.2, pulled=[group(0, 2.1, 2.5)])
    assert all(stage.began_s <= stage.ended_s for stage in stages)
