"""Frames to gateways: the output of one engine step, in one message per gateway.

Attempts are added as the engine yields their output. The first one wakes the sender, which yields to the
event loop once, so that all attempts of the step can be added, and then sends one message per gateway.
Output that comes while a message is being sent shares the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence

import msgspec

from baton import subjects
from baton.bus import Bus
from baton.errors import BatonError
from baton.messages.attempts import Frame, Frames
from baton.messages.base import TOKEN_BYTES, WorkerAddress
from baton.worker.attempt import Attempt, Key

_log = logging.getLogger("baton.worker")

# Upper bounds of a frame's size in MessagePack: keys, integers and headers; per token its
# log-probability; per alternative a pair. Request ids and error texts count by their length.
_FRAME_BYTES = 512
_LOGPROB_BYTES = 32
_ALTERNATIVE_BYTES = 16


class FrameSender:
    """Sends a worker's frames; `run` is its task. A frame that cannot be sent is dropped; the gateway sees the gap."""

    def __init__(self, bus: Bus, address: WorkerAddress) -> None:
        self._bus = bus
        self._address = address
        self._unsent: dict[str, dict[Key, tuple[Attempt, int]]] = {}
        """For each gateway, the attempts with new output, each with the index of its first token not sent."""
        self._whole: dict[str, list[Frame]] = {}
        self._wake = asyncio.Event()
        self.dropped_frames = 0

    def add(self, attempt: Attempt, index: int) -> None:
        """Queue an attempt's output from token `index` on; it stays with the attempt until it is sent."""
        self._unsent.setdefault(attempt.gateway, {}).setdefault(attempt.key, (attempt, index))
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
        unsent, self._unsent = self._unsent, {}
        whole, self._whole = self._whole, {}
        batches = {
            gateway: [attempt.frame(index) for attempt, index in attempts.values()]
            for gateway, attempts in unsent.items()
        }
        for gateway, frames in whole.items():
            batches.setdefault(gateway, []).extend(frames)
        for gateway, frames in batches.items():
            await self._send(gateway, frames)

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


def frame_bytes_max(frame: Frame) -> int:
    """Return an upper bound of the frame's size on the bus."""
    if not frame.logprobs and frame.finish is None:
        # Four bytes are the longest character.
        return _FRAME_BYTES + 4 * len(frame.request) + len(frame.tokens)
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
