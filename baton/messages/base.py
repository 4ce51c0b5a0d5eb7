"""Base of all messages on the bus, and the parts that many of them contain.

Messages are frozen tagged structs in MessagePack maps. Fields may be added with defaults; the meaning of a field never
changes. Token ids travel packed, as little-endian uint32 (`pack_tokens`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from baton.errors import BatonError, MalformedMessage, error_from_code

TOKEN_BYTES: Final = 4
PARAMETERS_MAX: Final = 64
PARAMETER_CHARACTERS_MAX: Final = 64
ParameterName = Annotated[str, Meta(min_length=1, max_length=PARAMETER_CHARACTERS_MAX)]
"""One of `Sampling.parameters`."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="t", omit_defaults=True):
    """Base of all messages that cross the bus."""


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the structs inside messages."""


class Context(Part, frozen=True, kw_only=True):
    """The attempt that a message belongs to, the time left for it to make progress, and its trace."""

    request: str
    attempt: int = 0
    budget_s: float
    """Time left: until the answer's first token, of the request's deadline; after it, of the progress limit."""
    trace: str = ""
    """W3C `traceparent` of the span that sent this message; empty when the request is not traced."""


class ErrorReport(Part, frozen=True, kw_only=True):
    """A failure that crosses the bus: `code` of the class in `baton.errors`, and its sentence."""

    code: str
    detail: str
    retry_after_s: float | None = None
    param: str | None = None

    @classmethod
    def of(cls, error: BatonError) -> ErrorReport:
        return cls(code=error.code, detail=error.detail, retry_after_s=error.retry_after_s, param=error.param)

    def to_error(self) -> BatonError:
        return error_from_code(self.code, self.detail, retry_after_s=self.retry_after_s, param=self.param)


class WorkerAddress(Part, frozen=True, kw_only=True):
    """Address of one generation of a worker. A message for an older `generation` or `role_epoch` is refused."""

    worker: str
    generation: int
    role_epoch: int = 0
    """Number of changes of role within the generation."""
    agents: tuple[str, ...] = ()
    """Endpoint of the transfer agent of each tensor-parallel rank, opaque outside `baton.transfer`."""


class Refused(Message, tag="refused", frozen=True, kw_only=True):
    """Negative answer to any request on the bus."""

    error: ErrorReport


class Lease(Message, tag="lease", frozen=True, kw_only=True):
    """Entry in a bucket that names the one process which may do something. The holder renews it by putting it again."""

    holder: str


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian uint32. Raises MalformedMessage for an id outside uint32."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise MalformedMessage(f"a token id does not fit 32 bits: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Return the token ids in `packed`. Raises MalformedMessage where its length is no multiple of 4."""
    if len(packed) == TOKEN_BYTES:
        return [int.from_bytes(packed, "little")]  # Most frames hold one token.
    if len(packed) % TOKEN_BYTES:
        raise MalformedMessage(f"{len(packed)} bytes are no whole number of packed token ids")
    tokens = array("I", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()
