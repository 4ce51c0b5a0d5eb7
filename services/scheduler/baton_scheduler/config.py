"""Settings of the scheduler."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from baton.messages.placement import Disaggregation
from baton.node.settings import NodeSettings, Seconds
from baton_scheduler.policies import PolicyName

Count = Annotated[int, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class RoleChanges(StrEnum):
    """Who changes the roles of workers."""

    MANUAL = "manual"
    """Only operators, with `baton roles`."""
    AUTO = "auto"
    """The supervisor, and operators."""


class SchedulerSettings(NodeSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    disaggregation: Annotated[
        Disaggregation, msgspec.Meta(description="Whether prefill runs on another worker; a request may say otherwise.")
    ] = Disaggregation.AUTO
    index_timeout_s: Annotated[
        Seconds, msgspec.Meta(description="Longest wait for the index; then requests are placed without it.")
    ] = 0.05
    policy: Annotated[PolicyName, msgspec.Meta(description="How workers are chosen, see the scheduler's README.")] = (
        PolicyName.PREDICTED
    )
    output_headroom_tokens: Annotated[
        Count, msgspec.Meta(description="Most output tokens for which workers reserve KV, as set on the workers.")
    ] = 512
    leased_share_max: Annotated[
        Share, msgspec.Meta(description="Share of its KV that a prefill worker may lease out, as set on the workers.")
    ] = 0.4
    place_wait_s_max: Annotated[
        Seconds,
        msgspec.Meta(
            description="What can begin within this predicted time is placed at once and waits at its worker; the rest "
            "is held."
        ),
    ] = 0.5
    placements_max: Annotated[
        Count, msgspec.Meta(description="Most requests placed at the same time; further ones are held.")
    ] = 32
    held_max: Annotated[Count, msgspec.Meta(description="Most requests held until a worker has room; then 429.")] = 4096
    age_s: Annotated[Seconds, msgspec.Meta(description="Time after which a held request moves up one class.")] = 5.0
    decisions_kept_s: Annotated[
        Seconds, msgspec.Meta(description="Time for which decisions are kept for `baton explain`.")
    ] = 3600.0
    decisions_bytes_max: Annotated[
        Count, msgspec.Meta(description="Most bytes of kept decisions; beyond them the oldest are dropped.")
    ] = 256 << 20
    roles: Annotated[
        RoleChanges,
        msgspec.Meta(description="Whether workers change their roles as load shifts: auto, or manual (`baton roles`)."),
    ] = RoleChanges.MANUAL
    role_dwell_s: Annotated[
        Seconds, msgspec.Meta(description="Time for which a role must lack workers before another one changes to it.")
    ] = 10.0
    role_rest_s: Annotated[
        Seconds, msgspec.Meta(description="Least time between changes of role; to undo the last one, four times that.")
    ] = 30.0
    learn_s: Annotated[
        Seconds, msgspec.Meta(description="Time at the start to collect heartbeats, before requests are taken.")
    ] = 0.5
    seed: Annotated[
        int | None, msgspec.Meta(description="Seed of the choice among equals; none: different at each start.")
    ] = None
