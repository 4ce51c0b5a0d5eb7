"""The export of spans to a collector that works, is absent, or hangs."""

from __future__ import annotations

import logging
import time

import pytest

from baton.cli.servers import free_port
from baton.errors import ConfigurationError
from baton.telemetry import TelemetrySettings, Tracing
from baton.telemetry import export as export_module
from baton.telemetry.export import QUEUE_SPANS_MAX
from baton.telemetry.settings import traces_url
from tests.harness.limits import HANG_S
from tests.harness.telemetry import running_collector


@pytest.fixture(autouse=True)
def quiet_opentelemetry() -> object:
    """The exporter silences OpenTelemetry's own logger; other tests want it as it was."""
    logger = logging.getLogger("opentelemetry")
    level = logger.level
    yield
    logger.setLevel(level)


def test_spans_arrive_with_everything_they_have() -> None:
    with running_collector() as collector:
        tracing = Tracing("gateway", TelemetrySettings(otlp_endpoint=collector.url), instance="gw-1")
        with tracing.span("chat", {"gen_ai.response.finish_reasons": ("stop", "length"), "tokens": 3}) as root:
            failed = tracing.start("attempt", parent=root.trace)
            failed.fail(ConfigurationError("no good"))
            failed.end()
            tracing.start("attempt", parent=root.trace, links=[failed.trace]).end()
        tracing.close()
        spans = collector.wait_for(lambda spans: len(spans) == 3)
    (chat,) = [span for span in spans if span.name == "chat"]
    first, second = [span for span in spans if span.name == "attempt"]
    assert chat.attributes == {"gen_ai.response.finish_reasons": ["stop", "length"], "tokens": 3}
    assert chat.service == "baton-gateway"
    assert chat.end_ns > chat.start_ns > 0
    assert {first.parent, second.parent} == {chat.span}
    assert (first.error, second.links) == ("no good", (first.span,))


def test_a_collector_that_is_down_is_logged_once_and_found_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "PAUSE_S", 0.2)
    monkeypatch.setattr(export_module, "EXPORT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(export_module, "BATCH_INTERVAL_MS", 50.0)
    monkeypatch.setattr(export_module, "QUEUE_SPANS_MAX", 64)
    monkeypatch.setattr(export_module, "BATCH_SPANS_MAX", 16)
    caplog.set_level(logging.DEBUG)
    port = free_port()
    tracing = Tracing("gateway", TelemetrySettings(otlp_endpoint=f"http://127.0.0.1:{port}"))

    def messages() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name.startswith(("baton", "opentelemetry"))]

    def until(lines: int) -> None:
        give_up_at_s = time.monotonic() + HANG_S
        while len(messages()) < lines:
            assert time.monotonic() < give_up_at_s, messages()
            tracing.start("chat").end()
            time.sleep(0.02)

    until(1)
    for _ in range(200):
        tracing.start("chat").end()
    time.sleep(1.0)
    assert len(messages()) == 1, "not once per batch, nor per span that is dropped"
    with running_collector(port) as collector:
        until(2)
        collector.wait_for(lambda spans: spans)
    assert messages()[1].endswith("takes traces again")
    tracing.close()


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "is not there"])
def test_a_collector_that_does_not_take_spans_delays_neither_work_nor_the_end(hangs: bool) -> None:
    with running_collector() as collector:
        collector.delay_s = HANG_S
        endpoint = collector.url if hangs else f"http://127.0.0.1:{free_port()}"
        tracing = Tracing("gateway", TelemetrySettings(otlp_endpoint=endpoint))
        for _ in range(QUEUE_SPANS_MAX + 100):
            tracing.start("chat").end()
        tracing.close()
        assert not collector.payloads, "all has ended before the collector answers"


def test_the_endpoint_may_be_an_address_or_a_whole_path() -> None:
    assert traces_url("http://127.0.0.1:4318") == "http://127.0.0.1:4318/v1/traces"
    assert traces_url("http://collector:4318/") == "http://collector:4318/v1/traces"
    assert traces_url("https://host/otlp/v1/traces") == "https://host/otlp/v1/traces"


@pytest.mark.parametrize("endpoint", ["collector:4317", "grpc://collector:4317", "nonsense", "http://"])
def test_a_malformed_endpoint_stops_the_start_with_a_sentence(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="otlp_endpoint"):
        Tracing("gateway", TelemetrySettings(otlp_endpoint=endpoint))
