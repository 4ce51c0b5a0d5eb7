"""Calls from the streaming process to the connector in vLLM's scheduler process, for loans of the KV pool.

vLLM's client calls methods of `EngineCore` by their name, between two steps. Its own reach the ranks and the scheduler,
not a connector there, so one more is added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

LEND_METHOD: Final = "baton_lend"


def add_lending() -> None:
    """Add `LEND_METHOD` to vLLM's scheduler process; called once in each of vLLM's processes."""
    from vllm.v1.engine.core import EngineCore

    def lend(core: EngineCore, key: bytes, blocks: bytes, sink_ranks: int) -> int:
        from baton.connectors.vllm import BatonConnector

        connector = core.scheduler.get_kv_connector()
        return connector.lend(key, blocks, sink_ranks) if isinstance(connector, BatonConnector) else 0

    setattr(EngineCore, LEND_METHOD, lend)
