"""Settings of a prefill worker: `baton.worker.settings`, with this role's defaults."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from baton.worker.settings import Seconds, WorkerSettings


class PrefillSettings(WorkerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # A prefill worker's work is short: a prompt is computed, and its KV pulled, within a lease's TTL.
    drain_s: Annotated[Seconds, Meta(description="Time while draining for running prompts and held leases.")] = 10.0
