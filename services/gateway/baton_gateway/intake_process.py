"""Intake process: takes in bodies for the gateway, one at a time (`python -m baton_gateway.intake_process`).

It ends when the pipe that it reads from closes, and so with its gateway, however the gateway ends.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import BinaryIO, Final

import msgspec

from baton.errors import BatonError
from baton.messages.base import ErrorReport
from baton.telemetry.logs import LogFormat, LogLevel, configure_logs
from baton_gateway.intake import Intake, Parsed, Plan
from baton_gateway.intake_messages import (
    LARGE_BYTES,
    LENGTH_BYTES,
    MODELS_MAX,
    BodyDropped,
    Convert,
    DropBody,
    EnvelopeRead,
    Failed,
    LoadModel,
    MakePlan,
    ParseBody,
    ReadEnvelope,
    Reply,
    Request,
    decode_request,
    encode,
    frame_head,
    frame_length,
)
from baton_gateway.parsing.formats import FormatName
from baton_gateway.responses.bodies import read_envelope
from baton_gateway.tokenise import ModelTokenizer, load_to_stay

log = logging.getLogger(__name__)

TRIMMED_BYTES: Final = 1 << 20
"""Length of a body after which the allocator gives free memory back: of one of 8 MiB, 850 MiB would stay."""

Receive = Callable[[], bytes]


def serve(
    receive: Receive,
    send: Callable[[bytes], None],
    load: Callable[[str], ModelTokenizer],
    trim: Callable[[], object],
) -> None:
    """Answer requests for ever. `trim`: called when a long body is dropped, to give free memory back."""

    @lru_cache(MODELS_MAX)
    def tokenizer_of(path: str, digest: str) -> ModelTokenizer:
        del digest  # A model that changes keeps its path.
        return load(path)

    intake = Intake()
    body_bytes = 0

    def receive_body() -> bytes:
        nonlocal body_bytes
        body = receive()
        body_bytes = len(body)
        return body

    def drop_body() -> None:
        nonlocal body_bytes
        intake.drop()
        gc.collect()
        if body_bytes >= TRIMMED_BYTES:
            trim()
        body_bytes = 0

    def answer(request: Request) -> Reply:
        match request:
            case LoadModel(path, digest):
                return tokenizer_of(path, digest).facts
            case ParseBody(operation, context):
                return intake.parse(operation, receive_body(), context)
            case ReadEnvelope():
                return EnvelopeRead(read_envelope(receive_body()))
            case Convert(model, salt):
                return intake.convert(tokenizer_of(model.path, model.digest), model, salt=salt)
            case MakePlan(model, model_defaults, salt):
                tokenizer = tokenizer_of(model.path, model.digest)
                return intake.plan(tokenizer, model, model_defaults=model_defaults, salt=salt)
            case DropBody():
                drop_body()
                return BodyDropped()

    def respond() -> Reply:
        try:
            return answer(decode_request(receive()))
        except BatonError as error:
            return Failed(ErrorReport.of(error))
        except Exception:  # The boundary of every request: an unexpected error is a bug, and is logged as one.
            log.exception("a request's body could not be taken in")
            return Failed(ErrorReport.of(BatonError("the server failed unexpectedly; its log has the details")))

    while True:
        reply = respond()
        if isinstance(reply, Plan):
            send(encode(msgspec.structs.replace(reply, prompts=())))
            for prompt in reply.prompts:
                send(encode(prompt))
        else:
            send(encode(reply))
        is_done, reply = not isinstance(reply, Parsed | BodyDropped), None
        # Garbage is collected between bodies only: while a long one is decoded, the collector would visit its many
        # objects again and again. A long one is dropped first: this process is not lent again before.
        if is_done and body_bytes < LARGE_BYTES:
            gc.collect()


def main(load: Callable[[str], ModelTokenizer]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        # These signals are meant for the gateway, which still finishes what it has begun.
        signal.signal(number, signal.SIG_IGN)
    gc.disable()
    # Output that libraries print must not mix with the frames.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    frames: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, frames), daemon=True).start()

    def send(payload: bytes) -> None:
        replies.write(frame_head(payload))
        replies.write(payload)
        replies.flush()

    serve(frames.get, send, load, trimmer())


def trimmer() -> Callable[[], object]:
    """Return the C library's `malloc_trim`, where it has one."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return partial(trim, 0) if trim else lambda: None


def _read(pipe: BinaryIO, frames: SimpleQueue[bytes]) -> None:
    """Queue incoming frames; end the process at once when the gateway is gone."""
    while len(head := pipe.read(LENGTH_BYTES)) == LENGTH_BYTES:
        frames.put(pipe.read(frame_length(head)))
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("answer_format", nargs="?", type=FormatName, default=FormatName.AUTO)
    parser.add_argument("--log-level", type=LogLevel, default=LogLevel.INFO)
    parser.add_argument("--log-format", type=LogFormat, default=LogFormat.TEXT)
    given = parser.parse_args()
    configure_logs(given.log_level, given.log_format)
    main(partial(load_to_stay, answer_format=given.answer_format))
