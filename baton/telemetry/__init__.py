"""What a service shows of itself: traces, metrics, health."""

from __future__ import annotations

from baton.telemetry.settings import TelemetrySettings
from baton.telemetry.tracing import Span, Tracing

__all__ = ["Span", "TelemetrySettings", "Tracing"]
