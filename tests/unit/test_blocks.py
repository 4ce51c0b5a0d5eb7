"""Block ids and model digests, against the PyPI `blake3` package as an oracle."""

from __future__ import annotations

import struct
from pathlib import Path

import baton_native
import pytest
from blake3 import blake3 as oracle
from hypothesis import given
from hypothesis import strategies as st

from baton import blocks
from baton.errors import ConfigurationError

ROOT = blocks.root_key("aa" * 32, "", "tenant")
tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def pack(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def oracle_ids(root: bytes, tokens: list[int], block_tokens: int, parent: bytes = b"") -> list[bytes]:
    """The definition in the text of `baton.blocks`, word by word."""
    previous = parent or bytes(16)
    ids: list[bytes] = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        data = previous + pack(tokens[start : start + block_tokens])
        previous = oracle(data, key=root).digest()[:16]
        ids.append(previous)
    return ids


# Lengths around every boundary of the tree: block (64), chunk (1024), and subtrees of 2, 3, 4, 7, 8 chunks.
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 1023, 1024, 1025, 2048, 2049, 3073, 4096, 7168, 8193, 102400])
def test_blake3_equals_oracle(size: int) -> None:
    data = bytes(index % 251 for index in range(size))
    key = bytes(range(32))
    assert baton_native.blake3(data) == oracle(data).digest()
    assert baton_native.blake3_keyed(key, data) == oracle(data, key=key).digest()


@given(data=st.binary(max_size=9000))
def test_crc32c_instruction_equals_tables(data: bytes) -> None:
    assert baton_native.crc32c(data) == baton_native.crc32c_portable(data)
    middle = len(data) // 3
    assert baton_native.crc32c(data[middle:], baton_native.crc32c(data[:middle])) == baton_native.crc32c(data)


def test_crc32c_check_value() -> None:
    # The check value that the catalogue of CRC algorithms lists for CRC-32/ISCSI.
    assert baton_native.crc32c(b"123456789") == 0xE3069283
    assert baton_native.crc32c_portable(b"123456789") == 0xE3069283


def test_crc32c_lanes_join() -> None:
    data = bytes(index * index % 256 for index in range(100_003))
    assert baton_native.crc32c(data) == baton_native.crc32c_portable(data)


@given(tokens=tokens_lists, block_tokens=st.sampled_from([16, 17, 32, 256]))
def test_ids_equal_oracle(tokens: list[int], block_tokens: int) -> None:
    ids = blocks.split_ids(blocks.hash_blocks(ROOT, pack(tokens), block_tokens))
    assert ids == oracle_ids(ROOT, tokens, block_tokens)


@given(tokens=tokens_lists, cut_blocks=st.integers(0, 12))
def test_ids_continue_from_a_parent(tokens: list[int], cut_blocks: int) -> None:
    whole = blocks.hash_blocks(ROOT, pack(tokens), 16)
    cut = min(cut_blocks, len(tokens) // 16)
    head, tail = tokens[: cut * 16], tokens[cut * 16 :]
    head_ids = blocks.hash_blocks(ROOT, pack(head), 16)
    assert head_ids + blocks.hash_blocks(ROOT, pack(tail), 16, head_ids[-16:]) == whole


def test_ids_depend_on_every_part_of_the_root() -> None:
    tokens = pack(list(range(32)))
    roots = [
        blocks.root_key("aa"),
        blocks.root_key("ab"),
        blocks.root_key("aa", lora="l"),
        blocks.root_key("aa", salt="l"),
    ]
    assert len({blocks.hash_blocks(root, tokens, 32) for root in roots}) == len(roots)
    assert blocks.root_key("aa", "l", "s") == oracle(b"baton/1\0aa\0l\0s").digest()


def test_an_early_token_changes_every_later_id() -> None:
    one, other = list(range(96)), list(range(96))
    other[0] = 7
    first = blocks.split_ids(blocks.hash_blocks(ROOT, pack(one), 32))
    second = blocks.split_ids(blocks.hash_blocks(ROOT, pack(other), 32))
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="16 to 256"):
        blocks.hash_blocks(ROOT, b"", 15)
    with pytest.raises(ValueError, match="32 bytes"):
        blocks.hash_blocks(b"short", b"", 32)
    with pytest.raises(ValueError, match="whole little-endian"):
        blocks.hash_blocks(ROOT, b"abc", 32)
    with pytest.raises(ValueError, match="parent id"):
        blocks.hash_blocks(ROOT, b"", 32, b"abc")
    with pytest.raises(ValueError, match="zero byte"):
        blocks.root_key("a\0b")
    with pytest.raises(ValueError, match="whole number"):
        blocks.split_ids(b"abc")


def make_model(folder: Path, weights: bytes = b"w" * 100) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"layers": 4}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_model_digest_names_content_not_place(tmp_path: Path) -> None:
    one, two = make_model(tmp_path / "one"), make_model(tmp_path / "two")
    digest = blocks.model_digest(one)
    assert digest == blocks.model_digest(str(two))
    assert len(bytes.fromhex(digest)) == 32
    (two / "README.md").write_text("notes")
    (two / "generation_config.json").write_text("{}")
    (two / ".cache").mkdir()
    (two / ".cache" / "x.json").write_text("{}")
    assert digest == blocks.model_digest(two)
    (two / "config.json").write_text('{"layers": 5}')
    assert digest != blocks.model_digest(two)


def test_model_digest_sees_a_change_in_big_weights(tmp_path: Path) -> None:
    size = 20 << 20
    one, two = make_model(tmp_path / "one", bytes(size)), make_model(tmp_path / "two", bytes(size - 1) + b"\1")
    three = make_model(tmp_path / "three", bytes(size + 1))
    assert len({blocks.model_digest(one), blocks.model_digest(two), blocks.model_digest(three)}) == 3


def test_model_digest_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        blocks.model_digest(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match="holds no model"):
        blocks.model_digest(tmp_path)
