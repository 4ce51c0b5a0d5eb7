"""Encoding and decoding of every message."""

from __future__ import annotations

import msgspec

from baton.errors import MalformedMessage
from baton.messages.attempts import (
    Accepted,
    Acknowledge,
    Busy,
    Cancel,
    DecodeTask,
    Digest,
    Fault,
    Frames,
    Join,
    Lend,
    Lent,
    Prefilled,
    PrefillFailed,
    PrefillTask,
    Resend,
    TokenChunk,
)
from baton.messages.base import Lease, Refused
from baton.messages.decisions import AttemptReport, Decision, NamedRequest
from baton.messages.index import IndexQuery, IndexReport, KvEvents, Match, Matched, ShadowPage, ShadowQuery
from baton.messages.placement import Audited, Held, Place, Placed, Placement, QueuePositions, Released, Withdraw
from baton.messages.traces import TracePage, TraceQuery, TraceWanted
from baton.messages.workers import ChangeRole, GatewayBeat, Goodbye, Heartbeat, RoleChange

AnyMessage = (
    Heartbeat
    | Goodbye
    | Place
    | Placement
    | Held
    | QueuePositions
    | Released
    | Withdraw
    | Refused
    | Match
    | Matched
    | Placed
    | Audited
    | TokenChunk
    | PrefillTask
    | DecodeTask
    | Accepted
    | Busy
    | Join
    | Lend
    | Lent
    | Cancel
    | Acknowledge
    | Resend
    | Frames
    | PrefillFailed
    | Prefilled
    | Digest
    | Fault
    | GatewayBeat
    | ChangeRole
    | RoleChange
    | KvEvents
    | ShadowQuery
    | ShadowPage
    | IndexQuery
    | IndexReport
    | Lease
    | TraceQuery
    | TracePage
    | TraceWanted
    | Decision
    | AttemptReport
    | NamedRequest
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    return _encoder.encode(message)


def decode(payload: bytes) -> AnyMessage:
    """Return the message in `payload`. Raises MalformedMessage, naming what is wrong."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"{len(payload)} bytes from the bus are not a valid message: {error}") from error
