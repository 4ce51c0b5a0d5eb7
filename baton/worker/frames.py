"""Frames to gateways: the output of one engine step, in one message per gateway.

Attempts add their deltas as the engine yields them. The first one wakes the sender, which yields to the
event loop once, so that all attempts of the step can add theirs, and then sends one message per
gateway. Deltas that come while a message is being sent share the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

import msgspec

from baton import subjects
from baton.bus import Bus
from baton.errors import BatonError
from baton.messages.attempts import Frame, Frames, TokenLogprob, Usage
from baton.messages.base import TOKEN_BYTES, WorkerAddress, pack_tokens
from baton.worker.attempt import Key

_log = logging.getLogger("baton.worker")

# Upper bounds of a frame's size in MessagePack: keys, integers and headers; per token its
# log-probability; per alternative a pair. Request ids and error texts count by their length.
_FRAME_BYTES = 512
_LOGPROB_BYTES = 32
_ALTERNATIVE_BYTES = 16


class _Pending:
    """Consecutive deltas of one attempt that have not been sent."""

    __slots__ = ("index", "logprobs", "tokens", "usage")

    def __init__(self, index: int, usage: Usage | None) -> None:
        self.index = index
        self.usage = usage
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []


class FrameSender:
    """Sends a worker's frames; `run` is its task. A frame that cannot be sent is dropped; the gateway sees the gap."""

    def __init__(self, bus: Bus, address: WorkerAddress) -> None:
        self._bus = bus
        self._address = address
        self._pending: dict[str, dict[Key, _Pending]] = {}
        self._whole: dict[str, list[Frame]] = {}
        self._wake = asyncio.Event()
        self.dropped_frames = 0

    def add(
        self,
        gateway: str,
        key: Key,
        index: int,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        usage: Usage | None,
    ) -> None:
        """Queue the output of an engine step for one attempt; `usage` comes with an attempt's first tokens."""
        pending = self._pending.setdefault(gateway, {})
        delta = pending.get(key)
        if delta is None:
            delta = pending[key] = _Pending(index, usage)
        delta.tokens.extend(tokens)
        delta.logprobs.extend(logprobs)
        self._wake.set()

    def add_whole(self, gateway: str, frame: Frame) -> None:
        """Queue a complete frame: an end, or output that the gateway asked to resend.

        It is sent after the deltas that were added before it.
        """
        self._whole.setdefault(gateway, []).append(frame)
        self._wake.set()

    async def run(self) -> None:
        """Send for ever."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(0)  # noqa: TID251 - a pass of the event loop takes no time.
            await self.flush()

    async def flush(self) -> None:
        """Send all frames added so far."""
        self._wake.clear()
        pending, self._pending = self._pending, {}
        whole, self._whole = self._whole, {}
        for gateway in {**pending, **whole}:
            deltas = [_frame(key, delta) for key, delta in pending.get(gateway, {}).items()]
            await self._send(gateway, deltas + whole.get(gateway, []))

    async def _send(self, gateway: str, frames: list[Frame]) -> None:
        # The envelope needs some room of its own, beside the frames.
        room_bytes = self._bus.payload_bytes_max - _FRAME_BYTES
        for part in split_frames(frames, room_bytes):
            message = Frames(worker=self._address.worker, generation=self._address.generation, frames=part)
            try:
                await self._bus.publish(subjects.gateway(gateway), message)
            except BatonError as error:
                if not self.dropped_frames:
                    _log.warning("frames to gateway %s were dropped, it will ask for them again: %s", gateway, error)
                self.dropped_frames += len(part)


def _frame(key: Key, delta: _Pending) -> Frame:
    request, attempt = key
    return Frame(
        request=request,
        attempt=attempt,
        index=delta.index,
        tokens=pack_tokens(delta.tokens),
        logprobs=tuple(delta.logprobs),
        usage=delta.usage,
    )


def frame_bytes_max(frame: Frame) -> int:
    """Return an upper bound of the frame's size on the bus."""
    alternatives = sum(len(logprob.top) for logprob in frame.logprobs)
    detail = len(frame.finish.error.detail.encode()) if frame.finish and frame.finish.error else 0
    logprobs_bytes = len(frame.logprobs) * _LOGPROB_BYTES + alternatives * _ALTERNATIVE_BYTES
    return _FRAME_BYTES + len(frame.request.encode()) + detail + len(frame.tokens) + logprobs_bytes


def split_frames(frames: Sequence[Frame], room_bytes: int) -> Iterator[tuple[Frame, ...]]:
    """Split frames into messages of at most `room_bytes`, in order, halving frames that are too long."""
    part: list[Frame] = []
    part_bytes = 0
    for frame in (piece for whole in frames for piece in _halve(whole, room_bytes)):
        size_bytes = frame_bytes_max(frame)
        if part and part_bytes + size_bytes > room_bytes:
            yield tuple(part)
            part, part_bytes = [], 0
        part.append(frame)
        part_bytes += size_bytes
    if part:
        yield tuple(part)


def _halve(frame: Frame, room_bytes: int) -> Iterator[Frame]:
    tokens = len(frame.tokens) // TOKEN_BYTES
    if tokens < 2 or frame_bytes_max(frame) <= room_bytes:
        yield frame
        return
    middle = tokens // 2
    left = msgspec.structs.replace(
        frame, tokens=frame.tokens[: middle * TOKEN_BYTES], logprobs=frame.logprobs[:middle], finish=None
    )
    right = msgspec.structs.replace(
        frame,
        index=frame.index + middle,
        tokens=frame.tokens[middle * TOKEN_BYTES :],
        logprobs=frame.logprobs[middle:],
        usage=None,
    )
    yield from _halve(left, room_bytes)
    yield from _halve(right, room_bytes)
