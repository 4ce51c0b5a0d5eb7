"""Admission: turns a task on the bus into requests to the ledger and the engine, or into a refusal. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from baton.engines.engine import EngineFacts, EngineRequest, Leg
from baton.errors import MalformedMessage
from baton.messages.attempts import DecodeTask, PrefillTask
from baton.messages.base import WorkerAddress, unpack_tokens
from baton.messages.workers import RANKS_MAX, Role
from baton.worker.assembly import Assembly
from baton.worker.attempt import Ask, Key, Refusal
from baton.worker.role import WorkerRole

REQUEST_CHARACTERS_MAX: Final = 256
_GATEWAY = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity of this generation of the worker, as others see it."""

    address: WorkerAddress
    model_name: str
    model_path: str
    block_tokens: int
    engine_kind: str = ""
    """Kind of the engine, see `Heartbeat.engine_kind`."""


def key_of(task: PrefillTask | DecodeTask) -> Key:
    return task.context.request, task.context.attempt


def check_task(
    task: PrefillTask | DecodeTask, identity: Identity, role: WorkerRole, facts: EngineFacts
) -> Ask | Refusal:
    """Return the request to the ledger, or why this worker can never run this task."""
    wanted = Role.PREFILL if isinstance(task, PrefillTask) else Role.DECODE
    if wanted is not role.role:
        return Refusal("role", f"this is a {role.role} worker, not a {wanted} worker")
    if task.role_epoch != role.epoch:
        return Refusal("role", f"meant for role epoch {task.role_epoch}, this is {role.epoch}")
    if task.generation != identity.address.generation:
        return Refusal("generation", f"meant for generation {task.generation}, this is {identity.address.generation}")
    if not 0 < len(task.context.request) <= REQUEST_CHARACTERS_MAX or task.context.attempt < 0:
        return Refusal(
            "malformed", f"a request id has 1 to {REQUEST_CHARACTERS_MAX} characters, an attempt counts from 0"
        )
    if not _GATEWAY.fullmatch(task.gateway):
        return Refusal("malformed", "a gateway's name has letters, digits, - and _ only")
    if not 0 < task.prompt_tokens <= facts.context_tokens_max:
        return Refusal(
            "malformed", f"a prompt of {task.prompt_tokens} tokens; the engine takes 1 to {facts.context_tokens_max}"
        )
    if task.sampling.max_tokens < 1:
        return Refusal("malformed", "max_tokens must be at least 1")
    leg, partner = Leg.PREFILL, ""
    if isinstance(task, PrefillTask):
        partner = task.sink
    else:
        leg = Leg.DECODE if task.source else Leg.WHOLE
        partner = task.source.worker if task.source else ""
    if leg is not Leg.WHOLE and task.wait_s > 0 and not partner:
        return Refusal("malformed", "a leg that may wait names the worker of the other one")
    if leg is not Leg.WHOLE and not facts.agents:
        return Refusal("malformed", "this worker's engine has no transfer agent, it cannot hand off")
    if isinstance(task, PrefillTask) and not 0 <= task.sink_ranks <= RANKS_MAX:
        return Refusal("malformed", f"a decode worker of {task.sink_ranks} ranks; there are at most {RANKS_MAX}")
    if isinstance(task, DecodeTask) and task.source and not 0 < len(task.source.agents) <= RANKS_MAX:
        return Refusal("malformed", f"a source with {len(task.source.agents)} transfer agents; it has 1 to {RANKS_MAX}")
    return Ask(
        key=key_of(task),
        gateway=task.gateway,
        leg=leg,
        prompt_tokens=task.prompt_tokens,
        output_tokens_max=task.sampling.max_tokens,
        budget_s=task.context.budget_s,
        # The last token is always computed, to sample from it.
        cached_tokens=max(0, min(task.cached_tokens, task.prompt_tokens - 1)),
        wait_s=task.wait_s,
        partner=partner,
    )


def assemble(task: PrefillTask | DecodeTask, assembly: Assembly) -> list[int] | Refusal:
    """Return the whole prompt, the chunks that came before the task and its tail, or why it is not usable."""
    try:
        packed = assembly.complete(key_of(task), task.tokens, task.prompt_tokens)
        return Refusal("incomplete", "chunks of the prompt are missing") if packed is None else unpack_tokens(packed)
    except MalformedMessage as error:
        return Refusal("malformed", str(error))


def engine_request(task: PrefillTask | DecodeTask, ask: Ask, tokens: list[int], budget_s: float) -> EngineRequest:
    return EngineRequest(
        request=task.context.request,
        attempt=task.context.attempt,
        leg=ask.leg,
        tokens=tokens,
        sampling=task.sampling,
        cache_salt=task.cache_salt,
        source=task.source if isinstance(task, DecodeTask) else None,
        sink_ranks=task.sink_ranks if isinstance(task, PrefillTask) else 0,
        budget_s=budget_s,
    )
