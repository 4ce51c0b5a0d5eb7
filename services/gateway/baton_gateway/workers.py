"""Who is alive: the gateway's table of workers, learned from heartbeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from baton.errors import InvalidRequest, ModelNotFound
from baton.messages import PARAMETER_CHARACTERS_MAX, Heartbeat, Role

KNOWN_FOR_S: Final = 60.0
"""How long a worker that is gone, and the model that it served, stay known: it may be restarted."""


@dataclass(frozen=True, slots=True)
class Gone:
    """One life of a worker that has ended."""

    worker: str
    generation: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What the gateway must know to prepare a prompt."""

    name: str
    path: str
    digest: str
    block_tokens: int
    context_tokens_max: int


@dataclass(slots=True)
class _Row:
    heartbeat: Heartbeat
    seen_at_s: float
    alive: bool = True


class WorkerTable:
    """Pure: time is passed in. A worker that left by death or goodbye is remembered for a minute."""

    def __init__(self, dead_after_s: float) -> None:
        self._dead_after_s = dead_after_s
        self._rows: dict[str, _Row] = {}

    def observe(self, heartbeat: Heartbeat, now_s: float) -> Gone | None:
        """Note a heartbeat; return the life that it replaces."""
        worker, generation = heartbeat.address.worker, heartbeat.address.generation
        known = self._rows.get(worker)
        known_generation = -1 if known is None else known.heartbeat.address.generation
        if generation < known_generation:
            return None  # The last words of an earlier life, late.
        self._rows[worker] = _Row(heartbeat, now_s)
        if known is None or not known.alive or known_generation == generation:
            return None
        return Gone(worker, known_generation, "was restarted")

    def leave(self, worker: str, generation: int) -> Gone | None:
        """Note a goodbye."""
        row = self._rows.get(worker)
        if row is None or not row.alive or row.heartbeat.address.generation != generation:
            return None
        row.alive = False
        return Gone(worker, generation, "left")

    def excuse(self, deaf_s: float, now_s: float) -> None:
        """Take it that nobody could be heard for `deaf_s`."""
        for row in self._rows.values():
            row.seen_at_s = min(now_s, row.seen_at_s + deaf_s)

    def expire(self, now_s: float) -> list[Gone]:
        """Return the workers that were silent for too long, and forget those long gone."""
        gone: list[Gone] = []
        for worker, row in list(self._rows.items()):
            silent_s = now_s - row.seen_at_s
            if silent_s > KNOWN_FOR_S:
                del self._rows[worker]
            if row.alive and silent_s > self._dead_after_s:
                row.alive = False
                detail = f"sent no heartbeat for {self._dead_after_s:g} s"
                gone.append(Gone(worker, row.heartbeat.address.generation, detail))
        return gone

    def is_alive(self, worker: str) -> bool:
        row = self._rows.get(worker)
        return row is not None and row.alive

    def counts(self) -> Counter[tuple[str, str]]:
        """Return how many workers are alive, by role and model."""
        return Counter((row.heartbeat.role, row.heartbeat.model) for row in self._rows.values() if row.alive)

    def models(self) -> list[Model]:
        """Return the models that a live decode worker serves, by name."""
        names = sorted({row.heartbeat.model for row in self._serving()})
        return [self.model(name) for name in names]

    def model(self, name: str) -> Model:
        """Return the model of this name. Raises ModelNotFound where no worker had it within the last minute.

        Where all its workers are gone or leave, it is as they had it: a request for it waits until one is back.
        """
        serving = [row.heartbeat for row in self._serving() if row.heartbeat.model == name]
        serving = serving or [row.heartbeat for row in self._rows.values() if row.heartbeat.model == name]
        if not serving:
            raise ModelNotFound(f"the model `{name}` does not exist", param="model")
        # Workers of one name should agree; while a model is being replaced, the newest life decides.
        newest = max(serving, key=lambda heartbeat: (heartbeat.address.generation, heartbeat.address.worker))
        agreeing = [heartbeat for heartbeat in serving if heartbeat.model_digest == newest.model_digest]
        return Model(
            name=name,
            path=newest.model_path,
            digest=newest.model_digest,
            block_tokens=newest.block_tokens,
            context_tokens_max=min(heartbeat.context_tokens_max for heartbeat in agreeing),
        )

    def check_parameters(self, model: str, names: Iterable[str]) -> None:
        """Raise InvalidRequest, naming one of them, where no decode worker of the model takes all these parameters.

        Workers that are gone count for as long as they are known: they may be back before the request is placed.
        """
        wanted = set(names)
        decodes = (row.heartbeat for row in self._rows.values() if row.heartbeat.role is Role.DECODE)
        lacking = [sorted(wanted.difference(beat.parameters)) for beat in decodes if beat.model == model]
        if lacking and all(lacking):
            name = min(lacking, key=len)[0][:PARAMETER_CHARACTERS_MAX]
            raise InvalidRequest(f"no worker of the model `{model}` takes the parameter `{name}`", param=name)

    def _serving(self) -> Iterable[_Row]:
        return (
            row
            for row in self._rows.values()
            if row.alive and row.heartbeat.role is Role.DECODE and not row.heartbeat.draining
        )


def has_room(heartbeat: Heartbeat) -> bool:
    """Return whether this worker could take a further request."""
    return not heartbeat.draining and heartbeat.running + heartbeat.waiting < heartbeat.running_max
