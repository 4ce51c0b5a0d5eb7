"""The transfer agent of a rank whose KV is staged, and the key under which the KV pool finds what was staged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from baton.connectors.handoff import Handoff, HandoffLeg
from baton.devices.rdma import read_nics
from baton.pool.gpu_agent import GpuAgent, direct_options
from baton.pool.staging import StagedAgent, Stream
from baton.transfer import AgentOptions, NativeAgent, TransferAgent
from baton.transfer.device import CopyEngine


def make_staged_agent(
    options: AgentOptions,
    make_agent: Callable[[AgentOptions], TransferAgent],
    copies: CopyEngine,
    slots: int,
    *,
    pool_bytes: int,
    stream: Stream,
    make_direct: Callable[[AgentOptions], NativeAgent | None] | None,
) -> StagedAgent | GpuAgent:
    """Return an agent that stages; with `make_direct`, other GPUs read the cache instead (KV_PATH=gpu)."""
    asked = replace(options, tells_asks=True)
    direct = make_direct and make_direct(direct_options(asked, adapters=any(nic.up for nic in read_nics(Path("/")))))
    if direct is None:
        return StagedAgent(make_agent(options), copies, slots, pool_bytes=pool_bytes, stream=stream)
    staged = StagedAgent(make_agent(asked), copies, slots, pool_bytes=pool_bytes, on_ask=True, stream=stream)
    return GpuAgent(direct, staged, stream=stream)


def staged_key_of(handoff: Handoff | None, *, gpu_peers: bool) -> bytes:
    """Return the key under which the KV pool finds what a request's hand-off has staged; empty: nothing is.

    With `gpu_peers` what decode pulls may come past the slots, so the pool saves it like what is computed here.
    """
    if handoff is None or (gpu_peers and handoff.leg is HandoffLeg.DECODE):
        return b""
    return handoff.key
