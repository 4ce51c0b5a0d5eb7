"""Indexes by model: block ids of different models have nothing in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from baton.messages.workers import Fingerprint
from baton_kvindex.index import Index, IndexSize, Run, Tier, check_ids


class Trees:
    def __init__(self, new_index: Callable[[], Index]) -> None:
        self._new_index = new_index
        self._indexes: dict[str, Index] = {}
        self._model_of: dict[str, str] = {}
        self._tiered: set[str] = set()
        """Models of which a worker has stored blocks beyond its device."""

    def assign(self, worker: str, model_digest: str) -> Index:
        """Return the index of the worker's model; its blocks of another model are dropped."""
        if self._model_of.get(worker, model_digest) != model_digest:
            self.drop(worker)
        self._model_of[worker] = model_digest
        index = self._indexes.get(model_digest)
        if index is None:
            index = self._indexes[model_digest] = self._new_index()
        return index

    def drop(self, worker: str) -> None:
        """Drop a worker's blocks, and its model's index with the last worker."""
        model_digest = self._model_of.pop(worker, None)
        if model_digest is None:
            return
        self._indexes[model_digest].clear(worker)
        if model_digest not in self._model_of.values():
            del self._indexes[model_digest]
            self._tiered.discard(model_digest)

    def load(self, worker: str, model_digest: str, runs: Sequence[Run]) -> None:
        """Replace all that a worker holds. Raises what `Index.load` does; it must then be called again."""
        index = self.assign(worker, model_digest)
        for tier in Tier:
            index.load(worker, [run for run in runs if run.tier is tier], tier)
        self.note_tiers(model_digest, runs)

    def note_tiers(self, model_digest: str, stored: Sequence[object]) -> None:
        """Note which tiers the runs among some events are on."""
        if any(isinstance(each, Run) and each.tier is not Tier.DEVICE for each in stored):
            self._tiered.add(model_digest)

    def dump(self, worker: str) -> list[Run]:
        """Return all that a worker holds, on every tier."""
        model_digest = self._model_of.get(worker)
        if model_digest is None:
            return []
        return [run for tier in Tier for run in self._indexes[model_digest].dump(worker, tier)]

    def fingerprint(self, worker: str, tier: Tier = Tier.DEVICE) -> Fingerprint:
        model_digest = self._model_of.get(worker)
        return Fingerprint() if model_digest is None else self._indexes[model_digest].fingerprint(worker, tier)

    def match(self, model_digest: str, blocks: bytes) -> dict[str, int]:
        """Return the leading blocks that each worker holds. Raises MalformedMessage for an invalid run."""
        check_ids(blocks)
        index = self._indexes.get(model_digest)
        return {} if index is None else index.match(blocks)

    def match_tiers(self, model_digest: str, blocks: bytes) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Return the leading blocks of each worker on each tier or a nearer one, where that is more than on the latter.

        Raises MalformedMessage for an invalid run.
        """
        # Without pools, the further answers cost nothing.
        if model_digest not in self._tiered:
            return self.match(model_digest, blocks), {}, {}
        check_ids(blocks)
        reaches = self._indexes[model_digest].match_tiers(blocks)
        held = {worker: device for worker, (device, _, _) in reaches.items() if device}
        pooled = {worker: pool for worker, (device, pool, _) in reaches.items() if pool > device}
        return held, pooled, {worker: file for worker, (_, pool, file) in reaches.items() if file > pool}

    def models(self) -> Mapping[str, Index]:
        """Return the indexes by model."""
        return self._indexes

    def sizes(self) -> dict[str, IndexSize]:
        return {model_digest: index.size() for model_digest, index in self._indexes.items()}
