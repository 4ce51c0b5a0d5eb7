"""JetStream: storing with acknowledgement, and following a stream from a sequence on.

A follower pulls: the server sends no more than was asked for, so a slow handler loses nothing. Its
consumer lives in the server's memory and is made anew, from the last handled sequence on, whenever
anything looks wrong: a gap, silence, a lost connection, a server that forgot it.
"""

# nats-py leaves some of its parameters without types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import msgspec
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, DiscardPolicy, Header, StorageType, StreamConfig

from baton.bus_delivery import Arrival, HandlerRunner, parent_wildcard
from baton.bus_nats_requests import Requests
from baton.bus_protocol import BusLimits, Handler
from baton.errors import BatonError, BusUnavailable, ConfigurationError, DeadlineExceeded, NoResponders

log = logging.getLogger(__name__)

_BATCH_MESSAGES: Final = 256
_BATCH_BYTES_MAX: Final = 16 << 20
_PULL_EXPIRES_S: Final = 30
_HEARTBEAT_S: Final = 2
_SILENCE_S: Final = 5.0
"""After this long without a message or a heartbeat the consumer counts as lost."""
_RETRY_S: Final = 0.25
_NS: Final = 1_000_000_000

_NAME_IN_USE: Final = 10058
"""The stream exists with other settings, which its operator chose: ours are only defaults."""
_SUBJECTS_OVERLAP: Final = 10065
_WRONG_STREAM: Final = 10060

_BATCH_ENDED: Final = frozenset({"404", "408"})
_HEARTBEAT: Final = "100"


class _ApiError(msgspec.Struct):
    err_code: int = 0
    description: str = ""


class _Acknowledgement(msgspec.Struct):
    """What JetStream answers to a message that it was to store."""

    seq: int = 0
    error: _ApiError | None = None


async def append_to_stream(
    client: Client, requests: Requests, stream: str, subject: str, payload: bytes, message_id: str, limits: BusLimits
) -> int:
    headers = {Header.MSG_ID.value: message_id, Header.EXPECTED_STREAM.value: stream}
    try:
        try:
            reply = await requests.ask(subject, payload, limits.reply_timeout_s, headers)
        except NoResponders:
            await ensure_stream(client, stream, subject, limits)
            reply = await requests.ask(subject, payload, limits.reply_timeout_s, headers)
        acknowledgement = msgspec.json.decode(reply.data, type=_Acknowledgement)
    except NoResponders:
        raise ConfigurationError(f"the stream {stream} exists but does not hold {subject}") from None
    except DeadlineExceeded as error:
        raise BusUnavailable(f"the stream {stream} did not acknowledge: {error}") from None
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"somebody else than the stream {stream} answers on {subject}") from error
    failure = acknowledgement.error
    if failure is not None and failure.err_code == _WRONG_STREAM:
        raise ConfigurationError(f"{subject} belongs to another stream than {stream}")
    if failure is not None:
        raise BusUnavailable(f"the stream {stream} takes nothing: {failure.description}")
    return acknowledgement.seq


async def ensure_stream(client: Client, stream: str, subject: str, limits: BusLimits) -> None:
    """Create the stream unless it exists. Raises BusUnavailable, or ConfigurationError where another has its subjects."""
    config = StreamConfig(
        name=stream,
        subjects=[parent_wildcard(subject)],
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_age=limits.stream_age_s_max,
        max_bytes=limits.stream_bytes_max,
        duplicate_window=limits.duplicate_window_s,
    )
    try:
        await JetStreamContext(client, timeout=limits.reply_timeout_s).add_stream(config)
    except nats.js.errors.APIError as error:
        if error.err_code == _SUBJECTS_OVERLAP:
            raise ConfigurationError(f"{subject} belongs to another stream than {stream}") from error
        if error.err_code != _NAME_IN_USE:
            detail = error.description or "the server runs without JetStream"
            raise BusUnavailable(f"the stream {stream} cannot be made: {detail}") from error
    except (nats.errors.Error, OSError) as error:
        raise BusUnavailable(f"the stream {stream} cannot be made: {error}") from error


class _Interrupted(Exception):
    """The present consumer is no use any more; a new one takes over."""


class NatsFollower:
    def __init__(
        self,
        current_client: Callable[[], Client],
        stream: str,
        subject: str,
        handler: Handler,
        after: int,
        limits: BusLimits,
        on_end: Callable[[NatsFollower], None],
    ) -> None:
        self._current_client = current_client
        self._stream = stream
        self._subject = subject
        self._last_sequence = after
        self._stream_created = ""
        self._limits = limits
        self._on_end = on_end
        self._runner = HandlerRunner(handler)
        # Bounded by what one pull asks for, and the few words of the server around it.
        self._arrived: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    @property
    def dropped_messages(self) -> int:
        return 0

    @property
    def malformed_messages(self) -> int:
        return self._runner.malformed_messages

    async def start(self) -> None:
        """Begin to follow. Raises BusUnavailable where the stream cannot be had now."""
        await ensure_stream(self._current_client(), self._stream, self._subject, self._limits)
        self._task = asyncio.create_task(self._follow(), name=f"follow {self._stream}")

    def restart(self) -> None:
        """Called when the connection is new: what was asked for before is lost."""
        self._arrived.put_nowait(None)

    async def unsubscribe(self) -> None:
        self._closed = True
        self._on_end(self)
        if self._task is None or asyncio.current_task() is self._task:
            return
        try:
            await self._runner.finish(self._limits.handler_grace_s)
        finally:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _follow(self) -> None:
        while not self._closed:
            try:
                await self._follow_one_consumer()
            except (_Interrupted, BatonError, nats.errors.Error, OSError, TimeoutError) as error:
                log.debug("following %s anew after %d: %s", self._stream, self._last_sequence, error)
                await asyncio.sleep(_RETRY_S)

    async def _follow_one_consumer(self) -> None:
        client = self._current_client()
        if not client.is_connected:
            raise _Interrupted("not connected")
        consumer = await self._make_consumer(client)
        self._arrived = asyncio.Queue()
        inbox = client.new_inbox()
        subscription = await client.subscribe(inbox, cb=self._on_message)
        try:
            delivered = 0
            while not self._closed:
                delivered = await self._pull(client, consumer, inbox, delivered)
        finally:
            # An error here must not hide the one under way, which may be this task's cancellation.
            with suppress(nats.errors.Error, OSError):
                await subscription.unsubscribe()

    async def _on_message(self, message: Msg) -> None:
        self._arrived.put_nowait(message)

    async def _make_consumer(self, client: Client) -> str:
        await ensure_stream(client, self._stream, self._subject, self._limits)
        js = JetStreamContext(client, timeout=self._limits.reply_timeout_s)
        info = await js.stream_info(self._stream)
        created = str(info.created)
        if info.state.last_seq < self._last_sequence or self._stream_created not in ("", created):
            log.warning("the stream %s was made anew: reading it from its start", self._stream)
            self._last_sequence = 0
        self._stream_created = created
        consumer = await js.add_consumer(
            self._stream,
            ConsumerConfig(
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=self._last_sequence + 1,
                ack_policy=AckPolicy.NONE,
                filter_subject=self._subject,
                inactive_threshold=2 * _PULL_EXPIRES_S,
                mem_storage=True,
                num_replicas=1,
            ),
        )
        return consumer.name

    async def _pull(self, client: Client, consumer: str, inbox: str, delivered: int) -> int:
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
            status = (message.headers or {}).get(Header.STATUS.value)
            if status == _HEARTBEAT:
                continue
            if status in _BATCH_ENDED:
                break
            if status is not None:
                raise _Interrupted(f"{status} {(message.headers or {}).get(Header.DESCRIPTION.value, '')}")
            delivered = await self._handle(message, delivered)
        return delivered

    async def _handle(self, message: Msg, delivered: int) -> int:
        sequence = message.metadata.sequence
        if sequence.consumer != delivered + 1:
            raise _Interrupted(f"message {sequence.consumer} came after {delivered}")
        await self._runner.handle(Arrival(message.subject, message.data, stream_sequence=sequence.stream))
        self._last_sequence = sequence.stream
        return delivered + 1
