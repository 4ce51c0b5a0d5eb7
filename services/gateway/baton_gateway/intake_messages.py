"""Messages between the gateway and its intake processes, over pipes: frames of a length and that many bytes.

gateway                                  intake process
  LoadModel ─────────────────────────────▶ ModelFacts | Failed
  ParseBody, then the body as a frame ───▶ Parsed | Failed
  ReadEnvelope, then the body ───────────▶ EnvelopeRead | Failed
  Convert ───────────────────────────────▶ Converted | Failed
  MakePlan ──────────────────────────────▶ Plan without prompts, then one frame for each | Failed
  DropBody ──────────────────────────────▶ BodyDropped, once its memory is free
"""

from __future__ import annotations

from typing import Final

import msgspec

from baton.messages.base import ErrorReport
from baton_gateway.conversion import Conversion, Converted
from baton_gateway.intake import Operation, Parsed, Plan, Prompt
from baton_gateway.responses.bodies import Envelope, ResponseContext
from baton_gateway.tokenise import ModelFacts
from baton_gateway.workers import Model

LENGTH_BYTES: Final = 4
MODELS_MAX: Final = 8
"""Number of models whose tokenizers an intake process keeps."""
LARGE_BYTES: Final = 256 << 10
"""Length from which a body is large: it goes to a process for large ones, which drops it when all is done."""


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    path: str
    digest: str


class ParseBody(msgspec.Struct, frozen=True, tag=True):
    operation: Operation | Conversion
    context: ResponseContext | None = None


class ReadEnvelope(msgspec.Struct, frozen=True, tag=True):
    """Asks for the envelope of a body for /v1/responses, which follows as a frame."""


class EnvelopeRead(msgspec.Struct, frozen=True, tag=True):
    envelope: Envelope


class MakePlan(msgspec.Struct, frozen=True, tag=True):
    model: Model
    model_defaults: bool
    salt: str


class Convert(msgspec.Struct, frozen=True, tag=True):
    model: Model
    salt: str


class DropBody(msgspec.Struct, frozen=True, tag=True):
    """Ends the work on a body: it was long, or was parsed and will not be planned."""


class BodyDropped(msgspec.Struct, frozen=True, tag=True):
    pass


class Failed(msgspec.Struct, frozen=True, tag=True):
    error: ErrorReport


Request = LoadModel | ParseBody | ReadEnvelope | MakePlan | Convert | DropBody
Reply = ModelFacts | Parsed | EnvelopeRead | Plan | Converted | BodyDropped | Failed

encode: Final = msgspec.msgpack.Encoder().encode
decode_request: Final = msgspec.msgpack.Decoder(Request).decode
decode_reply: Final = msgspec.msgpack.Decoder(Reply).decode
decode_prompt: Final = msgspec.msgpack.Decoder(Prompt).decode


def frame_head(payload: bytes | bytearray) -> bytes:
    return len(payload).to_bytes(LENGTH_BYTES, "little")


def frame_length(head: bytes) -> int:
    return int.from_bytes(head, "little")
