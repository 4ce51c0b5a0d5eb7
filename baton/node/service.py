"""A service's process: one bootstrap and one lifecycle for all of them.

    start ──▶ serve ──first signal──▶ drain ──▶ stop        a second signal, or one before it serves: stop at once

`run` is the body of a service's `__main__`. It reads the settings, answers on the status port and calls `main`, which
joins the bus and serves; both contexts are left in the opposite order, whatever ends them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol, TypeVar

import uvloop

from baton import config
from baton.bus import Bus, Handler, NatsBus
from baton.errors import BatonError, ConfigurationError
from baton.node.ports import Ports, new_system_id, system_ports
from baton.node.settings import NodeSettings
from baton.stop import EXIT_FAILED, EXIT_MISCONFIGURED, Stop
from baton.telemetry import Metrics, Tracing, serve_status
from baton.telemetry.logs import configure_logs
from baton.telemetry.status import Scrape, Status

YOUNG_OBJECTS_MAX: Final = 20_000
"""New objects after which the garbage collector looks for cycles: its usual 700 cost a twentieth of a request."""

SettingsType = TypeVar("SettingsType", bound=NodeSettings)


class Service(Protocol):
    def serving(self) -> AbstractAsyncContextManager[None]:
        """Return a context: entering it starts the service, inside it serves, and leaving it ends all that it started.

        A failure of the service inside ends the context with that failure.
        """
        ...

    async def check_ready(self) -> None:
        """Raise Unavailable, with a sentence, unless the service can work now; callable before it has started."""
        ...

    async def drain(self) -> None:
        """Take no new work, and return once running work is finished, handed over, or out of time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Environment of a service: its ports, tracing and metrics."""

    ports: Ports
    tracing: Tracing
    metrics: Metrics


async def serve(service: Service, stop: Stop) -> None:
    """Run a service from start to drain; `stop` ends it."""
    async with service.serving():
        stop.serving = True
        await stop.asked.wait()
        await service.drain()


@asynccontextmanager
async def subscribed(bus: Bus, handlers: Mapping[str, Handler]) -> AsyncGenerator[None]:
    """Handle the messages on each subject inside this context; at its end, those that wait are handled first."""
    async with AsyncExitStack() as stack:
        for subject, handler in handlers.items():
            subscription = await bus.subscribe(subject, handler)
            stack.push_async_callback(subscription.unsubscribe)
        yield


class Process:
    """Access to the bus and the lifecycle, which `run` passes to a service's `main`."""

    def __init__(self, service: str, settings: NodeSettings, stop: Stop, metrics: Metrics, status: Status) -> None:
        self._service = service
        self._settings = settings
        self._stop = stop
        self._metrics = metrics
        self._status = status
        self.new_id = new_system_id

    @asynccontextmanager
    async def join(self, name: str, *, seed: int | None = None) -> AsyncGenerator[Node]:
        """Join the bus for this context; `name` identifies the process within its service. `seed`: see
        `system_ports`."""
        bus = await NatsBus.connect(self._settings.nats_url, name=name)
        tracing = Tracing(self._service, self._settings, instance=name)
        try:
            await tracing.answer(bus)
            self._metrics.read_bus(bus)
            yield Node(ports=system_ports(bus, seed=seed), tracing=tracing, metrics=self._metrics)
        finally:
            await bus.close()
            tracing.close()

    async def serve(self, service: Service, *, scrape: Scrape | None = None) -> None:
        """Serve until a signal, and report readiness on the status port, with metrics from `scrape` if given."""
        self._status.check_ready = service.check_ready
        self._status.scrape = scrape or self._status.scrape
        with rare_collections():
            await serve(service, self._stop)


@contextmanager
def rare_collections() -> Generator[None]:
    """Exempt what is loaded by now from garbage collection, which is rarer within this context.

    A full collection that visits all modules stops a service for 20 ms.
    """
    gc.collect()
    gc.freeze()
    usual = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS_MAX)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()  # At the end of the process, cycles that hold native objects must go.


def run(
    service: str, settings_type: type[SettingsType], main: Callable[[SettingsType, Process], Awaitable[None]]
) -> NoReturn:
    """Run a service's process and leave it.

    SIGTERM and SIGINT end it with status 0. An expected failure is one sentence on standard error, with status 2
    where a setting is to blame, else 1.
    """
    configure_logs()
    try:
        settings = config.load(settings_type, service=service)
        configure_logs(settings.log_level, settings.log_format)

        async def live(stop: Stop) -> None:
            metrics = Metrics(service)
            async with serve_status(settings, metrics, stop) as status:
                await main(settings, Process(service, settings, stop, metrics, status))

        uvloop.run(Stop().watch(live))
    except BatonError as error:
        sys.stderr.write(f"baton-{service}: {error}\n")
        raise SystemExit(EXIT_MISCONFIGURED if isinstance(error, ConfigurationError) else EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(0)
