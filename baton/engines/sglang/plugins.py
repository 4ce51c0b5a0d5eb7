"""Entry points that SGLang calls in each of its processes. They do nothing in other programs."""

# pyright: basic, reportMissingImports=false
# Types are checked where SGLang is not installed: engines pin their own torch, each in an environment of its own.

from __future__ import annotations

import os
from typing import Final

from baton.engines.processes import ENGINE_MARK, bind_to_parent

PLATFORM: Final = "baton_cpu"
"""Our entry point in the group `sglang.srt.platforms`."""
CONNECTOR_VARIABLE: Final = "BATON_ENGINE_CONNECTOR"
"""`module:Class` of the scheduler to run."""

_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_POOLS: Final = "sglang.srt.mem_cache.memory_pool"
_SETS_KV: Final = (
    f"{_POOLS}.MHATokenToKVPool.set_kv_buffer",
    f"{_POOLS}.MLATokenToKVPool.set_kv_buffer",
    f"{_POOLS}.MLATokenToKVPool.set_mla_kv_buffer",
)
_LOAD_MODEL: Final = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


def platform() -> str | None:
    """Entry point of the group `sglang.srt.platforms`: SGLang on a CPU, with none of its own kernels."""
    return "baton.engines.sglang.platform.PlainCpuPlatform" if os.environ.get(ENGINE_MARK) else None


def hooks() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    if not os.environ.get(ENGINE_MARK):
        return
    bind_to_parent()
    from importlib import import_module

    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from baton.connectors.sglang_cache import BACKEND, build
    from baton.engines.sglang import grammar, sampler

    register_radix_cache_backend(BACKEND, build)
    sampler.register()
    grammar.register()
    module, _, name = os.environ[CONNECTOR_VARIABLE].partition(":")
    HookRegistry.register(_SCHEDULER, getattr(import_module(module), name), HookType.REPLACE)
    for sets_kv in _SETS_KV:
        HookRegistry.register(sets_kv, _layer_saved, HookType.AFTER)
    HookRegistry.register(_LOAD_MODEL, _model_loaded, HookType.AFTER)


def _layer_saved(_result: object, pool: object, layer: object, *_arguments: object, **named: object) -> None:
    saved = getattr(pool, "baton_layer_saved", None)
    if saved is not None:
        override = named.get("layer_id_override")
        saved(layer.layer_id if override is None else override)  # pyright: ignore[reportAttributeAccessIssue]


def _model_loaded(_result: object, *_arguments: object, **_named: object) -> None:
    from baton.engines.sglang.platform import attend_over_latent_rows

    attend_over_latent_rows()
