"""Faults that the C++ tests must find; see mutations.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    text: str
    replacement: str
    test: str = "model"
    """The test that must fail: `model`, or a part of the names of C++ tests."""
