"""Calls from the streaming process to an engine's ranks, beside the scheduler's steps.

vLLM mixes this class into its worker (`worker_extension_cls`); `AsyncLLM.collective_rpc` calls the methods by
name, between two steps, on every rank. Values are plain, since they cross a process by MessagePack.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from baton.connectors.vllm import BatonConnector
from baton.transfer import TransferFaults


class BatonWorker:
    def _baton(self) -> BatonConnector:
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        if not isinstance(connector, BatonConnector):
            raise TypeError(f"the engine runs {type(connector).__name__}, not Baton's connector")
        return connector

    def baton_facts(self) -> dict[str, object]:
        """Return the agents' endpoints, empty without one, sizes of this rank's part of the KV, and the KV identity."""
        connector = self._baton()
        rank, pool = connector.rank, connector.pool_rank
        lending = pool.lending if pool is not None else None
        return {
            "endpoint": rank.agent.endpoint if rank is not None else "",
            "pool_endpoint": lending.agent.endpoint if lending is not None else "",
            "pool_blocks": pool.slots if pool is not None else 0,
            "kv_block_bytes": connector.kv_block_bytes,
            "kv_identity": connector.kv_identity,
        }

    def baton_events_heard(self) -> None:
        """Note that the streaming process listens to the engine's events."""
        pool = self._baton().pool_rank
        if pool is not None:
            pool.events_heard = True

    def baton_end_lease(self, key: bytes) -> None:
        """Revoke a lease for good; its blocks are freed with the next step."""
        rank = self._baton().rank
        if rank is not None:
            rank.end_lease(key)

    def baton_transfer_stats(self) -> dict[str, object]:
        """Return the agent's counters, and the layers that have arrived of each pull that runs."""
        rank = self._baton().rank
        if rank is None:
            return {}
        return {
            **asdict(rank.agent.stats()),
            "layers_arrived": {key.hex(): layers for key, layers in rank.layers_arrived.items()},
        }

    def baton_set_faults(self, faults: dict[str, Any]) -> None:
        """Inject faults at this rank's agent, for tests and benchmarks."""
        self._baton().set_faults(TransferFaults(**faults))
