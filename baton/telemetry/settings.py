"""Telemetry settings of every service: its traces, its log, and where it serves its status."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from baton.errors import ConfigurationError
from baton.telemetry.logs import LogFormat, LogLevel


class TelemetrySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tracing: Annotated[bool, Meta(description="Whether requests are traced; `baton trace` shows those that are.")] = (
        True
    )
    otlp_endpoint: Annotated[
        str, Meta(description="OpenTelemetry collector that gets the traces (OTLP over HTTP); empty: none.")
    ] = ""
    trace_share: Annotated[
        float, Meta(ge=0, le=1, description="Share of the requests whose traces are exported; failed ones always are.")
    ] = 1.0
    log_level: Annotated[LogLevel, Meta(description="Least severe messages that are logged.")] = LogLevel.INFO
    log_format: Annotated[
        LogFormat,
        Meta(description="Form of the log: text, or one JSON object per line; engines keep theirs."),
    ] = LogFormat.TEXT
    status_host: Annotated[str, Meta(description="Address that serves /metrics, /health and /ready.")] = "127.0.0.1"
    status_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="Its port; 0 takes any free one, none: it is not served."),
    ] = None
    status_fd: Annotated[
        Annotated[int, Meta(ge=3)] | None,
        Meta(description="Descriptor of an inherited listening socket for it, instead of address and port."),
    ] = None


def traces_url(endpoint: str) -> str:
    """Return the URL for spans: `endpoint` itself if it has a path, else with OTLP's usual one.

    Raises ConfigurationError if it is no address.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(
            f"the setting otlp_endpoint is malformed: {endpoint!r} is no address such as http://127.0.0.1:4318",
            param="otlp_endpoint",
        )
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
