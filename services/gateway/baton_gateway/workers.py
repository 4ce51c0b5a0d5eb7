"""Who is alive: the gateway's table of workers, learned from heartbeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from baton.errors import ModelNotFound, NoWorkers
from baton.messages import Heartbeat, Role


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


class WorkerTable:
    """Pure: time is passed in. A worker that left by death or goodbye is forgotten, its model name is not."""

    def __init__(self, dead_after_s: float) -> None:
        self._dead_after_s = dead_after_s
        self._rows: dict[str, _Row] = {}
        self._generations: dict[str, int] = {}
        self._names: set[str] = set()

    def observe(self, heartbeat: Heartbeat, now_s: float) -> Gone | None:
        """Note a heartbeat; return the life that it replaces."""
        worker, generation = heartbeat.address.worker, heartbeat.address.generation
        known = self._generations.get(worker, -1)
        if generation < known:
            return None  # The last words of an earlier life, late.
        replaced = self._rows.get(worker)
        self._generations[worker] = generation
        self._names.add(heartbeat.model)
        self._rows[worker] = _Row(heartbeat, now_s)
        if replaced is None or known == generation:
            return None
        return Gone(worker, known, "was restarted")

    def leave(self, worker: str, generation: int) -> Gone | None:
        """Note a goodbye."""
        row = self._rows.get(worker)
        if row is None or row.heartbeat.address.generation != generation:
            return None
        del self._rows[worker]
        return Gone(worker, generation, "left")

    def excuse(self, deaf_s: float, now_s: float) -> None:
        """Take it that nobody could be heard for `deaf_s`."""
        for row in self._rows.values():
            row.seen_at_s = min(now_s, row.seen_at_s + deaf_s)

    def expire(self, now_s: float) -> list[Gone]:
        """Forget and return the workers that were silent for too long."""
        dead = [worker for worker, row in self._rows.items() if now_s - row.seen_at_s > self._dead_after_s]
        return [
            Gone(
                worker,
                self._rows.pop(worker).heartbeat.address.generation,
                f"sent no heartbeat for {self._dead_after_s:g} s",
            )
            for worker in dead
        ]

    def is_alive(self, worker: str) -> bool:
        return worker in self._rows

    def counts(self) -> Counter[tuple[str, str]]:
        """Return how many workers are alive, by role and model."""
        return Counter((row.heartbeat.role, row.heartbeat.model) for row in self._rows.values())

    def models(self) -> list[Model]:
        """Return the models that a live decode worker serves, by name."""
        names = sorted({row.heartbeat.model for row in self._serving()})
        return [self.model(name) for name in names]

    def model(self, name: str) -> Model:
        """Return the model of this name. Raises ModelNotFound, or NoWorkers where its workers are gone."""
        serving = [row.heartbeat for row in self._serving() if row.heartbeat.model == name]
        if not serving:
            if name in self._names:
                raise NoWorkers(f"no worker serves the model `{name}` at the moment", param="model", retry_after_s=1.0)
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

    def _serving(self) -> Iterable[_Row]:
        return (row for row in self._rows.values() if row.heartbeat.role is Role.DECODE and not row.heartbeat.draining)


def has_room(heartbeat: Heartbeat) -> bool:
    """Return whether this worker could take a further request."""
    return not heartbeat.draining and heartbeat.running + heartbeat.waiting < heartbeat.running_max
