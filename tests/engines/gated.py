"""A connector that stops prefill before a chosen layer, so that tests prove order without racing clocks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from gate import read_order

from baton.connectors.vllm import BatonConnector

HOLD_TIMEOUT_S = 30.0


class GatedConnector(BatonConnector):
    """Holds layer n at its (k+1)-th visit while `$BATON_TEST_GATE/hold` says `{"layer": n, "pass": k}`."""

    _passed = 0

    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)
        gate = Path(os.environ["BATON_TEST_GATE"])
        hold = gate / "hold"
        if not (text := read_order(hold)):
            self._passed = 0
            return
        order = json.loads(text)
        if self._layers[layer_name] != order["layer"]:
            return
        self._passed += 1
        if self._passed <= order["pass"]:
            return
        (gate / "held").touch()
        deadline_s = time.monotonic() + HOLD_TIMEOUT_S
        while read_order(hold) == text and time.monotonic() < deadline_s:
            time.sleep(0.005)
