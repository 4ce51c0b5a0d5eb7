"""Words of an engine's error that a client gets."""

from __future__ import annotations

import re
from typing import Final

_PLACE: Final = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: ")
"""Time and place in its source that xgrammar puts before its errors."""


def sentence_of(error: object) -> str:
    """Return the first line of what an engine says, without a place in a source file."""
    return _PLACE.sub("", str(error).partition("\n")[0])
