"""The message bus: one small protocol, NATS and an in-memory implementation behind it.

Core subjects lose messages (a full subscription drops, nobody may be listening) and keep order per
publisher and subject only; the protocols above detect that themselves. Streams (JetStream) keep
messages, give each a sequence and drop duplicates by message id.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from baton.messages import AnyMessage


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message as it arrived. `stream_sequence` is 0 on core subjects."""

    subject: str
    message: AnyMessage
    stream_sequence: int
    _respond: Callable[[AnyMessage], Awaitable[None]] | None

    @property
    def wants_reply(self) -> bool:
        return self._respond is not None

    async def respond(self, message: AnyMessage) -> None:
        """Answer a `request`; does nothing where no answer is wanted."""
        if self._respond is not None:
            await self._respond(message)


Handler = Callable[[Delivery], Awaitable[None]]


class Subscription(Protocol):
    dropped_messages: int
    """Messages lost here because the handler was too slow."""
    malformed_messages: int
    """Payloads that were no message of ours: counted, and answered with `Refused` where a reply was wanted."""

    async def unsubscribe(self) -> None:
        """Stop deliveries and wait for the running handler."""
        ...


class Bus(Protocol):
    """Messages between services. All methods raise BusUnavailable while the server cannot be reached."""

    payload_bytes_max: int
    """The largest payload that the server accepts; longer prompts are cut into `TokenChunk`s."""

    async def publish(self, subject: str, message: AnyMessage) -> None:
        """Send without waiting for anyone. Raises PayloadTooLarge."""
        ...

    async def request(self, subject: str, message: AnyMessage, *, timeout_s: float) -> AnyMessage:
        """Send and return the first reply. Raises NoResponders at once, DeadlineExceeded after `timeout_s`.

        A `Refused` reply is returned, not raised.
        """
        ...

    async def subscribe(self, subject: str, handler: Handler, *, group: str = "") -> Subscription:
        """Call `handler` for each message, one at a time and in order; `*` stands for one part of a subject.

        Within a `group` each message goes to one member. An exception in a handler is logged with its
        message and does not end the subscription.
        """
        ...

    async def append(self, stream: str, subject: str, message: AnyMessage, *, message_id: str) -> int:
        """Store in a stream, created on first use with `subject`'s parent wildcard; return the stream sequence.

        A `message_id` that the stream saw in the last two minutes is not stored again.
        """
        ...

    async def follow(self, stream: str, subject: str, handler: Handler, *, after: int = 0) -> Subscription:
        """Call `handler` for each message of a stream, in order, from the one after sequence `after` on."""
        ...

    async def close(self) -> None: ...
