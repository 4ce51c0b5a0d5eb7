"""Settings of a prefill worker: `baton.worker.settings`, with this role's defaults."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from baton.worker.settings import Seconds, WorkerSettings


class PrefillSettings(WorkerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # A prefill worker generates nothing for long: what runs is done, or pulled, within a lease's time.
    drain_s: Annotated[Seconds, Meta(description="Time at the end for prompts that run and leases that are held.")] = (
        10.0
    )
