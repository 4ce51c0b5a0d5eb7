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
    """What must fail: the model, or the C++ tests whose names contain this."""
