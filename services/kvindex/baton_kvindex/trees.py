"""Indexes by model: block ids of different models have nothing in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.messages.workers import Fingerprint
from baton_kvindex.index import Index, IndexSize, Run, check_ids


class Trees:
    def __init__(self, new_index: Callable[[], Index]) -> None:
        self._new_index = new_index
        self._indexes: dict[str, Index] = {}
        self._model_of: dict[str, str] = {}

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

    def dump(self, worker: str) -> list[Run]:
        model_digest = self._model_of.get(worker)
        return [] if model_digest is None else self._indexes[model_digest].dump(worker)

    def fingerprint(self, worker: str) -> Fingerprint:
        model_digest = self._model_of.get(worker)
        return Fingerprint() if model_digest is None else self._indexes[model_digest].fingerprint(worker)

    def match(self, model_digest: str, blocks: bytes) -> dict[str, int]:
        """Return the leading blocks that each worker holds. Raises MalformedMessage for an invalid run."""
        check_ids(blocks)
        index = self._indexes.get(model_digest)
        return {} if index is None else index.match(blocks)

    def models(self) -> Mapping[str, Index]:
        """Return the indexes by model."""
        return self._indexes

    def sizes(self) -> dict[str, IndexSize]:
        return {model_digest: index.size() for model_digest, index in self._indexes.items()}
