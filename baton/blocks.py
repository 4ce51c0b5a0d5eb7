"""Block identity: which prefix a block of tokens is, the same in every service.

A canonical block is `BLOCK_TOKENS_DEFAULT` tokens (configurable, 16 to 256). Its id is 128 bits, chained and keyed:

    root  = BLAKE3("baton/1" || 0 || model digest || 0 || LoRA name || 0 || tenant salt)          32 bytes
    id[0] = BLAKE3-keyed(root, 16 zero bytes || tokens[0:B]      as uint32 LE)[:16]
    id[i] = BLAKE3-keyed(root, id[i-1]       || tokens[iB:(i+1)B] as uint32 LE)[:16]

so equal ids mean equal model, tenant and whole prefix, and an id cannot be guessed without the salt.
Only full blocks have ids. Source: the BLAKE3 paper (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020).
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Final

import baton_native

from baton.errors import ConfigurationError

BLOCK_TOKENS_DEFAULT: Final = 32
BLOCK_TOKENS_MIN: Final = 16
BLOCK_TOKENS_MAX: Final = 256
ID_BYTES: Final = 16

_WHOLE_FILE_BYTES_MAX: Final = 16 << 20
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 64 << 10
_IDENTITY_SUFFIXES: Final = frozenset({".json", ".txt", ".model", ".jinja", ".safetensors", ".bin", ".pt", ".gguf"})
_NOT_IDENTITY: Final = frozenset({"generation_config.json", "readme.txt"})


def root_key(model_digest: str, lora: str = "", salt: str = "") -> bytes:
    """Return the key of all ids of one model, LoRA adapter and tenant."""
    parts = (b"baton/1", model_digest.encode(), lora.encode(), salt.encode())
    if any(b"\0" in part for part in parts):
        raise ValueError("a model digest, LoRA name or salt must not contain a zero byte: it separates them")
    return baton_native.blake3(b"\0".join(parts))


def hash_blocks(root: bytes, packed_tokens: bytes, block_tokens: int, parent: bytes = b"") -> bytes:
    """Return the ids of all full blocks of `packed_tokens` (uint32 LE), `ID_BYTES` each, concatenated.

    `parent` is the id of the block before the first, empty at the start of a prompt.
    """
    if not BLOCK_TOKENS_MIN <= block_tokens <= BLOCK_TOKENS_MAX:
        raise ValueError(f"a block has {BLOCK_TOKENS_MIN} to {BLOCK_TOKENS_MAX} tokens, not {block_tokens}")
    return baton_native.hash_blocks(root, packed_tokens, block_tokens, parent)


def split_ids(ids: bytes) -> list[bytes]:
    """Return concatenated ids one by one."""
    if len(ids) % ID_BYTES:
        raise ValueError(f"{len(ids)} bytes are no whole number of block ids")
    return [ids[start : start + ID_BYTES] for start in range(0, len(ids), ID_BYTES)]


def model_digest(path: str | Path) -> str:
    """Return the identity of the model in a folder: a hex digest over its configuration, tokenizer and weights.

    Files count by relative name, size and content. Of a file above 16 MiB only 64 evenly spaced samples
    of 64 KiB are read, the first and the last bytes among them: training moves nearly every weight, and
    the header of a safetensors file stands first, so two real checkpoints never agree on all samples.
    The digest guards against mistakes, not against someone who edits weights between the samples.
    `generation_config.json` is left out: it names sampling defaults, which do not change the KV cache.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigurationError(f"the model folder {folder} does not exist")
    # Sorted, because the order in which a file system lists names differs between machines.
    files = sorted(entry for entry in folder.rglob("*") if _is_identity(entry, folder))
    if not files:
        raise ConfigurationError(f"the folder {folder} holds no model: no configuration, tokenizer or weights")
    listing = bytearray(b"baton/model/1\0")
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            content = baton_native.blake3(_content(stream, size))
        listing += f"{file.relative_to(folder).as_posix()}\0{size}\0".encode() + content
    return baton_native.blake3(bytes(listing)).hex()


def _is_identity(entry: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in entry.relative_to(folder).parts)
    return (
        not hidden
        and entry.suffix.lower() in _IDENTITY_SUFFIXES
        and entry.name.lower() not in _NOT_IDENTITY
        and entry.is_file()
    )


def _content(stream: BinaryIO, size: int) -> bytes:
    if size <= _WHOLE_FILE_BYTES_MAX:
        return stream.read()
    samples = bytearray()
    for index in range(_SAMPLES):
        stream.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
        samples += stream.read(_SAMPLE_BYTES)
    return bytes(samples)
