"""The benchmark of staging over two real engines, on a CPU: `make test-gpu` runs it on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.staging import measure

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
]
"""vLLM, which loads in this process, warns."""


async def test_it_measures_streams_beside_hand_offs_that_are_staged(tiny_model: Path) -> None:
    """It fails by itself where the prompts beside the streams were not pulled, or not cached."""
    staged, cached, after = await measure(tiny_model, rounds=2, device="cpu")
    assert staged.peers["cached"] == cached.ours > 0
    assert staged.peers["alone"] == cached.peers["alone"] > 0
    assert staged.ours > 0
    # No sign is asked of it: on busy cores, decode's first token may be heard of before prefill's end.
    assert not after.peers, "on a CPU there is no goal"
