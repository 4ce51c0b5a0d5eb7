"""A service's telemetry: traces, metrics, health."""

from __future__ import annotations

from baton.telemetry import catalogue
from baton.telemetry.metrics import Metrics, Reading
from baton.telemetry.settings import TelemetrySettings
from baton.telemetry.status import serve_status
from baton.telemetry.tracing import Span, Tracing

__all__ = ["Metrics", "Reading", "Span", "TelemetrySettings", "Tracing", "catalogue", "serve_status"]
