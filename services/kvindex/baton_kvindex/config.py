"""Settings of the index."""

from __future__ import annotations

from typing import Annotated

import msgspec

from baton.node.settings import NodeSettings, Seconds

Count = Annotated[int, msgspec.Meta(gt=0)]


class IndexSettings(NodeSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    redis_url: Annotated[
        str,
        msgspec.Meta(description="Redis for the durable form; empty: none, workers are queried at the start instead."),
    ] = "redis://127.0.0.1:6379/0"
    redis_prefix: Annotated[str, msgspec.Meta(description="Prefix of all Redis keys of the index.")] = "baton:kvindex"
    redis_timeout_s: Annotated[Seconds, msgspec.Meta(description="Longest wait for one answer of Redis.")] = 2.0
    write_interval_s: Annotated[Seconds, msgspec.Meta(description="Time between two writes to Redis.")] = 0.1
    write_retry_s: Annotated[
        Seconds, msgspec.Meta(description="Time between two attempts to write while Redis is down.")
    ] = 1.0
    writer_ttl_s: Annotated[
        Seconds,
        msgspec.Meta(description="TTL of the writer's lease: the index that writes is replaced after this silence."),
    ] = 1.0
    memory_bytes_max: Annotated[
        int,
        msgspec.Meta(ge=0, description="Memory for blocks; idle ones beyond it spill to Redis. 0: no bound."),
    ] = 0
    cold_timeout_s: Annotated[
        Seconds, msgspec.Meta(description="Longest wait for the cold blocks of a prompt; then memory alone answers.")
    ] = 0.03
    cold_patience_s: Annotated[
        Seconds,
        msgspec.Meta(description="Longest outage of Redis before cold blocks are given up and their workers resynced."),
    ] = 5.0
    unwritten_blocks_max: Annotated[
        Count, msgspec.Meta(description="Unwritten block changes of one worker above which all of it is rewritten.")
    ] = 8192
    behind_s: Annotated[
        Seconds,
        msgspec.Meta(description="Delay after which an event that a heartbeat named counts as lost."),
    ] = 1.0
    resync_interval_s: Annotated[Seconds, msgspec.Meta(description="Least time between two resyncs of one worker.")] = (
        0.5
    )
    resync_page_timeout_s: Annotated[Seconds, msgspec.Meta(description="Longest wait for one page of a resync.")] = 1.0
    resyncs_max: Annotated[Count, msgspec.Meta(description="Most resyncs that run at the same time.")] = 4
    settle_s: Annotated[
        Seconds,
        msgspec.Meta(description="Longest wait at the start for all workers to be synced; then this index answers."),
    ] = 3.0
