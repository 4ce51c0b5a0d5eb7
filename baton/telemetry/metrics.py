"""The metrics of one process, in a registry of its own, for Prometheus to scrape.

Every metric is a row of `baton.telemetry.catalogue`. Histograms are observed when something ends. Counters and
gauges are read at scrape time from state that the service keeps anyway, as `Reading`s: no state is kept twice,
and nothing is done per token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from importlib.metadata import version
from typing import Final, cast

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from baton.bus import Bus
from baton.telemetry import catalogue
from baton.telemetry.catalogue import BUS_DROPPED, BUS_HANDLED, BUS_MALFORMED, Kind, Row

LAG_INTERVAL_S: Final = 0.25
OPENMETRICS: Final = "application/openmetrics-text"

# The library has no types for this one.
_openmetrics = cast("Callable[[CollectorRegistry], bytes]", openmetrics.generate_latest)  # pyright: ignore[reportUnknownMemberType]


@dataclass(frozen=True, slots=True)
class Reading:
    """One value of a counter or a gauge, with the values of the row's labels."""

    row: Row
    value: float
    labels: tuple[str, ...] = ()


Source = Callable[[], Iterable[Reading]]


def content_type(accept: str) -> str:
    """Return the content type of a scrape with this header `Accept`."""
    # Not the library's own choice, which fails on headers that it does not understand.
    return openmetrics.CONTENT_TYPE_LATEST if OPENMETRICS in accept else CONTENT_TYPE_PLAIN_0_0_4


class Metrics:
    """The metrics that one process exposes."""

    def __init__(self, service: str) -> None:
        self.ready = False
        """Whether the service could work at the last check; the checker sets it, and `draining`."""
        self.draining = False
        self._build = (service, version("baton"))
        self._sources: list[Source] = [self._own]
        # Series `_created` would double the stored data, and counters that restart at 0 say the same.
        disable_created_metrics()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_Readings(service, self._sources))
        self._histograms = {
            row: Histogram(row.name, row.help, row.labels, registry=self._registry, buckets=row.buckets)
            for row in catalogue.rows_of(service)
            if row.kind is Kind.HISTOGRAM
        }

        self._series: dict[tuple[str, tuple[str, ...]], Histogram] = {}
        """Histograms with their labels, as far as observed; the registry keeps each of them, too."""

    def read(self, source: Source) -> None:
        """Ask `source` for its readings at each scrape."""
        self._sources.append(source)

    def read_bus(self, bus: Bus) -> None:
        """Expose the state of the service's connection to the bus, and the messages that came over it."""

        def readings() -> Iterator[Reading]:
            yield Reading(catalogue.BUS_CONNECTED, bus.connected)
            yield Reading(catalogue.BUS_RECONNECTS, bus.reconnects)
            counts: dict[str, list[int]] = {}
            for each in bus.subscriptions:
                # The third part of a subject is a name, and names are many: baton.worker.NAME.task.
                kind = ".".join(part for number, part in enumerate(each.subject.split(".")) if number != 2)
                seen = astuple(each.counts)
                counts[kind] = [sum(pair) for pair in zip(counts.get(kind, (0, 0, 0)), seen, strict=True)]
            for kind, seen in counts.items():
                for row, count in zip((BUS_HANDLED, BUS_DROPPED, BUS_MALFORMED), seen, strict=True):
                    yield Reading(row, count, (kind,))

        self.read(readings)

    def observe(self, row: Row, value: float, *labels: str, trace: str = "") -> None:
        """Put a value into a histogram. `trace`, a traceparent, becomes its exemplar if the trace is sampled."""
        series = self._series.get((row.name, labels))
        if series is None:
            histogram = self._histograms[row]
            series = self._series[row.name, labels] = histogram.labels(*labels) if labels else histogram
        series.observe(value, {"trace_id": trace[3:35]} if trace.endswith("-01") else None)

    def render(self, accept: str) -> tuple[str, bytes]:
        """Return the content type and the text of a scrape; exemplars need a client that accepts OpenMetrics."""
        kind = content_type(accept)
        is_open = kind == openmetrics.CONTENT_TYPE_LATEST
        return kind, _openmetrics(self._registry) if is_open else generate_latest(self._registry)

    async def watch_loop(self) -> None:
        """Observe the event loop's lag, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self.observe(catalogue.EVENT_LOOP_LAG, max(0.0, loop.time() - due_s))

    def _own(self) -> Iterator[Reading]:
        yield Reading(catalogue.BUILD, 1, self._build)
        yield Reading(catalogue.READY, self.ready)
        yield Reading(catalogue.DRAINING, self.draining)


class _Readings(Collector):
    """Asks all sources at a scrape, and groups their readings by metric."""

    def __init__(self, service: str, sources: list[Source]) -> None:
        self._known = [row for row in catalogue.rows_of(service) if row.known]
        self._sources = sources

    def collect(self) -> Iterable[Metric]:
        values: dict[Row, dict[tuple[str, ...], float]] = {}
        for row in self._known:
            values[row] = {(value,): 0.0 for value in row.known}
        for reading in (reading for source in self._sources for reading in source()):
            row = reading.row
            values.setdefault(row, {})[reading.labels] = reading.value
        for row, series in values.items():
            kind = CounterMetricFamily if row.kind is Kind.COUNTER else GaugeMetricFamily
            family = kind(row.name, row.help, labels=row.labels)
            for labels, value in series.items():
                family.add_metric(labels, value)
            yield family
