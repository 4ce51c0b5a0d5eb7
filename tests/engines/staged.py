"""A connector of vLLM that stages over the stand-in for GPUs, see `stand_in`."""

from __future__ import annotations

from typing import Any

from gated import GatedConnector
from stand_in import STREAM, StandIn

from baton.transfer.device import CopyEngine


class StagedConnector(GatedConnector):
    """Use with kv_path=staged. Its cache counts as a device's while a mode is set."""

    _stand_in: StandIn

    def make_copies(self) -> CopyEngine:
        self._stand_in = StandIn()
        return self._stand_in.copies

    def stream(self) -> int | None:
        return STREAM

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        mode = self._stand_in.mode
        self._device = 0 if mode else None
        super().bind_connector_metadata(connector_metadata)
        names = list(self._layers)
        if mode:
            self._hook(*{"queued": names[:1], "captured": names}.get(mode, ()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)
        # vLLM writes a layer's KV before it calls this for the layer; the next one's it cannot have computed yet.
        if self._stand_in.mode == "queued":
            layer = self._layers[layer_name]
            self._hook(*list(self._layers)[layer + 1 : layer + 2])

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: object) -> None:
        self.note_written(kv_layer, attn_metadata)
        if not self._stand_in.mode:
            super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def note_written(self, kv_layer: Any, attn_metadata: Any) -> None:
        """Say that the stream writes this layer."""
        self._stand_in.wrote(kv_layer)

    def _hook(self, *names: str) -> None:
        assert self._rank is not None
        of_layer = {layer: name for name, layer in self._layers.items()}
        self._stand_in.hook(
            [self._layers[name] for name in names],
            lambda layer: super(StagedConnector, self).save_kv_layer(of_layer[layer], None, None),  # pyright: ignore
            self._rank.layer_saved,
        )
