"""Routes of frames and digests: the running answers, by request and by worker."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from baton_gateway.attempt import AttemptMachine


class HasMachine(Protocol):
    machine: AttemptMachine


Driver = TypeVar("Driver", bound=HasMachine)


class Routes(Generic[Driver]):
    """Running answers, indexed so that each worker's digest, once a second, need not look at every answer."""

    def __init__(self) -> None:
        self._drivers: dict[str, Driver] = {}
        self._workers: dict[str, set[str]] = {}
        """All workers that were given a part of a request, by request."""
        self._requests: dict[str, dict[str, None]] = {}
        """Requests by worker, in order of arrival, so that they are placed again in that order."""

    def __len__(self) -> int:
        return len(self._drivers)

    def enter(self, request: str, driver: Driver) -> None:
        self._drivers[request] = driver
        self._workers[request] = set()

    def give(self, request: str, worker: str) -> None:
        """Note that a worker is given a part of an answer."""
        self._workers[request].add(worker)
        self._requests.setdefault(worker, {})[request] = None

    def leave(self, request: str) -> None:
        del self._drivers[request]
        for worker in self._workers.pop(request):
            del self._requests[worker][request]
            if not self._requests[worker]:
                del self._requests[worker]

    def get(self, request: str) -> Driver | None:
        return self._drivers.get(request)

    def all(self) -> list[Driver]:
        return list(self._drivers.values())

    def running_on(self, worker: str) -> list[tuple[str, Driver]]:
        """Return the answers whose present attempt was given to `worker`, each with its request."""
        given = ((request, self._drivers[request]) for request in self._requests.get(worker, ()))
        return [(request, driver) for request, driver in given if driver.machine.runs_on(worker)]
