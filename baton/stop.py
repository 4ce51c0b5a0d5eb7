"""Shutdown of a service's process: the first SIGTERM or SIGINT asks it to drain, the second ends it at once."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Final

log = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
EXIT_FAILED: Final = 1
EXIT_MISCONFIGURED: Final = 2


class Stop:
    """Request to stop, set by signals."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.serving = False
        """Whether there is something to drain, set by the service; until then the first signal ends it at once."""

    async def watch(self, serve: Callable[[Stop], Awaitable[None]]) -> None:
        """Run `serve`, which returns once it has drained; cancel it when a signal ends it at once."""
        task = asyncio.current_task()
        assert task is not None

        def on_signal() -> None:
            drains = self.serving and not self.asked.is_set()
            self.asked.set()
            if not drains:
                task.cancel()

        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        try:
            await serve(self)
        except asyncio.CancelledError:
            if not self.asked.is_set():
                raise
            log.info("stopped at once, as asked")
