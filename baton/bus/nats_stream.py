"""JetStream: storing with acknowledgement, and following a stream from a sequence on.

A follower pulls: the server sends no more than was asked for, so a slow handler loses nothing. Its
consumer lives in the server's memory. The follower recreates it from the last handled sequence on after
a gap, silence, a lost connection, or when the server no longer knows it.
"""

# nats-py leaves some of its parameters without types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from math import inf
from typing import Final

import msgspec
import nats.errors
from nats.aio.msg import Msg
from nats.js.api import Header

from baton.bus.delivery import Arrival, HandlerRunner, parent_wildcard
from baton.bus.nats_client import DirectClient
from baton.bus.nats_requests import Requests
from baton.bus.protocol import BusLimits, Delivery, Handler, Retention
from baton.errors import BatonError, BusUnavailable, ConfigurationError, DeadlineExceeded, NoResponders
from baton.messages.codec import decode

log = logging.getLogger(__name__)

_BATCH_MESSAGES: Final = 256
_BATCH_BYTES_MAX: Final = 16 << 20
_PULL_EXPIRES_S: Final = 30
_HEARTBEAT_S: Final = 2
_SILENCE_S: Final = 5.0
"""Silence, without a message or a heartbeat, after which the consumer counts as lost."""
_RETRY_S: Final = 0.25
_NS: Final = 1_000_000_000
_OLD_REPLY_PARTS: Final = 9
"""Parts of a stored message's reply subject: $JS.ACK.STREAM.CONSUMER.deliveries.in_stream.in_consumer.time.pending."""

NOT_FOUND: Final = frozenset({10037, 10059})
"""Error codes for: no message of this subject, no stream of this name."""
_SUBJECTS_OVERLAP: Final = 10065
_WRONG_STREAM: Final = 10060

_PASSED_OVER: Final = frozenset({"100 Idle Heartbeat", "409 Batch Completed"})
"""Status messages to ignore. Newer servers send the second after a full batch; the follower counts the messages."""
_PULL_ENDED: Final = frozenset({"404 No Messages", "408 Request Timeout", "409 Message Size Exceeds MaxBytes"})


def _control_word(message: Msg) -> str | None:
    """Return the server's status of the pull, or None if this is a message of the stream."""
    if message.headers is None or message.data or Header.STATUS.value not in message.headers:
        return None
    return f"{message.headers[Header.STATUS.value]} {message.headers.get(Header.DESCRIPTION.value, '')}"


class _ApiError(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class _StreamState(msgspec.Struct):
    last_seq: int = 0


class _Bounds(msgspec.Struct):
    max_age: int
    """In nanoseconds; 0: without a limit."""
    max_bytes: int
    """-1: without a limit."""


class StoredMessage(msgspec.Struct):
    """A message of a stream, read by itself."""

    seq: int
    subject: str = ""
    hdrs: bytes = b""
    data: bytes = b""


class ApiAnswer(msgspec.Struct):
    """The fields of JetStream's answers that are used here."""

    error: _ApiError | None = None
    seq: int = 0
    """Sequence in an acknowledgement."""
    name: str = ""
    """Name of the consumer."""
    created: str = ""
    state: _StreamState = msgspec.field(default_factory=_StreamState)
    message: StoredMessage | None = None
    config: dict[str, object] = msgspec.field(default_factory=dict[str, object])
    """Settings of the stream."""


async def call_api(requests: Requests, subject: str, body: dict[str, object], limits: BusLimits) -> ApiAnswer:
    return await ask_jetstream(requests, f"$JS.API.{subject}", msgspec.json.encode(body), limits)


async def ask_jetstream(
    requests: Requests, subject: str, payload: bytes, limits: BusLimits, headers: dict[str, str] | None = None
) -> ApiAnswer:
    try:
        reply = await requests.ask(subject, payload, limits.reply_timeout_s, headers)
    except NoResponders:
        raise BusUnavailable("the NATS server runs without JetStream") from None
    except DeadlineExceeded:
        raise BusUnavailable("JetStream does not answer") from None
    try:
        return msgspec.json.decode(reply.data, type=ApiAnswer)
    except msgspec.DecodeError as error:
        raise BusUnavailable(f"the answer is not JetStream's: {error}") from error


async def append_to_stream(
    requests: Requests, stream: str, subject: str, payload: bytes, message_id: str, limits: BusLimits
) -> int:
    headers = {"Nats-Msg-Id": message_id, "Nats-Expected-Stream": stream}
    try:
        try:
            reply = await requests.ask(subject, payload, limits.reply_timeout_s, headers)
        except NoResponders:
            await _find_or_make_stream(requests, stream, subject, limits)
            reply = await requests.ask(subject, payload, limits.reply_timeout_s, headers)
        acknowledgement = msgspec.json.decode(reply.data, type=ApiAnswer)
    except NoResponders:
        raise ConfigurationError(f"the stream {stream} exists but does not hold {subject}") from None
    except DeadlineExceeded as error:
        raise BusUnavailable(f"the stream {stream} did not acknowledge: {error}") from None
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"another service than the stream {stream} answers on {subject}") from error
    failure = acknowledgement.error
    if failure is not None and failure.err_code == _WRONG_STREAM:
        raise ConfigurationError(f"{subject} belongs to another stream than {stream}")
    if failure is not None:
        raise BusUnavailable(f"the stream {stream} refuses messages: {failure.description}")
    return acknowledgement.seq


async def _find_or_make_stream(
    requests: Requests, stream: str, subject: str, limits: BusLimits, retention: Retention | None = None
) -> ApiAnswer:
    """Return what the server says of the stream, after creating it if it does not exist.

    An existing stream keeps its operator's settings: ours are only defaults.
    """
    answer = await call_api(requests, f"STREAM.INFO.{stream}", {}, limits)
    if answer.error is None:
        return answer
    retention = retention or Retention(age_s_max=limits.stream_age_s_max, bytes_max=limits.stream_bytes_max)
    config = _settings(retention, limits) | {
        "name": stream,
        "subjects": [parent_wildcard(subject)],
        "storage": "file",
        "retention": "limits",
        "discard": "old",
        "num_replicas": 1,
    }
    answer = await call_api(requests, f"STREAM.CREATE.{stream}", config, limits)
    if answer.error is None:
        return answer
    if answer.error.err_code == _SUBJECTS_OVERLAP:
        raise ConfigurationError(f"{subject} belongs to another stream than {stream}")
    raise BusUnavailable(f"the stream {stream} cannot be made: {answer.error.description}")


def _settings(retention: Retention, limits: BusLimits) -> dict[str, object]:
    """Return the settings of a stream that follow from its bounds."""
    return {
        "max_age": int(retention.age_s_max * _NS) if retention.age_s_max < inf else 0,
        "max_bytes": retention.bytes_max if retention.bytes_max < sys.maxsize else -1,
        # The server takes no window longer than the messages are kept.
        "duplicate_window": int(min(limits.duplicate_window_s, retention.age_s_max) * _NS),
    }


async def keep_in_stream(
    requests: Requests, stream: str, subject: str, retention: Retention, limits: BusLimits
) -> Retention:
    found = await _find_or_make_stream(requests, stream, subject, limits, retention)
    before = _retention_of(found)
    widest = before.widened(retention)
    if widest != before:
        answer = await call_api(requests, f"STREAM.UPDATE.{stream}", found.config | _settings(widest, limits), limits)
        if answer.error is not None:
            raise BusUnavailable(f"the stream {stream} cannot be changed: {answer.error.description}")
    return widest


async def retention_of_stream(requests: Requests, stream: str, limits: BusLimits) -> Retention | None:
    answer = await call_api(requests, f"STREAM.INFO.{stream}", {}, limits)
    if answer.error is not None:
        if answer.error.err_code in NOT_FOUND:
            return None
        raise BusUnavailable(f"the stream {stream} cannot be read: {answer.error.description}")
    return _retention_of(answer)


def _retention_of(stream: ApiAnswer) -> Retention:
    bounds = msgspec.convert(stream.config, _Bounds)
    return Retention(
        age_s_max=bounds.max_age / _NS if bounds.max_age > 0 else inf,
        bytes_max=bounds.max_bytes if bounds.max_bytes > 0 else sys.maxsize,
    )


async def read_from_stream(
    requests: Requests, stream: str, subject: str, after: int | None, limits: BusLimits
) -> Delivery | None:
    body: dict[str, object] = {"last_by_subj": subject}
    if after is not None:
        body = {"next_by_subj": subject, "seq": after + 1}
    answer = await call_api(requests, f"STREAM.MSG.GET.{stream}", body, limits)
    if answer.error is not None and answer.error.err_code in NOT_FOUND:
        return None
    if answer.error is not None or answer.message is None:
        raise BusUnavailable(f"the stream {stream} cannot be read: {answer.error and answer.error.description}")
    return Delivery(answer.message.subject, decode(answer.message.data), answer.message.seq, None)


class _Interrupted(Exception):
    """The present consumer is unusable; a new one replaces it."""


class NatsFollower:
    def __init__(
        self,
        current: Callable[[], Requests],
        stream: str,
        subject: str,
        handler: Handler,
        after: int,
        limits: BusLimits,
        on_end: Callable[[NatsFollower], None],
    ) -> None:
        self._current = current
        self._stream = stream
        self.subject = subject
        self._last_sequence = after
        self._stream_created = ""
        self._limits = limits
        self._on_end = on_end
        self._runner = HandlerRunner(handler)
        self.counts = self._runner.counts
        # Bounded by the messages of one pull and the few status messages around them.
        self._arrived: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to follow. Raises BusUnavailable if the stream cannot be reached now."""
        await _find_or_make_stream(self._current(), self._stream, self.subject, self._limits)
        self._task = asyncio.create_task(self._follow(), name=f"follow {self._stream}")

    def restart(self) -> None:
        """Create a new consumer, because the connection is new and open pulls are lost."""
        self._arrived.put_nowait(None)

    async def unsubscribe(self) -> None:
        self._closed = True
        self._on_end(self)
        if self._task is not None:
            await self._runner.stop(self._task, self._limits.handler_grace_s)

    async def _follow(self) -> None:
        while not self._closed:
            try:
                await self._follow_one_consumer()
            except (_Interrupted, BatonError, nats.errors.Error, OSError, TimeoutError) as error:
                log.debug("following %s again after %d: %s", self._stream, self._last_sequence, error)
            except Exception:
                # This task is not awaited: if it ended here, its owner would receive nothing and not know.
                log.exception("following %s again after %d", self._stream, self._last_sequence)
            await asyncio.sleep(_RETRY_S)

    async def _follow_one_consumer(self) -> None:
        requests = self._current()
        client = requests.client
        if not client.is_connected:
            raise _Interrupted("not connected")
        consumer = await self._make_consumer(requests)
        self._arrived = asyncio.Queue()
        inbox = client.new_inbox()
        subscription = await client.listen(inbox, self._on_message)
        try:
            delivered = 0
            while not self._closed:
                delivered = await self._pull(client, consumer, inbox, delivered)
        finally:
            # An error here must not replace the one being raised, which may be this task's cancellation.
            with suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()

    def _on_message(self, message: Msg) -> None:
        self._arrived.put_nowait(message)

    async def _make_consumer(self, requests: Requests) -> str:
        stream = await _find_or_make_stream(requests, self._stream, self.subject, self._limits)
        if stream.state.last_seq < self._last_sequence or self._stream_created not in ("", stream.created):
            log.warning("the stream %s was created again: reading it from its start", self._stream)
            self._last_sequence = 0
        self._stream_created = stream.created
        config: dict[str, object] = {
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._last_sequence + 1,
            "ack_policy": "none",
            "replay_policy": "instant",
            "filter_subject": self.subject,
            "inactive_threshold": 2 * _PULL_EXPIRES_S * _NS,
            "mem_storage": True,
            "num_replicas": 1,
        }
        body: dict[str, object] = {"stream_name": self._stream, "config": config}
        answer = await call_api(requests, f"CONSUMER.CREATE.{self._stream}", body, self._limits)
        if answer.error is not None:
            raise _Interrupted(f"no consumer: {answer.error.description}")
        return answer.name

    async def _pull(self, client: DirectClient, consumer: str, inbox: str, delivered: int) -> int:
        """Ask for one batch and handle it; return how many messages the consumer has delivered in all."""
        ask = {
            "batch": _BATCH_MESSAGES,
            "max_bytes": max(_BATCH_BYTES_MAX, 2 * client.max_payload),
            "expires": _PULL_EXPIRES_S * _NS,
            "idle_heartbeat": _HEARTBEAT_S * _NS,
        }
        await client.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{consumer}", msgspec.json.encode(ask), reply=inbox
        )
        end = delivered + _BATCH_MESSAGES
        while delivered < end and not self._closed:
            async with asyncio.timeout(_SILENCE_S):
                message = await self._arrived.get()
            if message is None:
                raise _Interrupted("the connection is new")
            word = _control_word(message)
            if word is None:
                delivered = await self._handle(message, delivered)
            elif word in _PULL_ENDED:
                break
            elif word not in _PASSED_OVER:
                raise _Interrupted(word)
        return delivered

    async def _handle(self, message: Msg, delivered: int) -> int:
        in_stream, in_consumer = _sequences(message.reply)
        if in_consumer != delivered + 1:
            raise _Interrupted(f"message {in_consumer} came after {delivered}")
        await self._runner.handle(Arrival(message.subject, message.data, stream_sequence=in_stream))
        self._last_sequence = in_stream
        return delivered + 1


def _sequences(reply: str) -> tuple[int, int]:
    """Return a message's number in its stream and among those that its consumer was sent, from its reply subject.

    nats-py's metadata have these, too, but making them takes longer than handling most messages.
    """
    parts = reply.split(".")
    # With a domain and an account before the stream, and a random part at the end, on newer servers.
    first = 5 if len(parts) == _OLD_REPLY_PARTS else 7
    try:
        return int(parts[first]), int(parts[first + 1])
    except (IndexError, ValueError):
        raise _Interrupted(f"{reply!r} is no reply subject of a stored message") from None
