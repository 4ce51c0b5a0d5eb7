"""One client request: from a body to orders, one driver per order, and their common outlet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Final

import msgspec

from baton.errors import (
    BatonError,
    ClientGone,
    ConfigurationError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from baton.messages.attempts import Sampling
from baton.messages.base import TOKEN_BYTES, unpack_tokens
from baton.messages.placement import Disaggregation, Placement
from baton_gateway import attempt_events as ev
from baton_gateway.answers import PromptHead
from baton_gateway.attempt import AttemptMachine
from baton_gateway.choice import ChoiceText
from baton_gateway.conversion import Conversion
from baton_gateway.detokenise import PROMPT_TOKENS, Vocabulary
from baton_gateway.driver import AnswerDriver
from baton_gateway.intake import Intake, Operation, Parsed, Plan, Prompt
from baton_gateway.models import LOAD_RETRY_S, KnownModel
from baton_gateway.objectives import Objectives
from baton_gateway.order import Order, Outcome
from baton_gateway.outlet import ChoiceOutlet, Ending, Outlet, TextWriter
from baton_gateway.parsing.parsed_text import ParsedText
from baton_gateway.parsing.parser import AnswerFormat
from baton_gateway.responses.bodies import Envelope, ResponseContext
from baton_gateway.service import Gateway
from baton_gateway.tenants.keys import Usage
from baton_gateway.tenants.quotas import Charge
from baton_gateway.tenants.tenant import Access, Permission
from baton_gateway.workers import Model

HERE_BYTES_MAX: Final = 2048
"""Longest body read in this process."""
SESSION_BYTES: Final = 16


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a request outside its body."""

    request: str
    """Unique id made by the gateway; a client's own `x-request-id` need not be unique."""
    received_at_s: float
    deadline_at_s: float
    disaggregation: Disaggregation | None
    session: str
    """The client's name of the conversation; empty: the body may have one."""
    operation: Operation
    trace: str
    access: Access
    limit_headers: dict[str, str]
    """Headers of the response that state the key's limits."""
    objectives: Objectives


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request, ready to run. Its choices are ordered by prompt: those of the first prompt come first."""

    request: str
    model: str
    orders: tuple[Order, ...]
    plan: Plan
    vocabulary: Vocabulary
    charge: Charge
    answers: AnswerFormat | None = None

    @property
    def choices_per_prompt(self) -> int:
        return self.plan.choices_per_prompt

    @property
    def prompt_tokens(self) -> int:
        return sum(order.prompt_tokens for order in self.orders[:: self.choices_per_prompt])


def prepare_here(
    gateway: Gateway, payload: bytes | bytearray, facts: RequestFacts, context: ResponseContext | None = None
) -> Job | None:
    """Return the job of a short body at once, which is faster than a round trip to another process.

    None: the body is long, or the model's tokenizer is not in this process. Raises as `prepare`.
    """
    if len(payload) + (len(context.history) if context else 0) > HERE_BYTES_MAX:
        return None
    intake = Intake()
    parsed = intake.parse(facts.operation, payload, context)
    model = _accept(gateway, parsed, facts.access)
    known = gateway.models.known(model.path, model.digest)
    # A client's template may run for long, and other streams must not wait.
    if known is None or known.tokenizer is None or parsed.own_template:
        return None
    with gateway.tracing.span("tokenise", parent=facts.trace):
        plan = intake.plan(
            known.tokenizer, model, model_defaults=gateway.settings.model_defaults, salt=facts.access.salt
        )
        return _job(gateway, facts, model, known, plan)


async def prepare(
    gateway: Gateway, payload: bytes | bytearray, facts: RequestFacts, context: ResponseContext | None = None
) -> Job:
    """Return the job of any body, read and tokenised in another process.

    Raises InvalidRequest, ContextLengthExceeded, ModelNotFound, NoWorkers, Overloaded, DeadlineExceeded.
    """
    models = gateway.models
    async with _reading(gateway, facts.deadline_at_s):
        with gateway.tracing.span("tokenise", parent=facts.trace):
            async with models.intake.lend(payload, facts.deadline_at_s, tenant=facts.access.tenant) as worker:
                model = _accept(gateway, await worker.parse(facts.operation, payload, context), facts.access)
                if models.prepare(model.path, model.digest).done():
                    await models.get(model.path, model.digest)  # Raises where the model does not load.
                plan = await worker.plan(model, model_defaults=gateway.settings.model_defaults, salt=facts.access.salt)
            # Not earlier: loading a model may need the very process that was lent.
            known = await models.get(model.path, model.digest)
            return _job(gateway, facts, model, known, plan)


async def envelope_of(gateway: Gateway, payload: bytes | bytearray, facts: RequestFacts) -> Envelope:
    """Return the envelope of a long body for /v1/responses, read in another process.

    Raises InvalidRequest, Overloaded, DeadlineExceeded.
    """
    async with (
        _reading(gateway, facts.deadline_at_s),
        gateway.models.intake.lend(payload, facts.deadline_at_s, tenant=facts.access.tenant) as worker,
    ):
        return await worker.read_envelope(payload)


async def answer_conversion(
    gateway: Gateway, conversion: Conversion, payload: bytes | bytearray, access: Access
) -> bytes:
    """Return the answer to a body of /tokenize or /detokenize, as JSON, made elsewhere. Raises as `prepare`."""
    deadline_at_s = gateway.clock.now_s() + gateway.settings.deadline_s
    async with (
        _reading(gateway, deadline_at_s),
        gateway.models.intake.lend(payload, deadline_at_s, tenant=access.tenant) as worker,
    ):
        model = _accept(gateway, await worker.parse(conversion, payload), access)
        return (await worker.convert(model, salt=access.salt)).answer


@asynccontextmanager
async def _reading(gateway: Gateway, deadline_at_s: float) -> AsyncGenerator[None]:
    """Read a body inside this context. Raises DeadlineExceeded, and Unavailable where its model does not load."""
    try:
        async with gateway.clock.timeout(deadline_at_s - gateway.clock.now_s()):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded("the request's deadline passed before it was read") from error
    except ConfigurationError as error:
        raise Unavailable(error.detail, retry_after_s=LOAD_RETRY_S) from error


def _accept(gateway: Gateway, parsed: Parsed, access: Access) -> Model:
    """Return a body's model.

    Raises if the client may not use it, no worker takes the parameters, or the gateway's limits are exceeded.
    """
    access.check_model(parsed.model)
    model = gateway.workers.model(parsed.model)
    gateway.workers.check_parameters(
        model.name, parsed.parameters, parsed.constraint_field, beside_tools=parsed.beside_tools
    )
    trusted = gateway.settings.trust_request_chat_template or access.may(Permission.CHAT_TEMPLATE)
    if parsed.own_template and not trusted:
        said = (
            "`chat_template` is a program, which only a gateway with `--trust-request-chat-template` takes, or from an "
            f"API key with the permission `{Permission.CHAT_TEMPLATE}`"
        )
        raise InvalidRequest(said, param="chat_template")
    choices, most = parsed.prompts * parsed.choices_per_prompt, gateway.settings.choices_max
    if choices > most:
        raise InvalidRequest(f"{choices} answers are asked for; this server gives at most {most}", param="n")
    if len(gateway.routes) + choices > gateway.settings.requests_max:
        raise Overloaded("this gateway serves as many requests as it can", retry_after_s=1.0)
    return model


def prompt_heads(job: Job) -> tuple[PromptHead, ...]:
    """Return what the answer says of each choice's prompt; nothing for most requests."""
    output = job.plan.output
    if not (output.token_ids or output.counts or any(prompt.echo for prompt in job.plan.prompts)):
        return ()
    return tuple(
        PromptHead(
            tokens=len(prompt.tokens) // TOKEN_BYTES,
            token_ids=tuple(unpack_tokens(prompt.tokens)) if output.token_ids else (),
            echo=prompt.echo,
        )
        for prompt in job.plan.prompts
        for _ in range(job.choices_per_prompt)
    )


def _session_name(said: str, salt: str) -> str:
    """Return a name of fixed length that does not show what the client said, and is not another tenant's."""
    return blake2b(said.encode(), digest_size=SESSION_BYTES, key=salt.encode()).hexdigest() if said else ""


def _job(gateway: Gateway, facts: RequestFacts, model: Model, known: KnownModel, plan: Plan) -> Job:
    numbers = count()
    session = _session_name(facts.session or plan.session, facts.access.salt)
    return Job(
        request=facts.request,
        model=model.name,
        orders=tuple(
            Order(
                request=f"{facts.request}-{next(numbers)}",
                client_request=facts.request,
                model=model,
                tokens=prompt.tokens,
                prompt_tokens=len(prompt.tokens) // TOKEN_BYTES,
                root=plan.root,
                blocks=prompt.blocks,
                sampling=_sampling(plan, prompt, choice),
                eos_tokens=known.eos_tokens,
                cache_salt=plan.cache_salt,
                disaggregation=facts.disaggregation,
                session=session,
                received_at_s=facts.received_at_s,
                deadline_at_s=facts.deadline_at_s,
                operation=facts.operation,
                trace=facts.trace,
                tenant=facts.access.tenant,
                objectives=facts.objectives,
            )
            for prompt in plan.prompts
            for choice in range(plan.choices_per_prompt)
        ),
        plan=plan,
        vocabulary=known.vocabulary,
        charge=gateway.quotas.charge(facts.access, facts.limit_headers),
        answers=known.answers,
    )


def _sampling(plan: Plan, prompt: Prompt, choice: int) -> Sampling:
    seed = plan.sampling.seed
    return msgspec.structs.replace(
        plan.sampling,
        extensions=dict(plan.extensions),
        max_tokens=prompt.max_tokens,
        # As in vLLM, choices of one seed differ from each other, and each is the same every time.
        seed=None if seed is None else seed + choice,
    )


def _text_of(job: Job, order: Order) -> ChoiceText:
    prompt = unpack_tokens(order.tokens[-PROMPT_TOKENS * TOKEN_BYTES :])
    output = job.plan.output
    if output.parsing is None or job.answers is None:
        return ChoiceText(job.vocabulary, output, prompt)
    return ParsedText(job.vocabulary, output, prompt, parsing=output.parsing, form=job.answers, request=order.request)


def _used(
    order: Order, machine: AttemptMachine, outcome: Outcome | None, failure: BatonError | None, *, with_prompt: bool
) -> Usage:
    """Return what an answer that has ended used, complete or not.

    A prompt counts once a token of its answer has come, or if its client left while workers had it.
    """
    output_tokens = len(machine.output.tokens) if outcome is None else outcome.completion_tokens
    was_left = isinstance(failure, ClientGone) and machine.placement is not None
    if not with_prompt or not (outcome or output_tokens or was_left):
        return Usage(output_tokens=output_tokens)
    cached_tokens = 0 if outcome is None else outcome.cached_tokens
    return Usage(prompt_tokens=order.prompt_tokens, output_tokens=output_tokens, cached_tokens=cached_tokens)


class Production:
    """The running drivers of a job."""

    def __init__(self, gateway: Gateway, job: Job, outlet: Outlet) -> None:
        """Make one driver per choice."""
        self._job = job
        self._outlet = outlet
        self._running = len(job.orders)
        self._usage = Usage(requests=1)
        self._ends = [ChoiceOutlet(outlet, choice, by_token=job.plan.stream) for choice in range(len(job.orders))]
        self._drivers = [
            AnswerDriver(order, partial(_text_of, job, order), end, gateway.links)
            for order, end in zip(job.orders, self._ends, strict=True)
        ]

    def start(self, group: asyncio.TaskGroup) -> None:
        """Produce all choices in tasks of `group`; each ends with an `Ending` in the outlet."""
        if self._job.charge.is_limited:
            group.create_task(self._start_charged(group))
        else:
            self._start(group)

    async def _start_charged(self, group: asyncio.TaskGroup) -> None:
        orders = self._job.orders
        try:
            await self._job.charge.reserve(self._job.prompt_tokens, [order.sampling.max_tokens for order in orders])
        except BatonError as error:
            for choice in range(len(orders)):
                self._outlet.put(choice, Ending(error.with_traceback(None)))
        else:
            self._start(group)

    def _start(self, group: asyncio.TaskGroup) -> None:
        for choice, driver in enumerate(self._drivers):
            group.create_task(self._produce(choice, driver, group))

    async def _produce(self, choice: int, driver: AnswerDriver, group: asyncio.TaskGroup) -> None:
        outcome: Outcome | None = None
        failure: BatonError | None = None
        try:
            outcome = await driver.run(group)
        except BatonError as error:
            failure = error.with_traceback(None)
            self._outlet.put(choice, Ending(failure))
        finally:
            # Choices of one prompt share it.
            with_prompt = choice % self._job.choices_per_prompt == 0
            self._usage += _used(self._job.orders[choice], driver.machine, outcome, failure, with_prompt=with_prompt)
            self._running -= 1
            if not self._running:
                self._job.charge.settle(self._usage)

    def routes(self) -> list[Placement | None]:
        """Return the present placement of each choice."""
        return [driver.machine.placement for driver in self._drivers]

    def note_shown(self, choice: int, write_texts: TextWriter | None = None) -> None:
        """Note that the client receives the first part of a choice. `write_texts`: short way for what follows."""
        self._drivers[choice].post(ev.Shown())
        self._ends[choice].write_texts = write_texts

    def abort(self, error: BatonError) -> None:
        """Abort all choices with this error. The drivers end at once, on their own."""
        for driver in self._drivers:
            driver.post(ev.Aborted(error))
