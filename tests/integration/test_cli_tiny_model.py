"""The tiny model: always the same, whole or absent, and readable by those who will read it."""

# safetensors and transformers leave most of their types out.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from baton.cli import tiny_model
from baton.cli.tiny_model import VOCABULARY, make_tiny_model

# Models are made again and again here, which takes a while where others compute too.


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(folder)
    return folder


@pytest.fixture
def known_tokenizer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the tokenizer that was made before: its training is nearly all that making a model takes."""

    def copy(folder: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(model / name, folder)

    monkeypatch.setattr(tiny_model, "_write_tokenizer", copy)


def test_made_twice_it_is_the_same(model: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "again")
    assert digest(tmp_path / "again") == digest(model)


@pytest.mark.usefixtures("known_tokenizer")
def test_another_seed_gives_other_weights(model: Path, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "other", seed=1)
    assert digest(tmp_path / "other")["model.safetensors"] != digest(model)["model.safetensors"]
    assert digest(tmp_path / "other")["config.json"] == digest(model)["config.json"]


def test_a_model_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    make_tiny_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.usefixtures("known_tokenizer")
def test_an_interrupted_making_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_model, "_write_weights", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_tiny_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_every_token_has_a_row_and_text_survives(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCABULARY == json.loads((model / "config.json").read_text())["vocab_size"]
    for text in ("Hello, world!", "naïve café — 東京 🙂", "def f(x):\n\treturn x"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_transformers_reads_it_with_its_chat_template(model: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer  # It takes a second, of each process that collects tests.

    tokenizer = AutoTokenizer.from_pretrained(str(model))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"
    config = AutoConfig.from_pretrained(str(model))
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (4, 2, 64)


@pytest.mark.usefixtures("known_tokenizer")
def test_float32_and_bfloat16_hold_the_same_weights(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "wide", arch="llama", dtype="float32")
    make_tiny_model(tmp_path / "narrow", arch="llama")
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    narrow = dict(deserialize((tmp_path / "narrow" / "model.safetensors").read_bytes()))
    assert wide.keys() == narrow.keys()
    for name, values in wide.items():
        bits = np.frombuffer(narrow[name]["data"], np.uint16).astype(np.uint32) << 16
        np.testing.assert_allclose(bits.view(np.float32).reshape(values.shape), values, rtol=2**-8)


def nearest_bfloat16(value: float) -> int:
    """Find the nearest bfloat16 by trying the neighbours; ties go to the even one."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    candidates = [bits >> 16, (bits >> 16) + 1]
    values = [struct.unpack("<f", struct.pack("<I", candidate << 16))[0] for candidate in candidates]
    return min(zip(candidates, values, strict=True), key=lambda pair: (abs(pair[1] - value), pair[0] & 1))[0]


@given(st.floats(min_value=-1e6, max_value=1e6, width=32))
def test_rounding_to_bfloat16_is_to_the_nearest(value: float) -> None:
    rounded = tiny_model._bfloat16_bytes(np.array([value], np.float32))  # pyright: ignore[reportPrivateUsage]
    assert int.from_bytes(rounded, "little") == nearest_bfloat16(value)
