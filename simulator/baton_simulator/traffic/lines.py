"""Lines of a trace file, decoded and checked one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from baton.errors import InvalidRequest

T = TypeVar("T")


def malformed(name: str, number: int, why: object) -> InvalidRequest:
    """Return the error for one line of a trace."""
    return InvalidRequest(f"{name}, line {number}: {why}")


def decode(name: str, lines: Iterable[bytes], kind: type[T]) -> Iterator[T]:
    """Yield each line of JSON as a `kind`. Raises InvalidRequest with the line's number."""
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(lines, 1):
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise malformed(name, number, error) from error
