"""The bus in memory: the semantics of NATS without a server, with faults on demand.

A `MemoryNetwork` plays the server; each `MemoryBus` is one connection to it. With `BusFaults` the network
drops, duplicates, delays and reorders core messages. A seed decides: the same seed gives the same run.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from baton.bus.delivery import Arrival, Mailbox, check_name, check_payload, check_subject, matches
from baton.bus.memory_stream import Follower, MemoryStream
from baton.bus.protocol import BusLimits, Delivery, DeliveryCounts, Entry, Handler, Retention, Subscription
from baton.clock import Clock, SystemClock
from baton.errors import BusUnavailable, ConfigurationError, Conflict, DeadlineExceeded, NoResponders
from baton.messages.codec import AnyMessage, decode, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class BusFaults:
    """Faults of the network for core messages, replies included; shares are probabilities per message."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay_s_max: float = 0.0
    """Each message takes a random time up to this; order per sender and receiver is kept."""
    reorder: float = 0.0
    """Share of messages that may overtake others; needs a delay."""


class _Receiver(Protocol):
    def offer(self, arrival: Arrival) -> None: ...


@dataclass(eq=False, slots=True)
class _MemorySubscription:
    subject: str
    group: str
    mailbox: Mailbox
    on_end: Callable[[_MemorySubscription], None]

    @property
    def counts(self) -> DeliveryCounts:
        return self.mailbox.counts

    async def unsubscribe(self) -> None:
        self.on_end(self)
        await self.mailbox.close()


@dataclass(order=True, slots=True)
class _InFlight:
    due_s: float
    order: int
    receiver: _Receiver = field(compare=False)
    arrival: Arrival = field(compare=False)


class MemoryNetwork:
    """The server: subscriptions, messages in flight, and the streams."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        seed: int = 0,
        faults: BusFaults | None = None,
        payload_bytes_max: int = 8 << 20,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.faults = faults or BusFaults()
        self.payload_bytes_max = payload_bytes_max
        self.reachable = True
        """False: every bus raises BusUnavailable, as if the server were down."""
        self.streams: dict[str, MemoryStream] = {}
        self.entries: dict[tuple[str, str], Entry] = {}
        """Entries by bucket and key."""
        self.revision = 0
        self._random = random.Random(seed)
        self._subscriptions: list[_MemorySubscription] = []
        self._routes: dict[str, list[_MemorySubscription]] = {}
        self._in_flight: list[_InFlight] = []
        self._last_due_s: dict[tuple[object, object], float] = {}
        self._sent = 0
        self._changed = asyncio.Event()
        self._carrier: asyncio.Task[None] | None = None

    def add(self, subscription: _MemorySubscription) -> None:
        self._subscriptions.append(subscription)
        self._routes.clear()

    def remove(self, subscription: _MemorySubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._routes.clear()

    def publish(self, sender: object, arrival: Arrival) -> int:
        """Send to all subscribers, one member of each group, and streams; return the number of receivers."""
        for stream in self.streams.values():
            if matches(stream.pattern, arrival.subject):
                stream.append(arrival.subject, arrival.payload)
        if arrival.subject not in self._routes:
            matching = [each for each in self._subscriptions if matches(each.subject, arrival.subject)]
            self._routes[arrival.subject] = matching
        groups: dict[str, list[_MemorySubscription]] = {}
        receivers: list[_MemorySubscription] = []
        for subscription in self._routes[arrival.subject]:
            if subscription.group:
                groups.setdefault(subscription.group, []).append(subscription)
            else:
                receivers.append(subscription)
        receivers.extend(self._random.choice(members) for members in groups.values())
        for subscription in receivers:
            self.send(sender, subscription.mailbox, arrival)
        return len(receivers)

    def send(self, sender: object, receiver: _Receiver, arrival: Arrival) -> None:
        """Deliver one message to one receiver, with the faults applied."""
        faults = self.faults
        if faults == BusFaults():
            receiver.offer(arrival)
            return
        if self._random.random() < faults.drop:
            return
        for _ in range(2 if self._random.random() < faults.duplicate else 1):
            due_s = self.clock.now_s() + self._random.uniform(0.0, faults.delay_s_max)
            link = (sender, receiver)
            if self._random.random() >= faults.reorder:
                due_s = max(due_s, self._last_due_s.get(link, 0.0))
                self._last_due_s[link] = due_s
            self._sent += 1
            heapq.heappush(self._in_flight, _InFlight(due_s, self._sent, receiver, arrival))
        self._changed.set()
        if self._carrier is None or self._carrier.done():
            self._carrier = asyncio.create_task(self._carry(), name="memory network")

    async def close(self) -> None:
        """Drop the messages in flight."""
        self._in_flight.clear()
        self._last_due_s.clear()
        if self._carrier is not None:
            self._carrier.cancel()
            await asyncio.wait([self._carrier])

    async def _carry(self) -> None:
        while self._in_flight:
            wait_s = self._in_flight[0].due_s - self.clock.now_s()
            if wait_s > 0:
                self._changed.clear()
                with suppress(TimeoutError):
                    async with self.clock.timeout(wait_s):
                        await self._changed.wait()
                continue
            landed = heapq.heappop(self._in_flight)
            landed.receiver.offer(landed.arrival)
        self._last_due_s.clear()


class _Reply:
    """Receives the first answer to one request."""

    def __init__(self) -> None:
        self.payload: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def offer(self, arrival: Arrival) -> None:
        if not self.payload.done():
            self.payload.set_result(arrival.payload)


class MemoryBus:
    """One connection to a `MemoryNetwork`, by default to one of its own."""

    def __init__(
        self, network: MemoryNetwork | None = None, *, name: str = "", limits: BusLimits | None = None
    ) -> None:
        self.name = name
        self.network = network or MemoryNetwork()
        self._owns_network = network is None
        self._limits = limits or BusLimits()
        self._subscriptions: set[_MemorySubscription | Follower] = set()
        self._closed = False

    @property
    def payload_bytes_max(self) -> int:
        return self.network.payload_bytes_max

    @property
    def connected(self) -> bool:
        return self.network.reachable

    @property
    def reconnects(self) -> int:
        return 0

    @property
    def subscriptions(self) -> Sequence[Subscription]:
        return tuple(self._subscriptions)

    async def publish(self, subject: str, message: AnyMessage) -> None:
        self.publish_payload(subject, encode(message))

    def publish_payload(self, subject: str, payload: bytes, *, reply_to: _Reply | None = None) -> int:
        """Send bytes as they are, so that tests can send malformed ones; return the number of receivers."""
        check_subject(subject)
        self._check_open()
        check_payload(payload, self.payload_bytes_max)
        return self.network.publish(self, Arrival(subject, payload, self._responder(subject, reply_to)))

    async def request(self, subject: str, message: AnyMessage, *, timeout_s: float) -> AnyMessage:
        return decode(await self.request_payload(subject, encode(message), timeout_s=timeout_s))

    async def request_payload(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        reply = _Reply()
        try:
            async with self.network.clock.timeout(timeout_s):
                if self.publish_payload(subject, payload, reply_to=reply) == 0:
                    raise NoResponders(f"the subject {subject} has no subscriber")
                return await reply.payload
        except TimeoutError:
            raise DeadlineExceeded(f"no answer on {subject} within {timeout_s:.3f} s") from None

    async def subscribe(self, subject: str, handler: Handler, *, group: str = "") -> Subscription:
        check_subject(subject, wildcards=True)
        self._check_open()
        subscription = _MemorySubscription(subject, group, Mailbox(subject, handler, self._limits), self._end)
        self.network.add(subscription)
        self._subscriptions.add(subscription)
        return subscription

    async def append(self, stream: str, subject: str, message: AnyMessage, *, message_id: str) -> int:
        check_subject(subject)
        self._check_open()
        payload = encode(message)
        check_payload(payload, self.payload_bytes_max)
        target = self._stream(stream, subject)
        if not matches(target.pattern, subject):
            raise ConfigurationError(f"the stream {stream} holds {target.pattern}, not {subject}")
        return target.append(subject, payload, message_id)

    async def follow(self, stream: str, subject: str, handler: Handler, *, after: int = 0) -> Subscription:
        check_subject(subject, wildcards=True)
        self._check_open()
        target = self._stream(stream, subject)
        follower = Follower(target, subject, handler, after, self._limits, self._subscriptions.discard)
        self._subscriptions.add(follower)
        return follower

    async def keep(self, stream: str, subject: str, retention: Retention) -> Retention:
        check_subject(subject, wildcards=True)
        self._check_open()
        found = self.network.streams.get(stream)
        kept = self._stream(stream, subject)
        kept.retention = found.retention.widened(retention) if found else retention
        return kept.retention

    async def retention(self, stream: str) -> Retention | None:
        self._check_open()
        found = self.network.streams.get(stream)
        return found and found.retention

    async def read(self, stream: str, subject: str, *, after: int | None = None) -> Delivery | None:
        check_subject(subject)
        self._check_open()
        kept = self.network.streams.get(stream)
        arrival = kept and kept.find(subject, after)
        if arrival is None:
            return None
        return Delivery(arrival.subject, decode(arrival.payload), arrival.stream_sequence, None)

    async def get(self, bucket: str, key: str) -> Entry | None:
        self._check_open()
        check_name(bucket)
        check_name(key)
        return self.network.entries.get((bucket, key))

    async def put(self, bucket: str, key: str, message: AnyMessage, *, revision: int) -> int:
        check_payload(encode(message), self.payload_bytes_max)
        present = await self.get(bucket, key)
        if revision != (present.revision if present else 0):
            raise Conflict(f"{key} in the bucket {bucket} has another revision by now")
        self.network.revision += 1
        self.network.entries[bucket, key] = Entry(message, self.network.revision)
        return self.network.revision

    async def delete(self, bucket: str, key: str, *, revision: int) -> None:
        present = await self.get(bucket, key)
        if present is None or present.revision != revision:
            raise Conflict(f"{key} in the bucket {bucket} has another revision by now")
        del self.network.entries[bucket, key]

    async def close(self) -> None:
        self._closed = True
        for subscription in list(self._subscriptions):
            await subscription.unsubscribe()
        if self._owns_network:
            await self.network.close()

    def _end(self, subscription: _MemorySubscription) -> None:
        self.network.remove(subscription)
        self._subscriptions.discard(subscription)

    def _check_open(self) -> None:
        if self._closed or not self.network.reachable:
            raise BusUnavailable("the message bus is closed" if self._closed else "the message bus cannot be reached")

    def _stream(self, name: str, subject: str) -> MemoryStream:
        if name not in self.network.streams:
            self.network.streams[name] = MemoryStream(subject, self.network.clock, self._limits)
        return self.network.streams[name]

    def _responder(self, subject: str, reply_to: _Reply | None) -> Callable[[AnyMessage], Awaitable[None]] | None:
        if reply_to is None:
            return None

        async def respond(message: AnyMessage) -> None:
            payload = encode(message)
            self._check_open()
            check_payload(payload, self.payload_bytes_max)
            self.network.send(subject, reply_to, Arrival(subject, payload))

        return respond
