"""The message bus as services see it: one small protocol; NATS and an in-memory implementation stand beside it.

Core subjects lose messages (a full subscription drops them, a subject may have no subscriber) and keep
order per publisher and subject only; the protocols above detect that themselves. Streams (JetStream) keep
messages, give each a sequence and drop duplicates by message id. Buckets (JetStream key-value stores)
keep the newest value of a key, and a writer must name its revision to change it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from baton.messages.codec import AnyMessage


class Delivery(msgspec.Struct, frozen=True, eq=False):
    """One message as it arrived. `stream_sequence` is 0 on core subjects."""

    subject: str
    message: AnyMessage
    stream_sequence: int
    _respond: Callable[[AnyMessage], Awaitable[None]] | None

    async def respond(self, message: AnyMessage) -> None:
        """Answer a `request`; does nothing if no answer is wanted. Raises as `Bus.publish` does."""
        if self._respond is not None:
            await self._respond(message)


Handler = Callable[[Delivery], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Entry:
    """The newest value of a key in a bucket."""

    message: AnyMessage
    revision: int
    """Revision, higher at each change of any key of the bucket, even if the server lost the bucket in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Bounds of a stream; beyond them its oldest messages are dropped."""

    age_s_max: float
    bytes_max: int

    def widened(self, other: Retention) -> Retention:
        """Return bounds that keep all that either of the two keeps."""
        return Retention(age_s_max=max(self.age_s_max, other.age_s_max), bytes_max=max(self.bytes_max, other.bytes_max))


@dataclass(frozen=True, slots=True, kw_only=True)
class BusLimits:
    """Bounds of a bus's queues, streams and waits."""

    pending_messages_max: int = 8192
    """Queued messages per subscription; further ones are dropped and counted."""
    pending_bytes_max: int = 64 << 20
    """Queued bytes per subscription, and bytes that wait to be sent."""
    handler_grace_s: float = 10.0
    """Time for which `unsubscribe` waits for the handler before it cancels it."""
    reply_timeout_s: float = 5.0
    """Timeout of the server's own answers: acknowledgements of `append`, creation of streams, round trips."""
    stream_age_s_max: float = 3600.0
    stream_bytes_max: int = 256 << 20
    duplicate_window_s: float = 120.0


@dataclass(slots=True)
class DeliveryCounts:
    """Counts of one subscription's messages so far."""

    handled: int = 0
    """Messages that the handler was called for, failed calls included."""
    dropped: int = 0
    """Messages lost here because the handler was too slow."""
    malformed: int = 0
    """Payloads that were not valid messages; answered with `Refused` if a reply was wanted."""


class Subscription(Protocol):
    @property
    def subject(self) -> str: ...

    @property
    def counts(self) -> DeliveryCounts: ...

    async def unsubscribe(self) -> None:
        """Stop deliveries, and return once queued messages are handled; those of a stream go to its next reader.

        A handler that unsubscribes itself is the last one to run.
        """
        ...


class Bus(Protocol):
    """Messages between services. All methods raise BusUnavailable while the server cannot be reached.

    A malformed subject (empty parts, spaces, a wildcard where one subject is meant) raises InvalidRequest.
    """

    @property
    def payload_bytes_max(self) -> int:
        """The largest payload that the server accepts; longer prompts are split into `TokenChunk`s."""
        ...

    @property
    def connected(self) -> bool:
        """Whether the server can be reached, as far as this client knows."""
        ...

    @property
    def reconnects(self) -> int:
        """Number of times that the connection was lost and restored."""
        ...

    @property
    def subscriptions(self) -> Sequence[Subscription]:
        """Current subscriptions, followed streams included."""
        ...

    async def publish(self, subject: str, message: AnyMessage) -> None:
        """Send without waiting for receivers. Raises PayloadTooLarge."""
        ...

    async def request(self, subject: str, message: AnyMessage, *, timeout_s: float) -> AnyMessage:
        """Send and return the first reply. Raises NoResponders at once, DeadlineExceeded after `timeout_s`.

        A `Refused` reply is returned, not raised; a handler that fails sends one, too.
        """
        ...

    async def subscribe(self, subject: str, handler: Handler, *, group: str = "") -> Subscription:
        """Call `handler` for each message, one at a time and in order; `*` stands for one part of a subject.

        Within a `group` each message goes to one member. An exception in a handler is logged with its
        message and does not end the subscription. On return the server knows of the subscription.
        """
        ...

    async def append(self, stream: str, subject: str, message: AnyMessage, *, message_id: str) -> int:
        """Store in a stream, created on first use with `subject`'s parent wildcard; return the stream sequence.

        A `message_id` that the stream saw in the last two minutes is not stored again: after a
        BusUnavailable the same call can be repeated.
        """
        ...

    async def follow(self, stream: str, subject: str, handler: Handler, *, after: int = 0) -> Subscription:
        """Call `handler` for each message of a stream, in order, from the one after sequence `after` on.

        Nothing is dropped: the server waits for a slow handler. Survives reconnects without loss or
        duplicates. A stream that was recreated, so that `after` lies beyond its end, is read from its start.
        """
        ...

    async def keep(self, stream: str, subject: str, retention: Retention) -> Retention:
        """Keep in a stream, from now on, what is published on `subject` and its siblings; `publish` stays as it is.

        Makes the stream, or widens the bounds of the one there is, and returns its bounds. Of several processes that
        ask for different bounds the widest apply, in whatever order they ask.
        """
        ...

    async def retention(self, stream: str) -> Retention | None:
        """Return the bounds of a stream; None: there is no such stream."""
        ...

    async def read(self, stream: str, subject: str, *, after: int | None = None) -> Delivery | None:
        """Return the first message that a stream keeps on `subject` beyond sequence `after`, or by default the last.

        Returns None if there is none, or no such stream. The server finds it by its subject, without a scan.
        """
        ...

    async def get(self, bucket: str, key: str) -> Entry | None:
        """Return the value put last; None if there is none or it was deleted. The bucket is created on first use."""
        ...

    async def put(self, bucket: str, key: str, message: AnyMessage, *, revision: int) -> int:
        """Store and return the new revision. Raises Conflict unless `revision` is the present one; 0: there is none.

        After a BusUnavailable the value may or may not be stored.
        """
        ...

    async def delete(self, bucket: str, key: str, *, revision: int) -> None:
        """Delete the value. Raises Conflict unless `revision` is the present one."""
        ...

    async def close(self) -> None:
        """End all subscriptions, send queued messages and disconnect."""
        ...
