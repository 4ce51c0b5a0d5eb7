"""Structured output of vLLM that continues an answer: its grammar begins after the tokens that were delivered before.

vLLM makes a grammar at its first character for each request. An answer that moves to this engine has its delivered
tokens at the end of its prompt, so the new grammar accepts these before it is used.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

DELIVERED_PARAMETER: Final = "baton_delivered_tokens"
"""Key of `Sampling.delivered_tokens` in the parameters that vLLM passes on unread (`extra_args`)."""


def advance_grammars() -> None:
    """Have vLLM's scheduler advance each new grammar; called once in each of vLLM's processes."""
    from vllm.v1.structured_output import StructuredOutputManager

    create = StructuredOutputManager._create_grammar  # pyright: ignore[reportPrivateUsage]

    # vLLM calls it on a thread of its own, and ends the request alone if it raises.
    @wraps(create)
    def create_advanced(manager: StructuredOutputManager, request: Request) -> StructuredOutputGrammar:
        grammar = create(manager, request)
        extra = (request.sampling_params and request.sampling_params.extra_args) or {}
        tokens = (request.prompt_token_ids or [])[-extra.get(DELIVERED_PARAMETER, 0) :]
        if DELIVERED_PARAMETER in extra and not grammar.accept_tokens(request.request_id, tokens):
            raise ValueError("the constraint does not allow what was delivered of the answer")
        return grammar

    StructuredOutputManager._create_grammar = create_advanced  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage]
