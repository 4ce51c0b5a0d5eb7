"""Conversion of options, arguments, events and figures to and from `baton_native`, for every agent around its core."""

from __future__ import annotations

from collections.abc import Sequence

import baton_native

from baton.transfer.protocol import (
    KEY_BYTES,
    AgentOptions,
    AgentStats,
    Cause,
    EventKind,
    RailShare,
    TransferEvent,
    TransferFaults,
)


def native_options(options: AgentOptions) -> baton_native.Options:
    native = baton_native.Options()
    native.secret = options.secret
    native.backends = list(options.backends)
    native.streams = natural("streams", options.streams)
    native.lane_bytes = natural("lane_bytes", options.lane_bytes)
    native.chunk_bytes = natural("chunk_bytes", options.chunk_bytes)
    native.checksum = options.checksum
    native.tells_asks = options.tells_asks
    native.verbs_library = options.verbs_library
    native.verbs_devices = options.verbs_devices
    native.ucx_library = options.ucx_library
    native.gpu_library = options.gpu_library
    native.host = options.host_id
    native.lease_ttl_s = options.lease_ttl_s
    native.unclaimed_ttl_s = options.unclaimed_ttl_s
    native.wanted_timeout_s = options.wanted_timeout_s
    native.connect_timeout_s = options.connect_timeout_s
    native.stall_timeout_s = options.stall_timeout_s
    native.faults = native_faults(options.faults)
    return native


def native_faults(faults: TransferFaults) -> baton_native.Faults:
    return baton_native.Faults(
        faults.delay_s,
        natural("corrupt_every", faults.corrupt_every),
        faults.corruption,
        faults.before_checksum,
        faults.silent,
    )


def checked_key(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a lease key has {KEY_BYTES} bytes, not {len(key)}")
    return bytes(key)


def natural(name: str, value: int) -> int:
    if not 0 <= value < 1 << 32:
        raise ValueError(f"{name} must be from 0 to 2**32 - 1, not {value}")
    return value


def block_indexes(blocks: Sequence[int]) -> list[int]:
    return [natural("a block index", int(block)) for block in blocks]


def transfer_event(report: baton_native.Report) -> TransferEvent:
    return TransferEvent(
        kind=EventKind(report.kind),
        key=report.key,
        cause=Cause(report.cause),
        detail=report.detail,
        layers=report.layers,
        bytes=report.bytes,
        tokens=report.tokens,
        waiting_s=report.waiting_s,
        moving_s=report.moving_s,
        backend=report.backend,
        declined=report.declined,
        restarts=report.restarts,
        rails=rail_shares(report.rails),
    )


def rail_shares(shares: Sequence[baton_native.RailShare]) -> tuple[RailShare, ...]:
    return tuple(
        RailShare(
            rail=share.rail,
            bytes=share.bytes,
            chunks=share.chunks,
            retired=share.retired,
            bytes_per_s=share.bytes_per_s,
        )
        for share in shares
    )


def agent_stats(stats: baton_native.Stats) -> AgentStats:
    return AgentStats(
        leases=stats.leases,
        leased_blocks=stats.leased_blocks,
        pulls=stats.pulls,
        parked=stats.parked,
        pulled_bytes=stats.pulled_bytes,
        pulled_blocks=stats.pulled_blocks,
        served_bytes=stats.served_bytes,
        pulls_done=stats.pulls_done,
        pulls_failed=stats.pulls_failed,
        leases_expired=stats.leases_expired,
        leases_revoked=stats.leases_revoked,
        checksum_failures=stats.checksum_failures,
        fallbacks=stats.fallbacks,
        lanes_retired=stats.lanes_retired,
    )
