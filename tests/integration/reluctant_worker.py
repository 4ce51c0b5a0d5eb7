"""A decode worker whose first attempt does not get past RESERVED, which lasts microseconds elsewhere.

Started as `python -m tests.integration.reluctant_worker`, with the flags of a decode worker.
"""

from __future__ import annotations

from typing import Final

from baton_decode.config import DecodeSettings

from baton.messages.workers import Role
from baton.worker.attempt import Key
from baton.worker.ledger import Ledger
from baton.worker.process import run_worker

_enter: Final = Ledger.enter
_held: set[Key] = set()


def _hold_the_first(self: Ledger, key: Key) -> bool:
    if not _held:
        _held.add(key)
    return key not in _held and _enter(self, key)


if __name__ == "__main__":
    Ledger.enter = _hold_the_first
    run_worker(Role.DECODE, DecodeSettings)
