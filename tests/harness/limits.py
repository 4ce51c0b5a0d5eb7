"""Limits of waits for a state, and of work."""

import gc
import time
from typing import Final, Self

HANG_S: Final = 60.0
"""What only a hang exceeds, on the slowest of machines. A test whose claim is a time states its own limit."""
START_S: Final = 300.0
"""The same for the start of engines, which load one after the other."""
FREED_S: Final = 20.0
"""Time for freeing what a request held. A lease that is forgotten lives longer (`unclaimed_ttl_s`)."""


class ProcessorTime:
    """Measures a block in processor time, for bounds that only another order of growth exceeds.

    A collection of garbage would look at all objects of the test process, so none runs meanwhile.
    """

    taken_s = 0.0

    def __enter__(self) -> Self:
        gc.disable()
        self._began_s = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.taken_s = time.process_time() - self._began_s
        gc.enable()
