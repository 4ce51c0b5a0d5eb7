"""Settings of a decode worker: `baton.worker.settings`, with this role's defaults."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from baton.worker.settings import Seconds, WorkerSettings


class DecodeSettings(WorkerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # Answers stream for a while; if they end early, the gateways must place them again.
    drain_s: Annotated[Seconds, Meta(description="Time while draining for answers that still stream.")] = 60.0
