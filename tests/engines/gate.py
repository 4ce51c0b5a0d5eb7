"""Files by which a test tells an engine's connector what to do."""

from __future__ import annotations

from pathlib import Path


def read_order(file: Path) -> str:
    """Return what a test asks for; empty if nothing, as when it takes that back at this moment."""
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""
