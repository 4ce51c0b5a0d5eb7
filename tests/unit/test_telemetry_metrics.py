"""Metrics as a scrape shows them, and the catalogue against its table."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest

from baton import subjects
from baton.bus import Delivery, MemoryBus
from baton.messages.workers import GatewayBeat
from baton.telemetry import Metrics, Reading, catalogue
from docs.metrics_table import BEGIN, DOCUMENT, END, table
from tests.harness.limits import HANG_S

SAMPLED = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def scrape(metrics: Metrics, accept: str = "") -> list[str]:
    return metrics.render(accept)[1].decode().splitlines()


def test_the_document_has_the_table_of_the_catalogue() -> None:
    _, found, rest = DOCUMENT.read_text().partition(BEGIN)
    assert found, f"{DOCUMENT} has no table"
    written = rest.partition(END)[0]
    assert written == table(), "bring docs/metrics.md in line: python docs/metrics_table.py"


def test_names_say_their_unit_and_labels_are_few() -> None:
    rows = {row for service in catalogue.EVERYONE for row in catalogue.rows_of(service)}
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert re.fullmatch(r"(baton|gen_ai)_[a-z0-9_]+", row.name)
        assert row.name.endswith("_total") == (row.kind is catalogue.Kind.COUNTER)
        assert not row.known or len(row.labels) == 1
        assert len(row.labels) <= 4


def test_readings_are_asked_for_at_each_scrape() -> None:
    metrics, asked = Metrics("scheduler"), iter(range(1, 10))
    metrics.read(lambda: [Reading(catalogue.PLACING, next(asked))])
    assert "baton_placing 1.0" in scrape(metrics)
    assert "baton_placing 2.0" in scrape(metrics)


def test_what_can_happen_is_zero_before_it_does() -> None:
    """Prometheus sees no rise in a series that appears at 1."""
    metrics = Metrics("scheduler")
    assert 'baton_placements_total{result="overloaded"} 0.0' in scrape(metrics)
    metrics.read(lambda: [Reading(catalogue.PLACEMENTS, 3, ("overloaded",))])
    shown = scrape(metrics)
    assert 'baton_placements_total{result="overloaded"} 3.0' in shown
    assert 'baton_placements_total{result="aggregated"} 0.0' in shown


def test_two_sources_make_one_family() -> None:
    metrics = Metrics("scheduler")
    for role in ("prefill", "decode"):
        metrics.read(lambda role=role: [Reading(catalogue.WORKERS, 1, (role, "tiny"))])
    shown = scrape(metrics)
    assert sum(line.startswith("# TYPE baton_workers ") for line in shown) == 1
    assert sum(line.startswith("baton_workers{") for line in shown) == 2


@pytest.mark.parametrize(("trace", "expected"), [(SAMPLED, 1), (SAMPLED[:-2] + "00", 0), ("", 0)])
def test_only_traces_that_were_exported_are_pointed_to(trace: str, expected: int) -> None:
    metrics = Metrics("scheduler")
    metrics.observe(catalogue.PLACE_DURATION, 0.002, trace=trace)
    pointers = [line for line in scrape(metrics, OPENMETRICS) if f'trace_id="{SAMPLED[3:35]}"' in line]
    assert len(pointers) == expected
    assert not any("trace_id" in line for line in scrape(metrics)), "the older format has no place for it"


def test_a_metric_of_another_service_is_a_bug() -> None:
    with pytest.raises(KeyError):
        Metrics("kvindex").observe(catalogue.PLACE_DURATION, 1.0)


async def test_the_bus_is_shown_without_names_in_its_subjects() -> None:
    bus, metrics = MemoryBus(), Metrics("prefill")
    metrics.read_bus(bus)

    async def ignore(_: Delivery) -> None:
        pass

    try:
        for subject in (subjects.task("w0"), subjects.GATEWAY_BEAT):
            await bus.subscribe(subject, ignore)
        beats = await bus.subscribe(subjects.gateway("g"), ignore)
        for _ in range(3):
            await bus.publish(subjects.gateway("g"), GatewayBeat(gateway="g"))
        bus.publish_payload(subjects.gateway("g"), b"nonsense")
        async with asyncio.timeout(HANG_S):
            while not beats.counts.malformed:  # noqa: ASYNC110 - the last of them, and counted by the bus alone.
                await asyncio.sleep(0)
        shown = list(_bus_lines(metrics))
    finally:
        await bus.close()
    assert 'baton_bus_messages_total{subject="baton.gateway.frames"} 3.0' in shown
    assert 'baton_bus_malformed_messages_total{subject="baton.gateway.frames"} 1.0' in shown
    assert 'baton_bus_messages_total{subject="baton.worker.task"} 0.0' in shown
    assert "baton_bus_connected 1.0" in shown


def _bus_lines(metrics: Metrics) -> Iterator[str]:
    return (line for line in scrape(metrics) if line.startswith("baton_bus_"))
