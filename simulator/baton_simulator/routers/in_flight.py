"""Requests in flight at each worker, as a proxy counts them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from baton_simulator.routers.protocol import WorkerSpec


def decoding(workers: Sequence[WorkerSpec]) -> list[str]:
    """Return the names of the workers that generate tokens."""
    return [worker.name for worker in workers if worker.role != "prefill"]


def prefilling(workers: Sequence[WorkerSpec]) -> list[str]:
    """Return the names of the workers that only compute prompts; none in an aggregated deployment."""
    return [worker.name for worker in workers if worker.role == "prefill"]


class InFlight:
    """Requests in flight at each worker of one pool."""

    def __init__(self, workers: Iterable[str]) -> None:
        self.counts = dict.fromkeys(workers, 0)
        self._worker_of: dict[str, str] = {}

    def start(self, request: str, worker: str) -> None:
        self.counts[worker] += 1
        self._worker_of[request] = worker

    def end(self, request: str) -> str | None:
        """Forget the request and return its worker; None if it is not counted, or no longer."""
        if (worker := self._worker_of.pop(request, None)) is not None:
            self.counts[worker] -= 1
        return worker

    def least(self, among: Collection[str]) -> str:
        """Return the worker with the fewest requests, the first in the pool's order if several have."""
        return min((worker for worker in self.counts if worker in among), key=self.counts.__getitem__)
