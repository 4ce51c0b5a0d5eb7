"""The online fit of durations."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.worker.fit import LinearFit

TRUTH = (0.0165, 1.5e-5, 4e-10)
GUESS = (0.01, 2.5e-5, 4e-10)


def prompt(random: Random) -> tuple[float, float, float]:
    """Return steps, tokens and pairs of a prompt: most are short, some very long."""
    tokens = int(math.exp(random.uniform(math.log(50), math.log(60_000))))
    return (math.ceil(tokens / 2048), tokens, float(tokens) ** 2)


def truth(features: tuple[float, float, float]) -> float:
    return sum(value * each for value, each in zip(TRUTH, features, strict=True))


def fitted(seed: int, samples: int, *, noise: float = 0.2, pauses: float = 0.0, slow: float = 1.0) -> LinearFit:
    random, fit = Random(seed), LinearFit(GUESS)
    for _ in range(samples):
        features = prompt(random)
        seconds = slow * truth(features) * random.lognormvariate(0.0, noise)
        if random.random() < pauses:
            seconds += 3.0
        fit.add(features, seconds)
    return fit


PROBES = [(1.0, 300.0, 300.0**2), (2.0, 4000.0, 4000.0**2), (15.0, 30_000.0, 30_000.0**2)]


@pytest.mark.parametrize("seed", range(20))
def test_equal_workers_read_alike_under_noise_and_pauses(seed: int) -> None:
    """Two workers of the same speed, each with prompts, noise and pauses of its own."""
    one, other = fitted(seed, 200, pauses=0.03), fitted(seed + 1000, 200, pauses=0.03)
    for probe in PROBES[1:]:
        assert one.predict(probe) == pytest.approx(other.predict(probe), rel=0.15)
        assert one.predict(probe) == pytest.approx(truth(probe), rel=0.15)


def test_the_first_sample_outweighs_the_guess() -> None:
    fit = LinearFit(GUESS)
    features = (1.0, 2000.0, 2000.0**2)
    fit.add(features, 5 * fit.predict(features))
    assert fit.predict(features) == pytest.approx(5 * LinearFit(GUESS).predict(features), rel=0.1)


def test_one_long_pause_moves_little() -> None:
    fit = fitted(1, 100)
    before = fit.predict(PROBES[1])
    fit.add(PROBES[1], 100.0)
    assert fit.predict(PROBES[1]) == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("factor", [0.01, 0.5, 3.0, 100.0])
def test_a_lasting_change_is_followed(factor: float) -> None:
    random, fit = Random(2), fitted(2, 100)
    for _ in range(40):
        features = prompt(random)
        fit.add(features, factor * truth(features) * random.lognormvariate(0.0, 0.1))
    assert fit.predict(PROBES[1]) == pytest.approx(factor * truth(PROBES[1]), rel=0.15)


def test_what_no_sample_speaks_of_follows_the_speed_of_the_first_and_then_stays() -> None:
    fit = LinearFit((0.01, 0.005))
    fit.add((1.0, 0.0), 0.04)
    other = fit.coefficients[1]
    assert other == pytest.approx(0.02, rel=0.25)
    for _ in range(1000):
        fit.add((1.0, 0.0), 0.04 + 0.002 * (_ % 3))
    assert fit.coefficients[1] == pytest.approx(other, rel=0.1)


def test_the_spread_is_that_of_the_noise() -> None:
    assert fitted(3, 400, noise=0.3).spread == pytest.approx(0.3, rel=0.4)
    assert fitted(3, 400, noise=0.05).spread == pytest.approx(0.05, rel=0.4)


durations = st.floats(allow_nan=True, allow_infinity=True)
counts = st.sampled_from([0.0, 1.0, 1e3, 1e9])


@given(st.lists(st.tuples(st.tuples(counts, counts, counts), durations), max_size=60))
def test_no_sample_makes_a_coefficient_negative_or_not_a_number(
    samples: list[tuple[tuple[float, float, float], float]],
) -> None:
    fit = LinearFit(GUESS)
    for features, seconds in samples:
        fit.add(features, seconds)
    assert all(math.isfinite(each) and each > 0 for each in fit.coefficients)
    assert 0 < fit.spread <= 2
