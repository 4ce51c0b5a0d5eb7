"""The bus on NATS. The modules `nats*` of this package are the only ones that know nats-py."""

# nats-py leaves some of its parameters without types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as ClientSubscription

from baton.bus.delivery import Arrival, Mailbox, check_payload, check_subject
from baton.bus.nats_bucket import Buckets
from baton.bus.nats_client import DirectClient, TlsNotRequired
from baton.bus.nats_requests import Requests
from baton.bus.nats_stream import NatsFollower, append_to_stream, keep_in_stream, read_from_stream, retention_of_stream
from baton.bus.protocol import BusLimits, Delivery, Entry, Handler, Retention, Subscription
from baton.errors import BusUnavailable, ConfigurationError, DeadlineExceeded
from baton.messages.codec import AnyMessage, decode, encode

log = logging.getLogger(__name__)

_PING_INTERVAL_S: Final = 5
_PINGS_OUTSTANDING_MAX: Final = 1
"""A server that is silent for two ping intervals counts as lost."""
_RETRY_S: Final = 0.2
_CONNECT_ATTEMPT_S: Final = 2
_SEND_BUFFER_BYTES: Final = 2 << 20
"""Unsent bytes beyond which a publisher waits for the socket, which slows it down to the server's pace."""
_SEND_STALL_S: Final = 0.25


class NatsBus:
    """A connection to NATS, restored whenever it is lost. Made by `connect`."""

    def __init__(self, url: str, name: str, limits: BusLimits) -> None:
        self._url = url
        self._name = name
        self._limits = limits
        self._client = DirectClient()
        self._requests = Requests(self._client)
        self._subscriptions: set[_NatsSubscription] = set()
        self._followers: set[NatsFollower] = set()
        self.reconnects = 0
        self._closed = False
        self._replacing: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, url: str, *, name: str, limits: BusLimits | None = None, timeout_s: float = 10.0) -> NatsBus:
        """Connect to `url` (several with commas), `nats://user:password@host:port` or `nats://token@host:port`; with
        `tls://` to servers that require TLS only.

        Keeps trying for `timeout_s`, then raises BusUnavailable; wrong credentials, and a server without TLS at such an
        address, raise ConfigurationError at once.
        """
        bus = cls(url, name, limits or BusLimits())
        give_up_at_s = time.monotonic() + timeout_s
        waits = False
        while True:
            try:
                await bus._open()
            except BusUnavailable as error:
                if time.monotonic() + _RETRY_S > give_up_at_s:
                    raise
                if not waits:
                    log.warning("%s; waiting for it for %g s", error, timeout_s)
                waits = True
                await asyncio.sleep(_RETRY_S)
            else:
                return bus

    @property
    def payload_bytes_max(self) -> int:
        return self._client.max_payload

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def subscriptions(self) -> Sequence[Subscription]:
        return (*self._subscriptions, *self._followers)

    async def publish(self, subject: str, message: AnyMessage) -> None:
        payload = encode(message)
        self._check_can_send(subject, payload)
        await self._send(subject, payload)

    async def request(self, subject: str, message: AnyMessage, *, timeout_s: float) -> AnyMessage:
        payload = encode(message)
        self._check_can_send(subject, payload)
        if timeout_s <= 0:
            raise DeadlineExceeded(f"no time is left to ask on {subject}")
        reply = await self._requests.ask(subject, payload, timeout_s)
        return decode(reply.data)

    async def subscribe(self, subject: str, handler: Handler, *, group: str = "") -> Subscription:
        check_subject(subject, wildcards=True)
        self._check_open()
        subscription = _NatsSubscription(self, subject, group, handler, self._limits)
        self._subscriptions.add(subscription)
        try:
            await subscription.attach(self._requests)
        except BaseException:
            await subscription.unsubscribe()
            raise
        return subscription

    async def append(self, stream: str, subject: str, message: AnyMessage, *, message_id: str) -> int:
        payload = encode(message)
        self._check_can_send(subject, payload)
        return await append_to_stream(self._requests, stream, subject, payload, message_id, self._limits)

    async def follow(self, stream: str, subject: str, handler: Handler, *, after: int = 0) -> Subscription:
        check_subject(subject, wildcards=True)
        self._check_open()
        follower = NatsFollower(
            lambda: self._requests, stream, subject, handler, after, self._limits, self._followers.discard
        )
        self._followers.add(follower)
        try:
            await follower.start()
        except BaseException:
            await follower.unsubscribe()
            raise
        return follower

    async def keep(self, stream: str, subject: str, retention: Retention) -> Retention:
        check_subject(subject, wildcards=True)
        self._check_open()
        return await keep_in_stream(self._requests, stream, subject, retention, self._limits)

    async def retention(self, stream: str) -> Retention | None:
        self._check_open()
        return await retention_of_stream(self._requests, stream, self._limits)

    async def read(self, stream: str, subject: str, *, after: int | None = None) -> Delivery | None:
        check_subject(subject)
        self._check_open()
        return await read_from_stream(self._requests, stream, subject, after, self._limits)

    async def get(self, bucket: str, key: str) -> Entry | None:
        return await self._buckets().get(bucket, key)

    async def put(self, bucket: str, key: str, message: AnyMessage, *, revision: int) -> int:
        return await self._buckets().put(bucket, key, encode(message), revision)

    async def delete(self, bucket: str, key: str, *, revision: int) -> None:
        await self._buckets().put(bucket, key, b"", revision, deletes=True)

    def _buckets(self) -> Buckets:
        self._check_open()
        return Buckets(self._requests, self._limits)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if self._replacing is not None:
                self._replacing.cancel()
                await asyncio.wait([self._replacing])
            ends = [asyncio.ensure_future(s.unsubscribe()) for s in (*self._subscriptions, *self._followers)]
            if ends:
                await asyncio.wait(ends)
            if self._client.is_connected:
                await self._requests.round_trip(self._limits.reply_timeout_s)
        except BusUnavailable as error:
            log.warning("closing without the server's confirmation: %s", error)
        finally:
            await _end(self._client)

    # ------------------------------------------------------------ sending

    def _check_open(self) -> None:
        if self._closed:
            raise BusUnavailable("the message bus is closed")
        if not self._client.is_connected:
            # Clients get this text; the log has the address, since the connection was lost.
            raise BusUnavailable("the message bus cannot be reached")

    def _check_can_send(self, subject: str, payload: bytes) -> None:
        check_subject(subject)
        self._check_open()
        check_payload(payload, self._client.max_payload)
        if self._client.pending_data_size > self._limits.pending_bytes_max:
            raise BusUnavailable("the message bus accepts no more messages")

    async def _send(self, subject: str, payload: bytes) -> None:
        if self._client.post(subject, payload):
            return
        try:
            await self._client.publish(subject, payload)
        except (nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"the message bus failed: {error}") from error

    def responder(self, reply_to: str) -> Callable[[AnyMessage], Awaitable[None]] | None:
        if not reply_to:
            return None

        async def respond(message: AnyMessage) -> None:
            payload = encode(message)
            self._check_can_send(reply_to, payload)
            await self._send(reply_to, payload)

        return respond

    # ------------------------------------------------------------ the connection

    async def _open(self) -> None:
        """Connect once and use that connection from now on.

        Raises BusUnavailable, or ConfigurationError when a retry cannot help.
        """
        client = DirectClient()
        requests = Requests(client)
        is_up = False

        async def on_error(error: Exception) -> None:
            if not is_up:
                # nats-py would retry for ever; raising here ends its first connect, and the caller decides.
                raise error
            if "ermissions" in str(error):
                log.error("the message bus refuses: %s", error)
            else:
                log.debug("message bus: %s", error)

        async def on_lost() -> None:
            requests.fail("lost the message bus")
            if is_up and not self._closed:
                log.warning("lost the message bus at %s", _public(self._url))

        async def on_restored() -> None:
            log.warning("the message bus at %s is back", _public(self._url))
            self.reconnects += 1
            for follower in self._followers:
                follower.restart()

        async def on_closed() -> None:
            # The server closed the connection for good (after a change of its rules, for example): nats-py gives up.
            # One that failed while it was made the replacement is replaced by the task that made it.
            is_replacing = self._replacing is not None and not self._replacing.done()
            if is_up and not self._closed and not is_replacing:
                self._replacing = asyncio.create_task(self._replace(), name="bus replace")

        address = _Address.parse(self._url)
        try:
            await client.connect(
                address.servers,
                name=self._name,
                user=address.user,
                password=address.password,
                token=address.token,
                error_cb=on_error,
                disconnected_cb=on_lost,
                reconnected_cb=on_restored,
                closed_cb=on_closed,
                connect_timeout=_CONNECT_ATTEMPT_S,
                reconnect_time_wait=_RETRY_S,  # pyright: ignore[reportArgumentType]
                max_reconnect_attempts=-1,
                ping_interval=_PING_INTERVAL_S,
                max_outstanding_pings=_PINGS_OUTSTANDING_MAX,
                pending_size=_SEND_BUFFER_BYTES,
                flush_timeout=_SEND_STALL_S,
                skip_subject_validation=True,
            )
            await requests.open()
        except (nats.errors.Error, OSError, TimeoutError) as error:
            await _end(client)
            if isinstance(error, TlsNotRequired) or "uthorization" in str(error):
                raise ConfigurationError(f"the message bus at {_public(self._url)} refuses: {error}") from error
            # A plain TimeoutError has no text.
            reason = str(error) or "no answer in time"
            raise BusUnavailable(f"the message bus at {_public(self._url)} cannot be reached: {reason}") from error
        is_up = True
        self._client, self._requests = client, requests

    async def _replace(self) -> None:
        while True:
            await asyncio.sleep(_RETRY_S)
            try:
                await self._open()
                for subscription in list(self._subscriptions):
                    if subscription in self._subscriptions:  # It may have ended meanwhile.
                        await subscription.attach(self._requests)
            except (BusUnavailable, ConfigurationError) as error:
                log.debug("message bus: %s", error)
                await _end(self._client)
                continue
            except Exception:
                # This task is not awaited: if it ended here, the bus would stay disconnected.
                log.exception("reconnecting to the message bus")
                await _end(self._client)
                continue
            for follower in self._followers:
                follower.restart()
            self.reconnects += 1
            return

    def end_subscription(self, subscription: _NatsSubscription) -> None:
        self._subscriptions.discard(subscription)


class _NatsSubscription:
    """A mailbox that a NATS subscription fills; it outlives connections."""

    def __init__(self, bus: NatsBus, subject: str, group: str, handler: Handler, limits: BusLimits) -> None:
        self.mailbox = Mailbox(subject, handler, limits)
        self.counts = self.mailbox.counts
        self.attached: ClientSubscription | None = None
        self._requests: Requests | None = None
        self._bus = bus
        self.subject = subject
        self._group = group
        self._limits = limits

    async def attach(self, requests: Requests) -> None:
        def receive(message: Msg) -> None:
            self.mailbox.offer(Arrival(message.subject, message.data, self._bus.responder(message.reply)))

        try:
            self.attached = await requests.client.listen(self.subject, receive, group=self._group)
        except nats.errors.Error as error:
            raise BusUnavailable(f"cannot subscribe to {self.subject}: {error}") from error
        self._requests = requests
        await requests.round_trip(self._limits.reply_timeout_s)

    async def unsubscribe(self) -> None:
        self._bus.end_subscription(self)
        try:
            if self.attached is not None and self._requests is not None:
                await self._end_deliveries(self.attached, self._requests)
                await self.attached.unsubscribe()
        except (nats.errors.Error, OSError, BusUnavailable) as error:
            # The subscription is gone together with the connection.
            log.debug("unsubscribe from %s: %s", self.subject, error)
        finally:
            await self.mailbox.close()

    async def _end_deliveries(self, attached: ClientSubscription, requests: Requests) -> None:
        """Stop the server's deliveries, and return once all messages sent before are in the mailbox.

        nats-py's own drain does the same, but its PING overtakes its UNSUB, so it may miss the last messages.
        """
        if not requests.client.is_connected:
            return
        await requests.client._send_unsubscribe(attached._id)  # pyright: ignore[reportPrivateUsage]
        await requests.round_trip(self._limits.reply_timeout_s)


async def _end(client: DirectClient) -> None:
    try:
        await client.close()
    except asyncio.CancelledError:
        # nats-py cancels a waiter of its own where the server had stalled; this cancellation is not for our task.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
    except (nats.errors.Error, OSError) as error:
        # A server that refuses us may reset the connection, and nats-py raises that; it is closed either way.
        log.debug("while closing the connection to the message bus: %s", error)
    # nats-py cancels its tasks without waiting for them; they must end before the loop closes.
    for _ in range(4):
        await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class _Address:
    """Servers without credentials, and the credentials apart: nats-py would send credentials in a URL to that server
    only, not to the others of its cluster."""

    servers: list[str]
    user: str | None = None
    password: str | None = None
    token: str | None = None

    @classmethod
    def parse(cls, url: str) -> _Address:
        servers: list[str] = []
        user = password = token = None
        for part in url.split(","):
            try:
                parts = urlsplit(part.strip() if "://" in part else f"nats://{part.strip()}")
                host, port = parts.hostname, parts.port or 4222
            except ValueError as error:
                raise ConfigurationError(f"{_public(part)} is no address of a NATS server: {error}") from error
            if not host or parts.scheme not in ("nats", "tls"):
                raise ConfigurationError(f"{_public(part)} is no address of a NATS server (nats://127.0.0.1:4222 is)")
            if parts.username and parts.password is not None:
                user, password = unquote(parts.username), unquote(parts.password)
            elif parts.username:
                token = unquote(parts.username)
            servers.append(f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}")
        return cls(servers, user, password, token)


def _public(url: str) -> str:
    """Return `url` without credentials, for messages and logs."""
    return ",".join(part.rpartition("@")[2].rpartition("://")[2] for part in url.split(","))
