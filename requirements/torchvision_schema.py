"""Lets SGLang import torchvision beside a build of torch without CUDA.

The package index has torchvision for CUDA only. Its operators then do not load, and its Python part, which SGLang
always imports, stops at the first that it describes. Their schemas are declared here when torchvision is first
imported; the operators are never called. `environment.py` puts this file beside torchvision, with a line that
Python runs at every start: engines start their processes with nothing of ours in them yet.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _Declaring(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in SCHEMAS:
                self.library.define(schema)  # pyright: ignore[reportUnknownMemberType]
        return None


# Kept, and its library with it: declarations go with the object that made them.
DECLARING = _Declaring()
sys.meta_path.insert(0, DECLARING)
