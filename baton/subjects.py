"""Every subject on the bus, in one place."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

HEARTBEAT: Final = "baton.heartbeat"
"""Workers to all: `Heartbeat`, `Goodbye`."""

GATEWAY_BEAT: Final = "baton.gateway_beat"
"""Gateways to all workers and schedulers: `GatewayBeat`."""

PLACE: Final = "baton.place"
"""Gateway to one of the schedulers (queue group `SCHEDULERS`): `Place`."""

WITHDRAWALS: Final = "baton.withdraw"
"""Gateways to every scheduler: `Withdraw`."""

MATCH: Final = "baton.match"
"""Scheduler to one of the indexes (queue group `INDEXES`): `Match`."""

MATCH_ALL: Final = "baton.match_all"
"""Scheduler to all indexes, when the one asked first is late: `Match`. The first answer counts."""

PLACED: Final = "baton.placed"
"""Scheduler to every index and every scheduler: `Placed`."""

FAULTS: Final = "baton.faults"
"""Gateways to every scheduler: `Fault`."""

AUDITS: Final = "baton.audits"
"""Gateway to every index: `Audited`."""

TRACES: Final = "baton.traces"
"""Any client, or a gateway, to every service: `TraceQuery`, `TraceWanted`."""

INDEX_QUERIES: Final = "baton.index"
"""Any client to every index: `IndexQuery`."""

SCHEDULERS: Final = "schedulers"
INDEXES: Final = "indexes"

KV_STREAM: Final = "BATON_KV"
"""JetStream stream of all `kv_events` subjects."""

INDEX_BUCKET: Final = "baton_kvindex"
"""JetStream bucket with the `Lease` of each place that indexes write to."""

SCHEDULER_BUCKET: Final = "baton_scheduler"
"""JetStream bucket with the `Lease` of the scheduler that changes workers' roles."""

DECISIONS_STREAM: Final = "BATON_DECISIONS"
"""JetStream stream of all `decisions` and `request_name` subjects."""

DECISIONS_ALL: Final = "baton.decisions.*"

KV_EVENTS_ALL: Final = "baton.kv.*"


def task(worker: str) -> str:
    """Gateway to one worker: `TokenChunk`, `PrefillTask`, `DecodeTask`, `Cancel`, `Acknowledge`, `Resend`.

    One subject, since order is only kept per publisher and subject: a prompt's chunks come before its task.
    """
    return f"baton.worker.{worker}.task"


def role(worker: str) -> str:
    """Supervisor, or `baton roles`, to one worker: `ChangeRole`."""
    return f"baton.worker.{worker}.role"


def generation(worker: str) -> str:
    """Worker to the other processes that have its name: `Heartbeat`."""
    return f"baton.worker.{worker}.generation"


def shadow(worker: str) -> str:
    """Index to one worker: `ShadowQuery`."""
    return f"baton.worker.{worker}.shadow"


def gateway(gateway: str) -> str:
    """Workers to one gateway: `Frames`, `Digest`, `PrefillFailed`. Schedulers to it: `QueuePositions`, `Released`."""
    return f"baton.gateway.{gateway}.frames"


def kv_events(worker: str) -> str:
    """Worker to the index, through JetStream: `KvEvents`."""
    return f"baton.kv.{worker}"


def decisions(request: str) -> str:
    """Schedulers and gateways to the stream: `Decision`, `AttemptReport`. One subject per request of a client, whose
    choices are the requests `request-0`, `request-1` and so on."""
    return f"baton.decisions.r{_digest(request.rpartition('-')[0] or request)}"


def request_name(name: str) -> str:
    """Gateways to the stream: `NamedRequest`, for a client's own `x-request-id`."""
    return f"baton.decisions.n{_digest(name)}"


def trace_answers(asker: str) -> str:
    """Services to the asker of a trace: `TracePage`."""
    return f"baton.trace_answers.{asker}"


def index_answers(asker: str) -> str:
    """Indexes to the asker of an `IndexQuery`: `IndexReport`."""
    return f"baton.index_answers.{asker}"


def _digest(text: str) -> str:
    """Return any text as a short part of a subject."""
    return blake2b(text.encode(errors="backslashreplace"), digest_size=16).hexdigest()
