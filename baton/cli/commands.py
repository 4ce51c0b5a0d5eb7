"""Subcommands of `baton` from other packages, found through entry points: `baton` imports no service and no simulator.

A package names a module in the entry point group `baton.commands`; the entry point's name is the subcommand's.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Final, Protocol, cast

GROUP: Final = "baton.commands"


class Command(Protocol):
    """The module of a subcommand."""

    SUMMARY: str
    """One line for `baton --help`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, parsed: argparse.Namespace) -> int:
        """Return the exit status. Raises BatonError with one sentence."""
        ...


def find_commands() -> Mapping[str, Command]:
    """Return the installed subcommands by name."""
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return {point.name: cast("Command", point.load()) for point in points}
