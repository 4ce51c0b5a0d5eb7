"""Settings of the index."""

from __future__ import annotations

from typing import Annotated

import msgspec

from baton.node.settings import NodeSettings, Seconds

Count = Annotated[int, msgspec.Meta(gt=0)]


class IndexSettings(NodeSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    redis_url: Annotated[
        str,
        msgspec.Meta(description="Where the index is written down; empty: nowhere, workers are asked instead."),
    ] = "redis://127.0.0.1:6379/0"
    redis_prefix: Annotated[str, msgspec.Meta(description="What all of its Redis keys begin with.")] = "baton:kvindex"
    redis_timeout_s: Annotated[Seconds, msgspec.Meta(description="Longest wait for one answer of Redis.")] = 2.0
    write_interval_s: Annotated[Seconds, msgspec.Meta(description="Time between two writes to Redis.")] = 0.1
    write_retry_s: Annotated[Seconds, msgspec.Meta(description="Time between two tries while Redis is down.")] = 1.0
    writer_ttl_s: Annotated[
        Seconds, msgspec.Meta(description="Of several indexes one writes; this long without a sign it is replaced.")
    ] = 1.0
    memory_bytes_max: Annotated[
        int,
        msgspec.Meta(
            ge=0, description="What blocks may take of this index's memory; idle ones beyond it move to Redis. 0: all."
        ),
    ] = 0
    cold_timeout_s: Annotated[
        Seconds, msgspec.Meta(description="Longest wait for what is cold of a prompt; then memory alone answers.")
    ] = 0.03
    cold_patience_s: Annotated[
        Seconds,
        msgspec.Meta(description="Redis away for this long: what is cold is given up, its workers are read anew."),
    ] = 5.0
    unwritten_blocks_max: Annotated[
        Count, msgspec.Meta(description="Changes of one worker that wait to be written before all of it is rewritten.")
    ] = 8192
    behind_s: Annotated[
        Seconds,
        msgspec.Meta(description="An event that a heartbeat named and that is late by this much is lost."),
    ] = 1.0
    resync_interval_s: Annotated[Seconds, msgspec.Meta(description="Least time between two resyncs of a worker.")] = 0.5
    resync_page_timeout_s: Annotated[Seconds, msgspec.Meta(description="Longest wait for one page of a resync.")] = 1.0
    resyncs_max: Annotated[Count, msgspec.Meta(description="Resyncs that run at the same time.")] = 4
    settle_s: Annotated[
        Seconds, msgspec.Meta(description="Longest time at the start before this index answers, complete or not.")
    ] = 3.0
