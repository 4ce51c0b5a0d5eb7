"""Token bucket of one limit per minute, as one number: the instant at which it will be full again. Pure.

A full bucket holds one minute of the limit and refills at the limit's rate. What is taken moves `full_at_us` on, by
the time in which it is refilled:

                 now              full_at          now + 60 s
    ─────────────┼────────────────┼────────────────┼──────▶  the bucket holds what refills from full_at to now + 60 s

Something fits if `full_at` stays at or before now + 60 s. A settlement may move it beyond: the bucket is then in debt.
This is GCRA, the generic cell rate algorithm (ITU-T I.371), with costs. All times are whole microseconds.
"""

from __future__ import annotations

from typing import Final

import msgspec

MINUTE_US: Final = 60_000_000


class Taken(msgspec.Struct, frozen=True):
    """Answer of a bucket."""

    fits: bool
    full_in_us: int
    """Time until the bucket is full, after what was taken."""


def cost_us(amount: int, per_minute: int) -> int:
    """Return the time in which a bucket refills by `amount`."""
    # Rounded down, so that the whole limit fits into a full bucket.
    return amount * MINUTE_US // per_minute


def take(full_at_us: int, now_us: int, cost: int) -> tuple[int, Taken]:
    """Return when the bucket is full and what it answers to a cost."""
    full_at_us = max(full_at_us, now_us)
    fits = full_at_us + cost <= now_us + MINUTE_US
    full_at_us += cost if fits else 0
    return full_at_us, Taken(fits, full_at_us - now_us)


def settle(full_at_us: int, now_us: int, change_us: int) -> int:
    """Return when the bucket is full, after more than was taken turned out to be used, or less (`change_us` < 0)."""
    return max(full_at_us, now_us) + change_us


def left(taken: Taken, per_minute: int) -> int:
    """Return how much the bucket holds."""
    return max(0, MINUTE_US - taken.full_in_us) * per_minute // MINUTE_US


def wait_s(taken: Taken, cost: int) -> float:
    """Return the time until a refused cost fits, if nothing else is taken."""
    return max(0, taken.full_in_us + cost - MINUTE_US) / 1e6
