"""Tensors of a CPU that say that they lie on a device."""

# pyright: basic

from __future__ import annotations

from typing import Any

import torch


class OnDevice:
    def __init__(self, tensor: torch.Tensor, kind: str, index: int) -> None:
        self._tensor = tensor
        self.device = torch.device(kind, index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]
