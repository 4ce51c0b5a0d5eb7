"""SGLang's scheduler, staging over the stand-in for GPUs, see `stand_in`. Its cache counts as a device's."""

# pyright: basic, reportMissingImports=false
# Types are checked where SGLang is not installed: engines pin their own torch, each in an environment of its own.

from __future__ import annotations

from dataclasses import replace
from typing import Any

from stand_in import STREAM, StandIn

from baton.connectors.link import Setup
from baton.connectors.sglang import BatonScheduler
from baton.connectors.sglang_kv import SglangKv
from baton.transfer import Pool
from baton.transfer.device import CopyEngine


class _DeviceKv(SglangKv):
    def described(self, identity: str) -> Pool:
        return replace(super().described(identity), device=0)


class StagedScheduler(BatonScheduler):
    """Use with kv_path=staged."""

    _stand_in: StandIn

    def make_copies(self, device: int | None) -> CopyEngine:
        assert device == 0
        self._stand_in = StandIn()
        return self._stand_in.copies

    def _stream(self) -> int | None:
        return STREAM

    def _read_kv(self, pool: Any, setup: Setup) -> SglangKv:
        kv = super()._read_kv(pool, setup)
        return _DeviceKv(kv.layout, kv.tensors)

    def _open(self, setup: Setup) -> None:
        super()._open(setup)
        pool: Any = self.token_to_kv_pool_allocator.get_kvcache()
        writes = pool.set_kv_buffer

        def set_kv_buffer(layer: Any, *arguments: Any, **named: Any) -> None:
            if self._stand_in.mode == "queued":
                self._hook(layer.layer_id)
            writes(layer, *arguments, **named)
            for tensors in (pool.k_buffer, pool.v_buffer):
                self._stand_in.wrote(tensors[layer.layer_id - pool.start_layer])

        pool.set_kv_buffer = set_kv_buffer

    def run_batch(self, batch: Any, *arguments: object) -> Any:
        if self._stand_in.mode == "captured":
            pool = self.token_to_kv_pool_allocator.get_kvcache()
            self._hook(*range(pool.start_layer, pool.start_layer + pool.layer_num))
        return super().run_batch(batch, *arguments)

    def _hook(self, *layers: int) -> None:
        assert self.handoffs is not None
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        hook = getattr(pool, "baton_layer_saved", lambda _layer: None)
        post = self.handoffs.rank.layer_saved
        self._stand_in.hook(layers, hook, lambda layer: post(layer - pool.start_layer))
