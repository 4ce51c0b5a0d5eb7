"""Settings of every service beside telemetry: the bus, and the time after which others count as lost."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from baton.node.membership import LOST_AFTER_S
from baton.telemetry import TelemetrySettings

Seconds = Annotated[float, Meta(gt=0)]


class NodeSettings(TelemetrySettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nats_url: Annotated[
        str, Meta(description="Address of the message bus; with tls://, a server that does not require TLS is refused.")
    ] = "nats://127.0.0.1:4222"
    lost_after_s: Annotated[Seconds, Meta(description="A worker without a heartbeat for this long is lost.")] = (
        LOST_AFTER_S
    )
