"""Connection between an engine's scheduler processes and our streaming process, for engines without one of their own.

vLLM carries our reports in its own messages; SGLang does not. So its scheduler process, one for each rank, opens a
connection to a socket of ours, whose abstract name it finds in its environment. Both ends know the key that Python
gives to a process and to those that it spawns, and check it first. Messages are MessagePack.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import uuid
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Final, cast

import msgspec

from baton.connectors.handoff import TransferReport
from baton.transfer import AgentOptions, TransferFaults

ADDRESS_VARIABLE: Final = "BATON_ENGINE_LINK"
HANDOFF_PARAMETER: Final = "baton"
"""Key of a request's `Handoff`, as JSON, in the parameters that SGLang passes on unread (`custom_params`)."""
LOAN_PARAMETER: Final = "baton_loan"
"""Key of a request's `Loan` there, as JSON."""
TOKEN_TIME_PARAMETER: Final = "baton_computing_token_s"
"""Key of `EngineRequest.computing_token_s` there."""
DELIVERED_PARAMETER: Final = "baton_delivered_tokens"
"""Key of `Sampling.delivered_tokens` there."""
KV_DID_NOT_ARRIVE: Final = "the prompt's KV did not arrive"
"""SGLang's error for a request whose pull failed; the `StepReport` before it holds the reason."""
SETUP_TIMEOUT_S: Final = 30.0


class Setup(msgspec.Struct, tag="setup", frozen=True, kw_only=True):
    """First message of our process."""

    agent: AgentOptions | None
    """None: the engine does not hand off."""
    model_digest: str
    kv_pool_bytes: int = 0
    """0: no KV pool."""
    staging_tokens: int | None = None
    """Tokens of hand-offs that are staged at a time, 0 for the default; None: KV is not staged."""
    gpu_peers: bool = False
    """Whether peers' GPUs read the cache itself, where it is staged for others."""
    kv_file: str = ""
    """Path of the pool's file; empty: none."""
    kv_file_bytes: int = 0


class EventsHeard(msgspec.Struct, tag="events_heard", frozen=True):
    """Word that our process listens to the engine's events."""


class EndLease(msgspec.Struct, tag="end_lease", frozen=True, kw_only=True):
    key: bytes


class LendPrefix(msgspec.Struct, tag="lend", frozen=True, kw_only=True):
    """Order to lend what the KV pool holds; see `baton.engines.engine.Engine.lend`. Answered by `PrefixLent`."""

    key: bytes
    blocks: bytes
    sink_ranks: int


class SetFaults(msgspec.Struct, tag="set_faults", frozen=True, kw_only=True):
    faults: TransferFaults
    rank: int | None = None
    """None: on all ranks."""


class AskStats(msgspec.Struct, tag="ask_stats", frozen=True, kw_only=True):
    """Request for `Stats`, for tests and benchmarks."""


Order = Setup | EventsHeard | EndLease | LendPrefix | SetFaults | AskStats


class Joined(msgspec.Struct, tag="joined", frozen=True, kw_only=True):
    """First message of a scheduler process."""

    rank: int


class Opened(msgspec.Struct, tag="opened", frozen=True, kw_only=True):
    """The engine is loaded on this rank."""

    version: str
    kv_identity: str
    """See `baton.identity`."""
    endpoint: str
    """Address of the rank's agent; empty: it has none."""
    block_tokens: int
    blocks: int
    pool_blocks: int
    """Slots of the KV pool; 0: there is none."""
    pool_endpoint: str = ""
    """Address of the pool's agent."""
    block_bytes: int
    """Size of a block on this rank, all layers."""
    running_max: int
    step_tokens_max: int
    """Prompt tokens that one step computes at most."""
    context_tokens_max: int
    vocabulary: int
    grammars: bool
    """Whether outputs can be constrained by a schema."""


class Failed(msgspec.Struct, tag="failed", frozen=True, kw_only=True):
    """Last message of a process that fails."""

    reason: str


class PrefixLent(msgspec.Struct, tag="lent", frozen=True, kw_only=True):
    key: bytes
    tokens: int


class Stats(msgspec.Struct, tag="stats", frozen=True, kw_only=True):
    figures: dict[str, int]
    layers_arrived: dict[str, int]


class RankReport(msgspec.Struct, tag="rank", frozen=True, kw_only=True):
    """Transfers of a rank other than the first, sent before the ranks agree on what has ended."""

    transfers: TransferReport


class StepReport(msgspec.Struct, tag="step", frozen=True, kw_only=True):
    """State of the first rank's scheduler after a step; sent when something has changed, before the step's tokens."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_pulled: int = 0
    preemptions: int = 0
    begun: tuple[tuple[bytes, float], ...] = ()
    """Keys of attempts first computed in this step, with the instant on this machine's monotonic clock."""
    transfers: TransferReport | None = None


Report = Joined | Opened | Failed | PrefixLent | Stats | RankReport | StepReport

_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Order)
_reports = msgspec.msgpack.Decoder(Report)


class SchedulerEnd:
    """The end in the engine's scheduler process."""

    def __init__(self, rank: int) -> None:
        address = os.environ.get(ADDRESS_VARIABLE, "")
        if not address:
            raise RuntimeError(f"{ADDRESS_VARIABLE} is not set: this process was not started by Baton")
        self._connection = cast("Connection", Client("\0" + address, "AF_UNIX", authkey=_process_key()))
        self.tell(Joined(rank=rank))

    def fileno(self) -> int:
        return self._connection.fileno()

    def setup(self) -> Setup:
        """Return the first message of our process. Raises RuntimeError if it does not come."""
        if not self._connection.poll(SETUP_TIMEOUT_S):
            raise RuntimeError(f"no settings came within {SETUP_TIMEOUT_S:g} s")
        order = _orders.decode(self._connection.recv_bytes())
        assert isinstance(order, Setup)
        return order

    def orders(self) -> list[Order]:
        """Take the orders that have arrived. Raises EOFError once our process is gone."""
        orders: list[Order] = []
        while self._connection.poll(0):
            orders.append(_orders.decode(self._connection.recv_bytes()))
        return orders

    def tell(self, report: Report) -> None:
        # A process that is gone needs no report, and this one will be ended with it.
        with suppress(OSError):
            self._connection.send_bytes(_encoder.encode(report))


class HostEnd:
    """The end in our process, of as many connections as there are ranks. Belongs to one thread, but for `address`."""

    def __init__(self, ranks: int) -> None:
        self.address = f"baton-engine-{uuid.uuid4().hex}"
        self._ranks = ranks
        self._listener = Listener("\0" + self.address, "AF_UNIX", authkey=_process_key())
        self._connections: dict[int, Connection] = {}

    def accept(self, setup: Setup) -> None:
        """Wait for the scheduler processes, and send each `setup`.

        Raises OSError when `close` ends the wait, EOFError if a process ends meanwhile.
        """
        for _ in range(self._ranks):
            connection = cast("Connection", self._listener.accept())
            joined = _reports.decode(connection.recv_bytes())
            assert isinstance(joined, Joined)
            self._connections[joined.rank] = connection
            connection.send_bytes(_encoder.encode(setup))

    def filenos(self) -> list[int]:
        return [connection.fileno() for connection in self._connections.values()]

    def tell(self, order: Order) -> None:
        """Send an order to all ranks. The first one comes last: it wakes the others, which then have it, too."""
        for _, connection in sorted(self._connections.items(), reverse=True):
            with suppress(OSError):
                connection.send_bytes(_encoder.encode(order))

    def reports(self) -> list[tuple[int, Report]]:
        """Take the reports that have arrived, with their ranks; a process that is gone sends nothing more."""
        reports: list[tuple[int, Report]] = []
        for rank, connection in sorted(self._connections.items()):
            with suppress(EOFError, OSError):
                while connection.poll(0):
                    reports.append((rank, _reports.decode(connection.recv_bytes())))
        return reports

    def close(self) -> None:
        # A listener that waits does not notice when it is closed; a shutdown wakes it.
        waiting = cast("socket.socket", self._listener._listener._socket)  # pyright: ignore
        with suppress(OSError):
            waiting.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


def _process_key() -> bytes:
    return bytes(multiprocessing.current_process().authkey)
