"""SGLang's platform for CPUs, in plain PyTorch. SGLang's own needs kernels that its package does not have."""

# pyright: basic, reportMissingImports=false
# Types are checked where SGLang is not installed: engines pin their own torch, each in an environment of its own.

from __future__ import annotations

import sys

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()
    """None: no graphs, no Triton."""

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"


def attend_over_latent_rows() -> None:
    """Have models with latent attention (MLA) attend over the cached rows themselves, if such a model is loaded.

    SGLang's default for a prompt expands the rows to K and V of each head, and `torch_native` would then look for these
    in the cache.
    """
    handlers = sys.modules.get("sglang.srt.models.deepseek_common.attention_backend_handler")
    if handlers is not None:
        absorbed = handlers.AttnForwardMethod.MLA
        handlers.AttentionBackendRegistry.register("torch_native", lambda _attention, _batch: absorbed)
