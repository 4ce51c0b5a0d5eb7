"""Hooks in SGLang's scheduler process for sampling that SGLang supports only on other devices, or not at all.

**Seeds.** SGLang honours a request's seed in a mode of its own (`enable_deterministic_inference`), which demands
kernels with fixed orders of summation that a CPU does not have. What remains without it is SGLang's own sampler,
told the seeds: a token depends on the seed, its position and the logits. The hash behind it is a kernel, too.

**Stop tokens.** With `ignore_eos` SGLang ignores the request's own stop tokens as well.
"""

# pyright: basic, reportMissingImports=false
# Types are checked where SGLang is not installed: engines pin their own torch, each in an environment of its own.

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_BATCH = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_SAMPLE = "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch"
_HASH = "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32"
_STOPS = "sglang.srt.managers.schedule_batch.Req._check_token_based_finish"
_LOW = 0xFFFFFFFF


def register() -> None:
    HookRegistry.register(f"{_BATCH}.from_schedule_batch", _give_seeds, HookType.AFTER)
    HookRegistry.register(f"{_BATCH}.merge_batch", _give_both_seeds, HookType.BEFORE)
    HookRegistry.register(_SAMPLE, _filter_first, HookType.AROUND)
    HookRegistry.register(_HASH, _hash, HookType.AROUND)
    HookRegistry.register(_STOPS, _stops, HookType.AROUND)


def _give_seeds(info: SamplingBatchInfo, _class: type, batch: ScheduleBatch, *_arguments: object) -> None:
    seeds = [req.sampling_params.sampling_seed for req in batch.reqs]
    if info.sampling_seed is None and any(seed is not None for seed in seeds):
        info.sampling_seed = _tensor([_any_seed() if seed is None else seed for seed in seeds], info)


def _give_both_seeds(ours: SamplingBatchInfo, theirs: SamplingBatchInfo, *_arguments: object) -> None:
    """Give random seeds to a batch without seeds that is merged with one that has seeds."""
    for info, other in ((ours, theirs), (theirs, ours)):
        if info.sampling_seed is None and other.sampling_seed is not None:
            info.sampling_seed = _tensor([_any_seed() for _ in range(len(info.temperatures))], info)


def _filter_first(sample: Callable[..., Any], probs: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    """Apply `min_p` before the seeded sampler, which refuses to do both."""
    top_ks, top_ps, min_ps, need_min_p, seeds, *rest = arguments
    if need_min_p and seeds is not None:
        least = probs.max(dim=-1, keepdim=True).values * min_ps.view(-1, 1)
        probs, need_min_p = probs.masked_fill(probs < least, 0.0), False
    return sample(probs, top_ks, top_ps, min_ps, need_min_p, seeds, *rest, **named)


def _hash(
    hash32: Callable[..., torch.Tensor], seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """Return SGLang's hash of (seed, position, column), one row per seed: MurmurHash3 of 16 bytes."""
    if seeds.device.type != "cpu":
        return hash32(seeds, positions, columns)
    seeds = seeds.to(torch.int64)
    state = torch.zeros_like(seeds)
    for key in (seeds & _LOW, (seeds >> 32) & _LOW, positions.to(torch.int64) & _LOW):
        state = _mixed(state, key)
    state = _mixed(state.unsqueeze(1), columns.to(torch.int64).unsqueeze(0)) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = ((state ^ (state >> shift)) * factor) & _LOW
    return state ^ (state >> 16)


def _mixed(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    # Products overflow 64 bits, and the 32 that count stay right.
    key = (_rotated((key * 0xCC9E2D51) & _LOW, 15) * 0x1B873593) & _LOW
    return (_rotated(state ^ key, 13) * 5 + 0xE6546B64) & _LOW


def _rotated(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _LOW


def _stops(check: Callable[[Req, Sequence[int]], bool], req: Req, tokens: Sequence[int]) -> bool:
    params = req.sampling_params
    if not params.ignore_eos or not params.stop_token_ids:
        return check(req, tokens)
    for place, token in enumerate(tokens):
        if token in params.stop_token_ids:
            req.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            req.finished_len = len(req.output_ids) - len(tokens) + place + 1
            return True
    return False


def _tensor(seeds: list[int], info: SamplingBatchInfo) -> torch.Tensor:
    return torch.tensor(seeds, dtype=torch.int64, device=info.temperatures.device)


def _any_seed() -> int:
    return secrets.randbits(62)
