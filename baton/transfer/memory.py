"""The transfer agent's protocol inside one process: for tests and the simulator, without sockets.

A `MemoryFabric` connects the agents that it made. Bytes are really copied between the pools, with the
same watermarks, generations, deadlines and releases as between native agents, so an engine cannot
tell them apart. One thread per fabric does what each native agent's own thread does; or the owner of
a fabric without a thread calls `step`. `cut` separates two agents.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from baton.transfer.memory_agent import SCHEME, MemoryAgent
from baton.transfer.protocol import AgentOptions

_TICK_S: Final = 0.01
"""How late the thread may notice a deadline."""


class MemoryFabric:
    """Makes agents that reach each other, and moves their bytes."""

    def __init__(self, *, now_s: Callable[[], float] = time.monotonic, threaded: bool = True) -> None:
        self.now_s = now_s
        self.changed = threading.Condition(threading.RLock())
        self.agents: dict[str, MemoryAgent] = {}
        self._made = 0
        self._cuts: set[frozenset[str]] = set()
        self._threaded = threaded
        self._thread: threading.Thread | None = None

    def agent(self, options: AgentOptions | None = None) -> MemoryAgent:
        with self.changed:
            self._made += 1
            agent = MemoryAgent(self, f"{SCHEME}{self._made}", options or AgentOptions())
            self.agents[agent.endpoint] = agent
            if self._threaded and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="memory transfer", daemon=True)
                self._thread.start()
            return agent

    def cut(self, one: str, other: str, *, apart: bool = True) -> None:
        """Separate two endpoints, or join them again."""
        with self.changed:
            (self._cuts.add if apart else self._cuts.discard)(frozenset((one, other)))
            self.changed.notify_all()

    def reach(self, one: str, other: str) -> MemoryAgent | None:
        """Return the agent at `other` if `one` can reach it."""
        return None if frozenset((one, other)) in self._cuts else self.agents.get(other)

    def step(self) -> None:
        """Move what is ready, and end what is past its time."""
        with self.changed:
            for agent in list(self.agents.values()):
                agent.step(self.now_s())

    def forget(self, agent: MemoryAgent) -> threading.Thread | None:
        """Remove a closed agent; return the thread to join where it was the last one."""
        with self.changed:
            self.agents.pop(agent.endpoint, None)
            self.changed.notify_all()
            if self.agents:
                return None
            thread, self._thread = self._thread, None
            return thread

    def _run(self) -> None:
        with self.changed:
            while self._thread is threading.current_thread():
                self.step()
                busy = any(agent.is_busy for agent in self.agents.values())
                # Without leases and pulls there is no deadline to keep.
                self.changed.wait(_TICK_S if busy else None)
