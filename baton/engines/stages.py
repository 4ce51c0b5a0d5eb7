"""Stages of an attempt before its first token, from the instants that every engine knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from baton.engines.engine import Stage
from baton.transfer import LayerGroup

BACKEND: Final = "baton.transfer.backend"
"""Fact of a group of layers: the backend that moved it."""


def prompt_stages(
    *, entered_s: float, begun_s: float, ended_s: float, pulled: Sequence[LayerGroup] = ()
) -> tuple[Stage, ...]:
    """Return the stages of a prompt that arrived at `entered_s` and was done, or gave its first token, at `ended_s`.

    `begun_s`: start of its computation or of its pull. `pulled`: the pull's outcome over all ranks.
    """
    begun_s = max(entered_s, begun_s)
    queue = Stage(name="queue", began_s=entered_s, ended_s=begun_s)
    if not pulled:
        return queue, Stage(name="compute", began_s=begun_s, ended_s=ended_s)
    pulled_s = max(group.ended_s for group in pulled)
    transfer = Stage(
        name="transfer",
        began_s=begun_s,
        ended_s=pulled_s,
        facts={"baton.transfer.bytes": sum(group.moved_bytes for group in pulled)},
        parts=tuple(_group_stage(group) for group in pulled),
    )
    return queue, transfer, Stage(name="first token", began_s=pulled_s, ended_s=max(pulled_s, ended_s))


def _group_stage(group: LayerGroup) -> Stage:
    return Stage(
        name="layers",
        began_s=group.began_s,
        ended_s=group.ended_s,
        facts={
            "baton.transfer.first_layer": group.first_layer,
            "baton.transfer.layers": group.layers,
            "baton.transfer.bytes": group.moved_bytes,
            BACKEND: group.backend,
            "baton.transfer.rail": group.rail,
            "baton.transfer.waiting_s": group.waiting_s,
        },
    )
