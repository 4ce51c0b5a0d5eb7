"""Measured speeds of this worker, as fits that schedulers predict from. Pure: instants are passed in.

An engine computes in steps. A step computes parts of prompts, one token for every running sequence, or both:

    seconds = prompt_step_s              if it computes a part of a prompt
            + prompt_token_s × tokens    of prompts computed
            + prompt_pair_s × pairs      pairs of such a token and a token before it, twice: end² − start² of a prompt
            + decode_step_s              if sequences run
            + sequence_s × sequences
            + kv_s × share of the KV cache in use

A worker does not see steps. It sees windows of busy time, in which it counts what was computed: a window ends with
the prompts that a step completed, and else with the tick of a heartbeat. Sequences that run beside a prompt are part
of its window, so what they cost is not taken for the prompt's.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from baton.messages.workers import PEERS_MAX, PromotionFit, StepFit, TransferFit
from baton.worker.fit import LinearFit

STEP_GUESS: Final = StepFit(
    prompt_step_s=0.01, prompt_token_s=2.5e-5, prompt_pair_s=4e-10, decode_step_s=0.008, sequence_s=1e-4, kv_s=0.01
)
"""Rates of a mid-sized model on one large GPU, until something is measured."""
BYTE_GUESS_S: Final = 2.5e-10
PROMOTED_BYTE_GUESS_S: Final = 1e-10
"""Time per byte of a copy from host memory to the device."""
_SAME_STEP_S: Final = 0.001
"""Outputs of one step reach the worker within this time of each other."""
_DECODE_STEPS_MIN: Final = 3
"""Fewer steps are no sample: a window counts one more or one less than it lasted."""
_TRANSFER_SAMPLE_BYTES_MIN: Final = 64 << 10


@dataclass(slots=True)
class _Window:
    follows_prompt: bool = False
    """Whether its first step may have begun before it, with the end of another prompt."""
    busy_s: float = 0.0
    sequence_s: float = 0.0
    """Integral of the number of running sequences."""
    decoded_tokens: int = 0
    prompt_tokens: int = 0
    prompt_pairs: int = 0
    ended_s: float = math.inf
    """Instant at which its last prompt was complete; infinite while there is none."""
    spoiled: bool = False
    """Whether part of its work is unknown."""

    @property
    def decode_steps(self) -> float:
        return self.decoded_tokens * self.busy_s / self.sequence_s if self.sequence_s else 0.0


class Rates:
    """Rates of one worker; `step_tokens_max` is the engine's, see `EngineFacts`."""

    def __init__(self, step_tokens_max: int) -> None:
        self._step_tokens_max = step_tokens_max
        self._steps = LinearFit(
            (
                STEP_GUESS.prompt_step_s,
                STEP_GUESS.prompt_token_s,
                STEP_GUESS.prompt_pair_s,
                STEP_GUESS.decode_step_s,
                STEP_GUESS.sequence_s,
                STEP_GUESS.kv_s,
            )
        )
        self._transfers: OrderedDict[str, tuple[TransferFit, LinearFit]] = OrderedDict()
        """Peer → what heartbeats tell and the seconds per byte, both of the backend that was used last; the newest
        peer last."""
        self._told: tuple[TransferFit, ...] = ()
        self._promotions = LinearFit((PROMOTED_BYTE_GUESS_S,))
        self._window = _Window()
        self._window_since_s = 0.0
        self._now_s = 0.0
        self._busy_s = 0.0
        self._prefilling = 0
        self._sequences = 0
        self._kv_share = 0.0
        self.output_steps = 0
        """Steps that generated tokens."""
        self._output_step_s = -math.inf
        """Instant of the first output of the newest of them."""

    # ------------------------------------------------------------ events

    def prefill_began(self, now_s: float) -> None:
        """Record that a prompt is to be computed."""
        self._advance(now_s)
        if not self._prefilling:
            self._close()
        self._prefilling += 1

    def prefill_ended(
        self, computed_tokens: int, prompt_tokens: int, now_s: float, *, promotion_s: float = 0.0
    ) -> None:
        """Record that a prompt is done, with 0 computed tokens if it was stopped.

        `promotion_s`: for how long it waited for its prefix to be borrowed and promoted, before it was computed.
        """
        self._advance(now_s)
        self._prefilling -= 1
        window = self._window
        if not self._prefilling and not window.sequence_s:
            # The engine had nothing else to do meanwhile.
            window.busy_s = max(0.0, window.busy_s - promotion_s)
        window.ended_s = now_s
        window.prompt_tokens += computed_tokens
        window.prompt_pairs += prompt_pairs(prompt_tokens, computed_tokens)
        window.spoiled |= not computed_tokens

    def decode_began(self, now_s: float) -> None:
        """Record that a sequence has its first token."""
        self._advance(now_s)
        self._count_step(now_s)
        self._sequences += 1

    def tokens_came(self, tokens: int, now_s: float) -> None:
        """Record further tokens of a sequence."""
        self._advance(now_s)
        self._count_step(now_s)
        self._window.decoded_tokens += tokens

    def decode_ended(self, now_s: float) -> None:
        self._advance(now_s)
        self._sequences -= 1

    def transfer_ended(self, peer: str, backend: str, size_bytes: int, moving_s: float) -> None:
        """Record a pull from a peer and how long its bytes were moving."""
        if size_bytes < _TRANSFER_SAMPLE_BYTES_MIN:
            return
        known = self._transfers.pop(peer, None)
        # Another backend has another speed.
        fit = known[1] if known is not None and known[0].backend == backend else LinearFit((BYTE_GUESS_S,))
        fit.add((float(size_bytes),), moving_s)
        told = TransferFit(
            peer=peer, backend=backend, bytes_per_s=1 / fit.coefficients[0], spread=fit.spread, samples=fit.samples
        )
        self._transfers[peer] = told, fit
        if len(self._transfers) > PEERS_MAX:
            self._transfers.popitem(last=False)
        self._told = tuple(told for told, _ in self._transfers.values())

    def promotion_ended(self, size_bytes: int, moving_s: float) -> None:
        """Record a promotion from the KV pool and how long its bytes were copied."""
        if size_bytes >= _TRANSFER_SAMPLE_BYTES_MIN:
            self._promotions.add((float(size_bytes),), moving_s)

    def tick(self, kv_share: float, now_s: float) -> None:
        """End the window unless a prompt is being computed. `kv_share`: share of the KV cache in use."""
        self._advance(now_s)
        self._kv_share = kv_share
        if not self._prefilling and self._window.decode_steps >= _DECODE_STEPS_MIN:
            self._close()

    # ------------------------------------------------------------ reading

    def steps(self) -> StepFit:
        prompt_step_s, prompt_token_s, prompt_pair_s, decode_step_s, sequence_s, kv_s = self._steps.coefficients
        return StepFit(
            prompt_step_s=prompt_step_s,
            prompt_token_s=prompt_token_s,
            prompt_pair_s=prompt_pair_s,
            decode_step_s=decode_step_s,
            sequence_s=sequence_s,
            kv_s=kv_s,
            spread=self._steps.spread,
            samples=self._steps.samples,
        )

    def transfers(self) -> tuple[TransferFit, ...]:
        return self._told

    def promotion(self) -> PromotionFit:
        fit = self._promotions
        return PromotionFit(bytes_per_s=1 / fit.coefficients[0], spread=fit.spread, samples=fit.samples)

    def prefill_s(self, computed_tokens: int, prompt_tokens: int) -> float:
        """Return the predicted time of a prompt beside the sequences that run now."""
        steps = math.ceil(computed_tokens / self._step_tokens_max)
        prompt = (float(steps), float(computed_tokens), float(prompt_pairs(prompt_tokens, computed_tokens)))
        return self._steps.predict((*prompt, *self._decode_features(steps if self._sequences else 0)))

    def prefill_elapsed_s(self, now_s: float) -> float:
        """Return for how long the oldest prompt has been computed."""
        return max(0.0, now_s - self._window_since_s) if self._prefilling else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second where nothing else runs, in full steps."""
        tokens = float(self._step_tokens_max)
        return tokens / self._steps.predict((1.0, tokens, tokens * tokens, 0.0, 0.0, 0.0))

    @property
    def token_interval_s(self) -> float:
        """Interval between tokens of one sequence at the present batch, without prompts."""
        return self._steps.predict((0.0, 0.0, 0.0, *self._decode_features(1)))

    @property
    def transfer_bytes_per_s(self) -> float:
        """Bandwidth of the newest peer."""
        return self._told[-1].bytes_per_s if self._told else 1 / BYTE_GUESS_S

    def busy_s(self, now_s: float) -> float:
        """Return the time in which the engine had work; an attempt that waits for its pull gives it none."""
        return self._busy_s + (max(0.0, now_s - self._now_s) if self._prefilling or self._sequences else 0.0)

    # ------------------------------------------------------------ windows

    def _decode_features(self, steps: int) -> tuple[float, float, float]:
        return float(steps), float(steps * max(1, self._sequences)), steps * self._kv_share

    def _advance(self, now_s: float) -> None:
        # A step's outputs come one by one: its window ends with the first event after them.
        if now_s - self._window.ended_s > _SAME_STEP_S:
            self._close()
        passed_s, self._now_s = max(0.0, now_s - self._now_s), now_s
        if self._prefilling or self._sequences:
            self._busy_s += passed_s
            self._window.busy_s += passed_s
            self._window.sequence_s += self._sequences * passed_s

    def _count_step(self, now_s: float) -> None:
        if now_s - self._output_step_s > _SAME_STEP_S:
            self.output_steps += 1
            self._output_step_s = now_s

    def _close(self) -> None:
        """Learn from the window and begin the next one."""
        window, self._window = self._window, _Window(follows_prompt=self._prefilling > 0)
        self._window_since_s = self._now_s
        decode_steps = window.decode_steps
        if window.spoiled or not (window.prompt_tokens or decode_steps >= _DECODE_STEPS_MIN):
            return
        steps = window.prompt_tokens / self._step_tokens_max
        features = (
            steps if window.follows_prompt else math.ceil(steps),
            window.prompt_tokens,
            window.prompt_pairs,
            decode_steps,
            window.decoded_tokens,
            decode_steps * self._kv_share,
        )
        self._steps.add(tuple(map(float, features)), window.busy_s)


def prompt_pairs(prompt_tokens: int, computed_tokens: int) -> int:
    """Return end² − start² of a prompt whose last `computed_tokens` are computed."""
    return prompt_tokens**2 - (prompt_tokens - computed_tokens) ** 2
