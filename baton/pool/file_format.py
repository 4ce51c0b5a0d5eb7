"""Format of a KV file, one for each rank: a header page, then slots of equal size. Pure.

    | magic, what is in the file | slot 0 | slot 1 | … |          all of them begin at a multiple of 4 KiB
                                  └ header page | block, all layers |

A slot's header names its block, the file's identity, and the checksum of the block. It has a checksum of its own. Both
are written together with the block and nothing orders the parts of a write, so whatever a crash tears, either a header
is not valid, or the block differs from what it says. Such a slot counts as free.

    bytes   0      8          12      16         32    48       64              68     72
            magic  checksum   index   identity   key   parent   block checksum  units  ids of the units, 16 bytes each
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from baton.blocks import ID_BYTES

PAGE_BYTES: Final = 4096
FILE_MAGIC: Final = b"BATONKVF"
SLOT_MAGIC: Final = b"BATONKV1"

_CHECKSUM: Final = struct.Struct("<I")
_CHECKSUM_AT: Final = len(SLOT_MAGIC)
_FIELDS: Final = struct.Struct("<I16s16s16sII")
_FIELDS_AT: Final = _CHECKSUM_AT + _CHECKSUM.size
_UNITS_AT: Final = _FIELDS_AT + _FIELDS.size
UNITS_MAX: Final = (PAGE_BYTES - _UNITS_AT) // ID_BYTES
"""Canonical blocks that one block of the engine may have."""

Checksum = Callable[[bytes], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileBlock:
    """Name of a block in a KV file."""

    key: bytes
    parent: bytes
    """Key of the block before it; empty at the start of a prompt."""
    index: int
    """Number of the block in its prompt."""
    units: tuple[bytes, ...]
    """Ids of its canonical blocks; the last one is the key."""


@dataclass(frozen=True, slots=True)
class SlotHeader:
    block: FileBlock
    checksum: int
    """CRC-32C of the block's bytes."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Places in a file whose slots have `block_bytes` each, a multiple of a page."""

    block_bytes: int

    @property
    def slot_bytes(self) -> int:
        return PAGE_BYTES + self.block_bytes

    def slots(self, budget_bytes: int) -> int:
        return max(budget_bytes - PAGE_BYTES, 0) // self.slot_bytes

    def offset(self, slot: int) -> int:
        return PAGE_BYTES + slot * self.slot_bytes

    def file_bytes(self, slots: int) -> int:
        return self.offset(slots)


def identity_digest(content: str) -> bytes:
    """Return the part of a slot's header that stands for the file's `content`."""
    return blake2b(content.encode(), digest_size=ID_BYTES).digest()


def encode_file_header(content: str) -> bytes:
    """Return the first page. `content` says what the blocks are: their KV identity, layout and size."""
    text = content.encode()
    page = FILE_MAGIC + len(text).to_bytes(4, "little") + text
    if len(page) > PAGE_BYTES:
        raise ValueError(f"{len(text)} bytes that describe a KV file do not fit into its first page")
    return page.ljust(PAGE_BYTES, b"\0")


def decode_file_header(page: bytes) -> str | None:
    """Return a file's content; None if this is no KV file's first page."""
    if not page.startswith(FILE_MAGIC):
        return None
    at = len(FILE_MAGIC) + 4
    size = int.from_bytes(page[len(FILE_MAGIC) : at], "little")
    return page[at : at + size].decode(errors="replace")


def encode_slot_header(header: SlotHeader, identity: bytes, checksum: Checksum) -> bytes:
    block = header.block
    if not 0 < len(block.units) <= UNITS_MAX:
        raise ValueError(f"a block of {len(block.units)} canonical blocks does not fit into a slot's header")
    fields = _FIELDS.pack(block.index, identity, block.key, block.parent, header.checksum, len(block.units))
    checked = fields + b"".join(block.units)
    return (SLOT_MAGIC + _CHECKSUM.pack(checksum(checked)) + checked).ljust(PAGE_BYTES, b"\0")


def decode_slot_header(page: bytes, identity: bytes, checksum: Checksum) -> SlotHeader | None:
    """Return a slot's header; None if it is not valid, or of a file with another content."""
    if len(page) != PAGE_BYTES or not page.startswith(SLOT_MAGIC):
        return None
    index, found, key, parent, block_checksum, units = _FIELDS.unpack_from(page, _FIELDS_AT)
    if found != identity or not 0 < units <= UNITS_MAX:
        return None
    end = _UNITS_AT + units * ID_BYTES
    (header_checksum,) = _CHECKSUM.unpack_from(page, _CHECKSUM_AT)
    if checksum(page[_FIELDS_AT:end]) != header_checksum:
        return None
    ids = tuple(page[at : at + ID_BYTES] for at in range(_UNITS_AT, end, ID_BYTES))
    block = FileBlock(key=key, parent=parent if index else b"", index=index, units=ids)
    return SlotHeader(block, block_checksum)
