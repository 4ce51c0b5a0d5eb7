"""Hooks in SGLang's scheduler process for structured output.

**Continued answers.** SGLang makes a grammar at its first character for each request. An answer that moves to this
engine has its delivered tokens at the end of its prompt, so the new grammar accepts these before it is used.

**Bounds.** SGLang keeps every grammar that it has compiled, and xgrammar does so a second time, both without a limit.
"""

# pyright: basic, reportMissingImports=false
# Types are checked where SGLang is not installed: engines pin their own torch, each in an environment of its own.

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from xgrammar import GrammarCompiler

from baton.connectors.link import DELIVERED_PARAMETER

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
    from sglang.srt.constrained.grammar_manager import GrammarManager
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
    from sglang.srt.managers.schedule_batch import Req

CACHED_MAX: Final = 256
"""Compiled grammars that are kept for the requests after."""

_CONSTRAINED = "sglang.srt.constrained"
# SGLang's last step once a request has its grammar, compiled or from the cache.
_READY = f"{_CONSTRAINED}.grammar_manager.GrammarManager._apply_request_reasoning_config"


def register() -> None:
    HookRegistry.register(_READY, _advance, HookType.AFTER)
    HookRegistry.register(f"{_CONSTRAINED}.base_grammar_backend.BaseGrammarBackend.set_cache", _evict, HookType.AFTER)
    HookRegistry.register(
        f"{_CONSTRAINED}.xgrammar_backend.XGrammarGrammarBackend.__init__", _cache_once, HookType.AFTER
    )


def _advance(_result: None, _manager: GrammarManager, req: Req) -> None:
    delivered = (req.sampling_params.custom_params or {}).get(DELIVERED_PARAMETER, 0)
    if not delivered or isinstance(req.grammar, InvalidGrammarObject):
        return
    try:
        for token in req.origin_input_ids[-delivered:]:
            req.grammar.accept_token(token)
    except ValueError:
        req.set_finish_with_abort("the constraint does not allow what was delivered of the answer")


def _evict(_result: None, backend: BaseGrammarBackend, *_arguments: object) -> None:
    while len(backend.cache) > CACHED_MAX:
        del backend.cache[next(iter(backend.cache))]


def _cache_once(_result: None, backend: XGrammarGrammarBackend, *_arguments: object, **_named: object) -> None:
    backend.grammar_compiler = GrammarCompiler(backend._tokenizer_info, cache_enabled=False)
