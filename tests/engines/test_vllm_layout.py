"""KV blocks that vLLM's own CPU operators filled, taken out and put back by the native library, bit for bit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.transfer.layout import Chunk, Layout, Pool, Table, gather, scatter

WRITER = Path(__file__).with_name("cache_writer.py")
HEADS, TOKENS = 2, 70
PACKINGS = {"vec": "vec", "vec16": "vec", "amx": "amx", "": "plain"}
Data = NDArray[np.uint8]


@dataclass(eq=False)
class Written:
    """A cache as vLLM wrote it, and K and V, `(tokens, heads, bytes)`, as they went in."""

    isa: str
    layout: Layout
    table: Table
    cache: Data
    planes: dict[str, Data]

    def pool(self, cache: Data) -> Pool:
        return Pool(self.layout, [cache.ctypes.data], len(cache), self.layout.block_bytes)

    def chunk(self, plane: str) -> Chunk:
        return Chunk(layer=0, plane=plane, first_token=0, tokens=TOKENS, heads=self.layout.heads)  # pyright: ignore[reportArgumentType]

    def wire(self, plane: str) -> bytes:
        row_bytes = self.layout.block_bytes // self.layout.block_tokens // (1 if self.layout.form == "latent" else 4)
        out = bytearray(self.layout.heads[1] * TOKENS * row_bytes)
        gather(self.pool(self.cache), self.table, self.chunk(plane), out)
        return bytes(out)


def written(folder: Path, *library: str) -> list[Written]:
    out = folder / "blocks.npz"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    subprocess.run([sys.executable, str(WRITER), str(out), *library], check=True, timeout=300, env=environment)
    with np.load(out) as arrays:
        cases: list[dict[str, Any]] = json.loads(str(arrays["cases"]))
        return [
            read(case, {name: arrays[f"{number}.{name}"] for name in ("cache", "k", "v")})
            for number, case in enumerate(cases)
        ]


def read(case: dict[str, Any], arrays: dict[str, Data]) -> Written:
    isa: str = case.pop("isa")
    blocks: list[int] = case.pop("blocks")
    heads, form, planes = (HEADS, "fused", ("k", "v")) if isa else (1, "latent", ("latent",))
    layout = Layout(
        layers=1, kv_heads=heads, order="HND" if isa else "NHD", form=form, packing=PACKINGS[isa], **case
    )  # fmt: skip
    rows = [arrays[name].reshape(TOKENS, heads, -1) for name in "kv"]
    return Written(isa, layout, Table(blocks), arrays["cache"].copy(), dict(zip(planes, rows, strict=False)))


def check_both_ways(case: Written) -> None:
    filled = np.zeros_like(case.cache)
    for plane, rows in case.planes.items():
        wire = case.wire(plane)
        assert wire == rows.swapaxes(0, 1).tobytes(), f"{case.isa}, {case.layout}: {plane} comes out wrong"
        scatter(case.pool(filled), case.table, case.chunk(plane), wire)
    assert np.array_equal(filled, case.cache), f"{case.isa}, {case.layout}: goes in wrong"


def test_blocks_that_vllm_fills_on_this_processor_come_out_and_go_in_unchanged(tmp_path: Path) -> None:
    cases = written(tmp_path)
    assert {(case.isa, case.layout.dtype) for case in cases} >= {("vec", "float32"), ("vec", "bfloat16")}
    for case in cases:
        check_both_ways(case)


def test_blocks_that_vllm_fills_where_there_is_amx_come_out_and_go_in_unchanged(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("vllm")
    library = Path(str(spec and spec.origin)).with_name("_C.abi3.so")
    if " avx512_vnni" not in Path("/proc/cpuinfo").read_text() or not library.exists():
        pytest.skip("vLLM's build for AMX does not load here: run it on a processor with AVX512-VNNI")
    cases = written(tmp_path, str(library))
    float8 = [case for case in cases if case.layout.dtype.startswith("float8")]
    for case in cases:
        if case not in float8:
            check_both_ways(case)
    # vLLM rounds to float8 itself, so what went in is not known; both packings must hold the same.
    vec, amx = float8
    assert (vec.isa, amx.isa) == ("vec", "amx")
    for plane in ("k", "v"):
        assert vec.wire(plane) == amx.wire(plane)
        assert any(vec.wire(plane))
