"""Timing of a pull, from its agent's events: when layers arrived, and how long nothing was ready."""

from __future__ import annotations

from typing import Final

import msgspec

from baton.transfer.protocol import TransferEvent

GROUPS_MAX: Final = 8
"""Most groups of one pull: with more layers, neighbouring ones are grouped."""


class LayerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbouring layers of one pull, from the previous group's arrival to their own. Instants are monotonic."""

    first_layer: int
    layers: int
    began_s: float
    ended_s: float
    waiting_s: float
    """Part of that time in which nothing was ready to move: prefill was computing, or the peers were connecting."""
    moved_bytes: int
    """Bytes that arrived in that time, including those of later layers."""
    backend: str
    rail: str
    """Name of the rail that carried them; if several, each with its bytes; if unknown, the source's endpoint."""


class PullWatch:
    """Takes the events of one pull, which began at `began_s`."""

    def __init__(self, began_s: float, rail: str) -> None:
        self._began_s = began_s
        self._rail = rail
        self._marks: list[TransferEvent] = []

    def note(self, event: TransferEvent) -> None:
        """Take a PULL_PROGRESS, or the PULL_DONE that ends it."""
        if event.layers > (self._marks[-1].layers if self._marks else 0):
            self._marks.append(event)

    def ended_s(self, last: TransferEvent) -> float:
        """Return the instant of the pull's last event: waiting and moving add up to the pull's whole time."""
        return self._began_s + last.waiting_s + last.moving_s

    def groups(self) -> tuple[LayerGroup, ...]:
        groups: list[LayerGroup] = []
        size = -(-len(self._marks) // GROUPS_MAX) or 1
        marks = self._marks[size - 1 :: size]
        if marks[-1:] != self._marks[-1:]:
            marks.append(self._marks[-1])
        layer, moved_bytes, waiting_s, at_s = 0, 0, 0.0, self._began_s
        carried: dict[str, int] = {}
        for mark in marks:
            ended_s = self.ended_s(mark)
            groups.append(
                LayerGroup(
                    first_layer=layer,
                    layers=mark.layers - layer,
                    began_s=at_s,
                    ended_s=ended_s,
                    waiting_s=mark.waiting_s - waiting_s,
                    # A pull that restarted counts its bytes from 0 again.
                    moved_bytes=max(0, mark.bytes - moved_bytes),
                    backend=mark.backend,
                    rail=_rails(mark, carried) or self._rail,
                )
            )
            layer, moved_bytes, waiting_s, at_s = mark.layers, mark.bytes, mark.waiting_s, ended_s
            carried = {share.rail: share.bytes for share in mark.rails}
        return tuple(groups)


def _rails(mark: TransferEvent, before: dict[str, int]) -> str:
    """Return which rails carried bytes that `before` does not have."""
    moved = {share.rail: share.bytes - before.get(share.rail, 0) for share in mark.rails}
    used = {rail: moved_bytes for rail, moved_bytes in moved.items() if moved_bytes}
    return next(iter(used)) if len(used) == 1 else ", ".join(f"{rail}: {size}" for rail, size in used.items())
