"""What a driver sends for an attempt: the question to schedulers, and the tasks for its workers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.blocks import ID_BYTES, hash_blocks
from baton.errors import NoResponders
from baton.messages.attempts import DecodeTask, PrefillTask
from baton.messages.base import TOKEN_BYTES, Context, pack_tokens
from baton.messages.placement import PRIORITY_BEGUN, Place, Placement
from baton_gateway import attempt_events as ev
from baton_gateway.order import Order
from baton_gateway.resumption import resumed


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt of an attempt: the order's, and what the answer has delivered so far."""

    order: Order
    delivered: Sequence[int]

    @property
    def packed(self) -> bytes:
        return self.order.tokens + pack_tokens(self.delivered) if self.delivered else self.order.tokens

    @property
    def tokens(self) -> int:
        return self.order.prompt_tokens + len(self.delivered)

    def blocks(self) -> bytes:
        """Return the block ids; those of the order's prompt are known."""
        order = self.order
        hashed_bytes = len(order.blocks) // ID_BYTES * order.model.block_tokens * TOKEN_BYTES
        rest, parent = self.packed[hashed_bytes:], order.blocks[-ID_BYTES:]
        return order.blocks + hash_blocks(order.root, rest, order.model.block_tokens, parent)


def no_scheduler() -> NoResponders:
    """Return the error of a question that reached no scheduler, as opposed to one that stayed unanswered."""
    return NoResponders("no scheduler listens on the message bus", retry_after_s=1.0)


def question_of(
    prompt: Prompt, action: ev.SendPlace, context: Context, *, gateway: str, hold_s: float, is_retry: bool, now_s: float
) -> Place:
    """Return the question to schedulers. `is_retry`: an earlier attempt of the answer has failed."""
    order, objectives, has_begun = prompt.order, prompt.order.objectives, bool(prompt.delivered)
    # A request that was admitted stays so: if its attempt fails, the next one is not refused by its objectives.
    is_new = not (has_begun or is_retry)
    return Place(
        context=context,
        model=order.model.name,
        blocks=prompt.blocks(),
        prompt_tokens=prompt.tokens,
        output_tokens_max=order.sampling.max_tokens - len(prompt.delivered),
        disaggregation=order.disaggregation,
        session=order.session,
        exclude=action.exclude,
        exclude_pairs=action.exclude_pairs,
        parameters=order.sampling.parameters,
        refused=action.refused,
        unavailable=action.unavailable,
        gateway=gateway,
        hold_s=hold_s,
        due_in_s=order.received_at_s + objectives.ttft_s - now_s,
        ttft_s=objectives.ttft_s if is_new and objectives.admits_by_ttft else 0.0,
        tpot_s=objectives.tpot_s if is_new and objectives.admits_by_tpot else 0.0,
        tenant=order.tenant,
        weight=objectives.weight,
        priority=PRIORITY_BEGUN if has_begun else objectives.priority,
    )


def tasks_of(
    prompt: Prompt, placement: Placement, context: Context, *, gateway: str
) -> Iterator[tuple[str, PrefillTask | DecodeTask]]:
    """Yield each worker and its task, still without the prompt's tokens."""
    order, decode, prefill = prompt.order, placement.decode, placement.prefill
    sampling = resumed(order.sampling, len(prompt.delivered))
    if prefill is not None:
        yield (
            prefill.worker,
            PrefillTask(
                context=context,
                gateway=gateway,
                generation=prefill.generation,
                role_epoch=prefill.role_epoch,
                tokens=b"",
                prompt_tokens=prompt.tokens,
                sampling=sampling,
                cache_salt=order.cache_salt,
                sink_ranks=len(decode.agents),
                cached_tokens=placement.predicted.cached_tokens,
                wait_s=placement.wait_s,
                sink=decode.worker,
                lender=placement.lender,
            ),
        )
    yield (
        decode.worker,
        DecodeTask(
            context=context,
            gateway=gateway,
            generation=decode.generation,
            role_epoch=decode.role_epoch,
            tokens=b"",
            prompt_tokens=prompt.tokens,
            sampling=sampling,
            cache_salt=order.cache_salt,
            source=prefill,
            cached_tokens=placement.predicted.cached_tokens if prefill is None else 0,
            wait_s=placement.wait_s,
            lender=placement.lender if prefill is None else "",
        ),
    )


def cut(tokens: bytes, room_bytes: int) -> list[bytes]:
    """Return packed tokens in pieces of at most `room_bytes`, all but the last equally long; at least one piece."""
    size = max(TOKEN_BYTES, room_bytes // TOKEN_BYTES * TOKEN_BYTES)
    return [tokens[start : start + size] for start in range(0, len(tokens), size)] or [b""]
