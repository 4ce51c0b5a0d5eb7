"""The layout that vLLM's connector declares for its cache, and the cases in which it declares none."""

from __future__ import annotations

from typing import Any

import pytest

from baton.connectors.cache_layout import FLOAT8, describe_cache
from baton.transfer.layout import Layout


def describe(**changes: Any) -> Layout | None:
    return describe_cache(**{**LLAMA, **changes})


LLAMA: dict[str, Any] = {
    "layers": 32,
    "kv_heads": 8,
    "dim": 128,
    "dtype": "bfloat16",
    "isa": "amx",
    "order": "HND",
    "latent": False,
    "block_tokens": 32,
    "block_bytes": 2 * 4 * 32 * 128 * 2,
    "tp_rank": 1,
    "tp_size": 2,
}


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_a_cache_on_a_gpu(order: str) -> None:
    assert str(describe(isa="plain", order=order)) == (
        f"layers=32 kv_heads=8 dim=128 dtype=bfloat16 order={order} form=fused packing=plain block_tokens=32 tp=1/2"
    )


@pytest.mark.parametrize(("isa", "packing"), [("amx", "amx"), ("vec", "vec"), ("vec16", "vec")])
def test_a_packed_cache(isa: str, packing: str) -> None:
    assert str(describe(isa=isa)) == (
        f"layers=32 kv_heads=8 dim=128 dtype=bfloat16 order=HND form=fused packing={packing} block_tokens=32 tp=1/2"
    )


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_cache_of_eight_bits(name: str) -> None:
    layout = describe(dtype=FLOAT8[name], block_bytes=2 * 4 * 32 * 128)
    assert layout is not None
    assert "dtype=float8_e4m3 " in str(layout)


def test_latent_rows() -> None:
    layout = describe(latent=True, kv_heads=16, dim=576, isa="unknown", block_bytes=32 * 576 * 2)
    assert str(layout) == (
        "layers=32 kv_heads=1 dim=576 dtype=bfloat16 order=NHD form=latent packing=plain block_tokens=32 tp=1/2"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"isa": "neon"},
        {"dtype": "uint8"},
        {"dtype": "float8_e4m3fn"},
        {"kv_heads": 3},
        {"block_bytes": 2 * 4 * 32 * 128 * 2 + 64},
        {"block_tokens": 24},
    ],
)
def test_what_is_not_described(change: dict[str, Any]) -> None:
    assert describe(**change) is None
