"""Load of one live worker: its newest heartbeat, and what was placed on it since. Pure."""

from __future__ import annotations

from math import exp, inf
from statistics import median
from typing import Final

import msgspec

from baton.messages.workers import Heartbeat, Role, StepFit, TransferFit
from baton_scheduler.pooling import SAMPLES_MIN

COMPUTE_WEIGHT: Final = 1.0
"""Weight of an attempt's own prompt for others, beside its own time: prompts that come next wait for it, too."""
COMPUTE_WEIGHT_PER_SEQUENCE: Final = 0.1
"""Added to it for each sequence that runs there: none of them gets a token while the prompt is computed."""
DISPLACED_WEIGHT: Final = 1.0
"""Weight of computing what a loan displaces in the borrower's full pool: others will compute that again."""
PROMPTS_S: Final = 10.0
"""Time over which the share of prompts in a worker's time is averaged: about that of an answer."""
PROMPTS_SHARE_MAX: Final = 0.95
"""Sequences get some tokens, however many prompts were placed at once."""
BANDWIDTH_GUESS: Final = 4e9
"""Bytes per second of a pull where no worker has measured one."""
NEVER_S: Final = 1e30
"""Time per token of a promotion where there is no pool."""
BOUND_DEVIATIONS: Final = 2.0
"""Standard deviations of a worker's samples between a prediction and its bound."""
SPREAD_MAX: Final = 2.0
"""Larger spreads say no more than that nothing is known."""


def bound_ratio(fit: StepFit | TransferFit) -> float:
    """Return the ratio of a bound to its prediction; 1 while too little is measured to tell."""
    return exp(BOUND_DEVIATIONS * min(fit.spread, SPREAD_MAX)) if fit.samples >= SAMPLES_MIN else 1.0


class SoftPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity that one attempt, placed at `placed_s`, takes from a worker until `until_s`."""

    attempt: int
    placed_s: float
    until_s: float
    kv_tokens: int
    prefill_s: float
    """Predicted time of computing the prompt; 0 where another worker does."""
    prompt_s: float = 0.0
    """Part of it without the sequences that decode in the same steps."""


class WorkerLoad:
    """Load of a live worker: its newest heartbeat plus what was placed on it since."""

    __slots__ = (
        "_decoding",
        "_prompts_at_s",
        "_prompts_s",
        "_pulls",
        "_slots",
        "_tokens",
        "_transfers",
        "answer_interval_s",
        "bandwidth",
        "bandwidths",
        "block_tokens",
        "compute_weight",
        "computes_until_s",
        "context_tokens_max",
        "filed_token_s",
        "half_interval_s",
        "heard_s",
        "heartbeat",
        "identity",
        "interval_s",
        "kv_bytes_per_token",
        "kv_share",
        "kv_tokens_max",
        "lends",
        "limits",
        "next_interval_s",
        "own_bandwidth",
        "pair_s",
        "pool_tokens_free",
        "pooled_until_s",
        "promoted_token_s",
        "promotion_bytes_per_s",
        "ready",
        "role",
        "running_max",
        "shared_share",
        "slots_free",
        "slots_lacking",
        "soft",
        "step_s",
        "step_tokens_max",
        "steps",
        "token_s",
        "tokens_free",
        "used_share",
        "worker",
    )

    def __init__(self, heartbeat: Heartbeat, heard_s: float = 0.0, *, leased_share_max: float = 0.4) -> None:
        self.worker = heartbeat.address.worker
        self.role = heartbeat.role
        declared = heartbeat.kv_identity or f"digest={heartbeat.model_digest}"
        self.identity = declared if heartbeat.address.agents else ""
        """Workers hand over to workers of the same KV identity; empty: the engine has no transfer agent."""
        self.soft: dict[str, SoftPlacement] = {}
        """Soft placements by request."""
        self.steps = heartbeat.steps
        """Rates that predictions use; `Loads` pools them."""
        self.bandwidth = BANDWIDTH_GUESS
        """Bytes per second of a pull from a peer of which none was measured."""
        self.bandwidths: dict[str, float] = {}
        """The same by peer, as measured."""
        self.own_bandwidth = 0.0
        """Median of these; 0: none was measured."""
        self._transfers: tuple[TransferFit, ...] = ()
        self._pulls: dict[str, TransferFit] = {}
        """These by peer."""
        self.promotion_bytes_per_s = heartbeat.promotion.bytes_per_s if heartbeat.promotion else 0.0
        """Bandwidth of promotions, as `Loads` pools it; 0: there is no pool."""
        self.pooled_until_s = -inf
        """Instant at which `Loads` renews what it pools, as it was at the last heartbeat."""
        self._prompts_s = 0.0
        """Time of the prompts placed here lately, as predicted; older ones count less."""
        self._prompts_at_s = heard_s
        self.hear(heartbeat, heard_s, leased_share_max)

    @property
    def kind(self) -> str:
        """Engine and its options: workers of one kind refuse the same requests."""
        return self.heartbeat.engine_kind or self.worker

    # Computed when they are read: heartbeats come more often than candidates are compared.

    @property
    def bound_ratio(self) -> float:
        """Ratio of the bound of the time of what it computes and copies to its prediction."""
        return bound_ratio(self.steps)

    def pull_bound_ratio(self, peer: str) -> float:
        """Return the ratio of the bound of a pull's time to its prediction; 1 where none was measured."""
        fit = self._pulls.get(peer)
        return 1.0 if fit is None else bound_ratio(fit)

    def hear(self, heartbeat: Heartbeat, heard_s: float, leased_share_max: float) -> None:
        """Take a heartbeat of this worker."""
        self.heartbeat = heartbeat
        self.heard_s = heard_s
        self.block_tokens = heartbeat.block_tokens
        self.kv_bytes_per_token = heartbeat.kv_bytes_per_token
        self.context_tokens_max = heartbeat.context_tokens_max
        # A worker without slots counts as full.
        self.running_max = max(1, heartbeat.running_max)
        self.step_tokens_max = heartbeat.step_tokens_max
        # Prefill workers lease out a part of their KV only.
        blocks = int(heartbeat.kv_blocks_total * (leased_share_max if self.role is Role.PREFILL else 1.0))
        self.kv_tokens_max = blocks * heartbeat.engine_block_tokens
        """Most tokens of KV that attempts can reserve here."""
        self.shared_share = heartbeat.kv_shared_share
        self.ready = not heartbeat.draining
        prompt_tokens_max = heartbeat.context_tokens_max - 1 if self.ready else -1
        self.lends = self.ready and self.promotion_bytes_per_s > 0 and bool(self.identity)
        """Whether it has a KV pool that can lend."""
        self.limits = prompt_tokens_max, self.kv_tokens_max if self.ready else -1, heartbeat.model_digest, self.lends
        """Most prompt tokens and tokens of KV that an attempt may need, -1 if none is taken; digest of the model; and
        `lends`."""
        if heartbeat.transfers != self._transfers:
            self._transfers = heartbeat.transfers
            self._pulls = {each.peer: each for each in heartbeat.transfers}
            self.bandwidths = {each.peer: each.bytes_per_s for each in heartbeat.transfers}
            self.own_bandwidth = median(self.bandwidths.values()) if self.bandwidths else 0.0
        steps = self.steps
        self.step_s, self.token_s, self.pair_s = steps.prompt_step_s, steps.prompt_token_s, steps.prompt_pair_s
        rate = self.promotion_bytes_per_s
        self.promoted_token_s = heartbeat.kv_bytes_per_token / rate if rate else NEVER_S
        self.pool_tokens_free = heartbeat.pool_tokens_free
        self.filed_token_s = NEVER_S
        """Time per token that is read from the pool's file, and promoted."""
        if heartbeat.loading is not None:
            self.filed_token_s = heartbeat.kv_bytes_per_token / heartbeat.loading.bytes_per_s + self.promoted_token_s
        self._decoding = heartbeat.running if self.role is Role.DECODE else 0
        self.compute_weight = COMPUTE_WEIGHT + COMPUTE_WEIGHT_PER_SEQUENCE * self._decoding
        # Free by the heartbeat.
        self._slots = heartbeat.running_max - heartbeat.running - heartbeat.waiting - heartbeat.overbooked
        used_tokens = heartbeat.kv_blocks_used * heartbeat.engine_block_tokens
        self._tokens = self.kv_tokens_max - used_tokens - heartbeat.overbooked_kv_tokens
        self._age_prompts(heard_s)
        self.refresh()

    def hear_again(self, heard_s: float) -> None:
        """Take a heartbeat that says what the last one said."""
        self.heard_s = heard_s
        self._age_prompts(heard_s)
        self.refresh()

    def place(self, request: str, placed: SoftPlacement) -> None:
        """Count an attempt that was placed here."""
        self.soft[request] = placed
        self._age_prompts(placed.placed_s)
        self._prompts_s += placed.prompt_s
        self.refresh()

    def _age_prompts(self, now_s: float) -> None:
        passed_s = now_s - self._prompts_at_s
        if passed_s > 0:
            self._prompts_s *= exp(-passed_s / PROMPTS_S)
            self._prompts_at_s += passed_s

    def refresh(self) -> None:
        """Compute what decisions read, after a heartbeat or a change of the soft placements."""
        beat, steps, soft, decoding = self.heartbeat, self.steps, self.soft.values(), self._decoding
        self.slots_free = self._slots - len(soft)
        self.slots_lacking = max(0.0, (1 - self.slots_free) / self.running_max)
        """Share of the slots that one more attempt lacks."""
        tokens_free, block_tokens = self._tokens, beat.engine_block_tokens
        for each in soft:
            # Ledgers reserve whole blocks.
            tokens_free -= -(-each.kv_tokens // block_tokens) * block_tokens
        self.tokens_free = tokens_free
        self.kv_share = min(1.0, 1 - self.tokens_free / self.kv_tokens_max) if self.kv_tokens_max > 0 else 1.0
        """Share of the KV that is reserved or in use, at most 1."""
        self.used_share = max(1 - self.slots_free / self.running_max, self.kv_share)
        """Used share of the slots or of the KV, whichever is larger."""
        self.interval_s = steps.token_interval_s(decoding, self.kv_share) if decoding else 0.0
        """Time of the sequences in each step; 0 where none run."""
        self.half_interval_s = self.interval_s / 2
        """What is left on average of a step under way."""
        self.next_interval_s = steps.token_interval_s(decoding + 1, self.kv_share)
        """Token interval with one more sequence, without prompts."""
        # Prompts take turns with decoding, and get as much of the time as lately.
        self.answer_interval_s = self.next_interval_s / (1 - min(self._prompts_s / PROMPTS_S, PROMPTS_SHARE_MAX))
        """Mean token interval of an answer that begins now."""
        token_s = (self.step_s + self.interval_s) / self.step_tokens_max + self.token_s
        queue_s = token_s * beat.prefill_tokens_queued + self.pair_s * beat.prefill_pairs_queued
        until_s = self.heard_s + max(0.0, queue_s - beat.prefill_elapsed_s)
        for each in soft:
            placed_s = each.placed_s
            until_s = (placed_s if placed_s > until_s else until_s) + each.prefill_s
        self.computes_until_s = until_s
        """Instant at which the prompts placed here so far will be computed."""
