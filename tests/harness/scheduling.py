"""Assignment of tests to pytest-xdist workers, so that a costly fixture starts once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from xdist.remote import Producer  # pyright: ignore[reportMissingTypeStubs]
from xdist.scheduler import LoadScopeScheduling  # pyright: ignore[reportMissingTypeStubs]


class GroupScheduling(LoadScopeScheduling):
    """Tests of one group go to one worker, the largest group first. xdist's own groups by mark do nothing with pytest
    9.2, where a plug-in can no longer change the ids of tests."""

    def __init__(self, config: pytest.Config, log: Producer, group: Callable[[str], str]) -> None:
        super().__init__(config, log)
        self._group = group

    def _split_scope(self, nodeid: str) -> str:
        return self._group(nodeid)
