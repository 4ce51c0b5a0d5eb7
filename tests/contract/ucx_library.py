"""The location of the tests' UCX."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

ENVIRONMENT = Path(__file__).parents[2] / ".venv-ucx"


def ucx_library() -> str:
    """Return the library of `.venv-ucx`, or the system's; skip the test if there is none."""
    for library in ENVIRONMENT.glob("lib/python*/site-packages/libucx/lib/libucp.so.0"):
        return str(library)
    try:
        ctypes.CDLL("libucp.so.0")
    except OSError:
        pytest.skip("UCX is not installed here: `make environment-ucx` installs it, given PyPI")
    return "libucp.so.0"
