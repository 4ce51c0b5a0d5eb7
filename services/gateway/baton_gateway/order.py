"""Order and outcome of one answer."""

from __future__ import annotations

import msgspec

from baton.messages.attempts import FinishReason, Sampling
from baton.messages.placement import Disaggregation
from baton_gateway.objectives import Objectives
from baton_gateway.workers import Model


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to produce: one choice of one prompt."""

    request: str
    client_request: str
    """Request of which this is one choice; its choices are suspected together."""
    model: Model
    tokens: bytes
    """The prompt, packed."""
    prompt_tokens: int
    root: bytes
    """Key of the prompt's block ids."""
    blocks: bytes
    """Ids of the prompt's full blocks."""
    sampling: Sampling
    eos_tokens: frozenset[int]
    cache_salt: str
    disaggregation: Disaggregation | None
    session: str
    """See `Place.session`."""
    received_at_s: float
    deadline_at_s: float
    operation: str
    """Endpoint, named as in OpenTelemetry's conventions: `chat` or `text_completion`."""
    trace: str
    tenant: str
    """See `Place.tenant`."""
    objectives: Objectives


class Outcome(msgspec.Struct, frozen=True):
    reason: FinishReason
    completion_tokens: int
    cached_tokens: int
    calls: int = 0
    """Tool calls in the answer."""
    stop: str = ""
    """The stop string that ended it; empty if none did."""
    reasoning_tokens: int | None = None
    """Part of `completion_tokens`, up to the last piece of reasoning; None: the model's format has no reasoning."""

    @property
    def finish_reason(self) -> str:
        """OpenAI's finish reason."""
        return "tool_calls" if self.calls and self.reason is FinishReason.STOP else self.reason.value
