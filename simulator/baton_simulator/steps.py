"""Step models: how long an engine's step takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol

from baton_simulator.routers.protocol import WorkerSpec


class StepModel(Protocol):
    """Time of one worker's steps. A step computes parts of prompts and one token of each sequence in decode."""

    def prompt_s(self, start: int, end: int) -> float:
        """Return the time for the prompt's tokens from `start` to `end`. Additive: parts sum up to the whole."""
        ...

    def step_s(self, kv_share: float, sequences: int, prompts: int) -> float:
        """Return the rest of the step's time, from the KV share in use and the numbers of sequences and prompts."""
        ...

    def factor(self) -> float:
        """Return the slowness of the next run of equal steps; 1 where the model has no noise."""
        ...


@dataclass(frozen=True, slots=True)
class MockerSteps:
    """The timing of Dynamo's mocker (fitted to one H100 with a model of 8 billion parameters)."""

    def prompt_s(self, start: int, end: int) -> float:
        return (4.21e-7 * (end * end - start * start) + 0.01518 * (end - start)) * 1e-3

    def step_s(self, kv_share: float, sequences: int, prompts: int) -> float:
        decode_ms = max(1.0, (-25.74 * kv_share + 54.01) * kv_share + 5.74) if sequences else 0.0
        return (decode_ms + (16.5 if prompts else 0.0)) * 1e-3

    def factor(self) -> float:
        return 1.0


@dataclass(slots=True)
class RoughSteps:
    """Another engine on uneven hardware, with noise: what predictions are judged against.

    Decode reads the weights once and then KV at a constant bandwidth, until the batch makes it compute-bound; attention
    grows with the 1.1th power of the context. Each run of steps is slower or faster by chance, each worker by `speed`.
    """

    random: Random
    speed: float = 1.0
    noise: float = 0.1
    """Standard deviation of the logarithm of a run's factor."""

    def prompt_s(self, start: int, end: int) -> float:
        return (self._potential_ms(end) - self._potential_ms(start)) * 1e-3

    def step_s(self, kv_share: float, sequences: int, prompts: int) -> float:
        decode_ms = max(7.0 + 28.0 * kv_share, 0.25 * sequences) if sequences else 0.0
        return (decode_ms + 2.0 + (4.0 + 3.0 * prompts if prompts else 0.0)) * 1e-3

    def factor(self) -> float:
        return math.exp(self.random.gauss(0.0, self.noise)) / self.speed

    @staticmethod
    def _potential_ms(tokens: int) -> float:
        return 0.0165 * tokens + 1.1e-6 * tokens**1.9


def mocker_steps(_spec: WorkerSpec, _random: Random) -> StepModel:
    return MockerSteps()


def rough_steps(_spec: WorkerSpec, random: Random) -> StepModel:
    """Return a model of a worker that runs at 70 to 130 % of the usual speed."""
    return RoughSteps(random, speed=random.uniform(0.7, 1.3))


STEPS: Final = {"mocker": mocker_steps, "rough": rough_steps}
