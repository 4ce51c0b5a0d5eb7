"""The pool's eviction policies against libCacheSim's, and S3-FIFO against LRU, on Mooncake's conversation trace."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from baton_simulator.traffic.library import load

from baton.pool.policy import SMALL_SHARE, EvictionPolicy, Lru, PolicyName, S3Fifo
from benchmarks.pool_replay import hit_rate, scanned

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-libcachesim" / "bin" / "python"
PROGRAM = ROOT / "tests" / "harness" / "libcachesim_hits.py"
SLOTS = (3_000, 10_000, 30_000)
DIFFERENCE_MAX = 0.005
MARGIN = 0.01

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


def prompts() -> Sequence[Sequence[int]]:
    return [request.blocks for request in load("conversation", 1).requests]


def make_fixed(name: PolicyName, slots: int) -> EvictionPolicy[int]:
    """Return a policy as the library has it: S3-FIFO with fixed shares."""
    return S3Fifo(slots, adapts=False) if name is PolicyName.S3_FIFO else Lru()


def own_hit_rate(name: PolicyName, slots: int, keys: Sequence[int]) -> float:
    """Return the hit rate of a cache of single blocks."""
    policy, stored, hits = make_fixed(name, slots), set[int](), 0
    for key in keys:
        if key in stored:
            policy.touch(key)
            hits += 1
            continue
        if len(stored) == slots:
            victim = policy.evict(lambda _: False)
            assert victim is not None
            stored.remove(victim)
        policy.insert(key)
        stored.add(key)
    return hits / len(keys)


@pytest.mark.parametrize("scans", [False, True])
def test_policies_hit_as_often_as_libcachesims(scans: bool) -> None:
    if not PYTHON.exists():
        pytest.skip("libCacheSim is not installed: `make environment-libcachesim` installs it")
    asked_for = scanned(prompts()) if scans else prompts()
    keys = [block for prompt in asked_for for block in prompt]
    asked = json.dumps({"keys": keys, "slots": SLOTS, "small_share": SMALL_SHARE})
    ended = subprocess.run([PYTHON, PROGRAM], input=asked, capture_output=True, text=True, check=True)
    expected = json.loads(ended.stdout)
    for name in PolicyName:
        own = [own_hit_rate(name, slots, keys) for slots in SLOTS]
        print(f"{name}: {own}, libCacheSim's {expected[name]}")
        assert own == pytest.approx(expected[name], abs=DIFFERENCE_MAX)


@pytest.mark.parametrize(
    ("slots", "scans", "margin"),
    [
        *((slots, False, -MARGIN) for slots in SLOTS),
        *((slots, True, MARGIN) for slots in SLOTS),
    ],
)
def test_s3_fifo_withstands_scans_and_loses_little_without(slots: int, scans: bool, margin: float) -> None:
    rates = {name: hit_rate(prompts(), slots, name, scans=scans) for name in PolicyName}
    print(rates)
    assert rates[PolicyName.S3_FIFO] - rates[PolicyName.LRU] >= margin
