"""The identity of engines' KV, so that only engines with equivalent KV hand over to each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.identity import KvIdentity, describe_rope, describe_scales, differing_words

QWEN = KvIdentity(
    model="qwen3",
    digest="5e1f",
    layers=4,
    kv_heads=2,
    dim=64,
    dtype="float32",
    rope="after,default,rope_theta=10000.0",
)


def test_it_is_one_line_of_words() -> None:
    assert str(QWEN) == (
        "model=qwen3 digest=5e1f layers=4 kv_heads=2 dim=64 dtype=float32 scales=none"
        " rope=after,default,rope_theta=10000.0 blocks=described"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"model": "llama"},
        {"digest": "0bad"},
        {"layers": 5},
        {"kv_heads": 1},
        {"dim": 128},
        {"dtype": "bfloat16"},
        {"scales": "0.5/1.0"},
        {"rope": "none"},
        {"blocks": "2x64,inner=neon,tp=1"},
    ],
)
def test_every_difference_is_named_on_both_sides(change: dict[str, Any]) -> None:
    ((name, value),) = change.items()
    ours, theirs = differing_words(str(QWEN), str(replace(QWEN, **change)))
    assert (ours, theirs) == (f"{name}={getattr(QWEN, name)}", f"{name}={value}")


def test_values_stay_one_word_each_and_short() -> None:
    """The text is an agent's fingerprint, which has 1,024 bytes."""
    scales = describe_scales((0.001 * layer, 0.5) for layer in range(80))
    text = str(replace(QWEN, model="two words", scales=scales, rope="x" * 5000))
    assert len(text.split()) == len(str(QWEN).split())
    assert len(text) < 512
    assert text != str(replace(QWEN, model="two words", scales=scales + "1", rope="x" * 5000))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"rope_theta": 10000, "rope_scaling": None}, "after,default,rope_theta=10000.0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "after,default,rope_theta=10000.0"),
        # What other parameters such a model's configuration still has is of no effect.
        (
            {"rope_parameters": {"rope_theta": 1e4, "mscale": 1}, "partial_rotary_factor": None},
            "after,default,rope_theta=10000.0",
        ),
        (
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "after,default,rope_theta=10000.0,partial_rotary_factor=0.5",
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 8}},
            "after,linear,factor=8.0,rope_theta=500000.0",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}},
            "after,linear,factor=8.0,rope_theta=500000.0",
        ),
        (
            # vLLM's name for DeepSeek's scaling, and the model's own.
            {"rope_parameters": {"rope_type": "deepseek_yarn", "factor": 8.0, "rope_theta": 5e5}},
            "after,yarn,factor=8.0,rope_theta=500000.0",
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 8}},
            "after,yarn,factor=8.0,rope_theta=500000.0",
        ),
        (
            {"rope_parameters": {"sliding": {"rope_theta": 1e4}, "full": {"rope_type": "linear", "factor": 8}}},
            "after,full:linear,factor=8.0;sliding:default,rope_theta=10000.0",
        ),
        ({}, "none"),
    ],
)
def test_both_spellings_of_a_rotation_are_one(config: dict[str, Any], text: str) -> None:
    assert describe_rope(config) == text


def test_equal_scales_are_described_once() -> None:
    assert describe_scales([(1.0, 0.5)] * 3) == "1.0/0.5"
    assert describe_scales([(1.0, 0.5), (1.0, 0.25)]) == "1.0/0.5,1.0/0.25"
