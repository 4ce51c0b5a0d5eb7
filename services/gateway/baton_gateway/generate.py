"""One request of a client: from a validated body to orders, one driver each, and their common outlet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import msgspec

from baton.blocks import root_key
from baton.errors import BatonError, ContextLengthExceeded, InvalidRequest, Overloaded
from baton.messages import Disaggregation, pack_tokens
from baton_gateway import attempt_events as ev
from baton_gateway.bodies import ChatBody, CompletionBody, OutputOptions, output_of, sampling_of
from baton_gateway.choice import ChoiceText, Piece
from baton_gateway.detokenise import Vocabulary
from baton_gateway.driver import AnswerDriver
from baton_gateway.order import Order
from baton_gateway.outlet import ChoiceOutlet, Ending, Outlet
from baton_gateway.service import Gateway
from baton_gateway.tokenise import ModelTokenizer
from baton_gateway.workers import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFacts:
    """What a request says outside its body."""

    request: str
    """Made here and unique; a client's own `x-request-id` need not be."""
    received_at_s: float
    deadline_at_s: float
    disaggregation: Disaggregation | None
    operation: str
    trace: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request, ready to run: its choices in order, all of the first prompt before those of the second."""

    request: str
    model: str
    orders: tuple[Order, ...]
    choices_per_prompt: int
    output: OutputOptions
    vocabulary: Vocabulary

    @property
    def prompt_tokens(self) -> int:
        return sum(order.prompt_tokens for order in self.orders[:: self.choices_per_prompt])


async def prepare(gateway: Gateway, body: ChatBody | CompletionBody, facts: RequestFacts) -> Job:
    """Tokenise and check. Raises InvalidRequest, ContextLengthExceeded, ModelNotFound, NoWorkers, Overloaded."""
    model = gateway.workers.model(body.model)
    # Contradictions that need no tokens are found before the work of tokenising.
    output = output_of(body)
    gateway.workers.check_parameters(model.name, sampling_of(body, 1 << 30).extensions)
    prompts = 1 if isinstance(body, ChatBody) else len(body.prompts())
    choices = prompts * (body.n or 1)
    if choices > gateway.settings.choices_max:
        most = gateway.settings.choices_max
        raise InvalidRequest(f"{choices} answers are asked for; this server gives at most {most}", param="n")
    if len(gateway.routes) + choices > gateway.settings.requests_max:
        raise Overloaded("this gateway serves as many requests as it can", retry_after_s=1.0)
    with gateway.tracing.span("tokenise", parent=facts.trace):
        tokenizer = await gateway.tokenizers.get(model.path, model.digest)
        tokenised = await _tokenise(gateway, body, tokenizer)
    numbers = count()
    orders = [
        order
        for tokens in tokenised
        for order in _orders(body, facts, model, tokenizer, tokens, [next(numbers) for _ in range(body.n or 1)])
    ]
    return Job(
        request=facts.request,
        model=model.name,
        orders=tuple(orders),
        choices_per_prompt=body.n or 1,
        output=output,
        vocabulary=tokenizer.vocabulary,
    )


async def _tokenise(gateway: Gateway, body: ChatBody | CompletionBody, tokenizer: ModelTokenizer) -> list[list[int]]:
    run = gateway.tokenizers.run
    if isinstance(body, ChatBody):
        chars = sum(len(message.text()) for message in body.messages)
        # Templates write the special tokens themselves.
        special = bool(body.add_special_tokens)
        return [await run(chars, lambda: tokenizer.encode(tokenizer.render(body), add_special=special))]
    tokenised: list[list[int]] = []
    for prompt in body.prompts():
        if isinstance(prompt, str):
            special = body.add_special_tokens is not False
            tokenised.append(await run(len(prompt), partial(tokenizer.encode, prompt, add_special=special)))
        else:
            tokenizer.check_tokens(prompt, "prompt")
            tokenised.append(prompt)
    return tokenised


def _orders(
    body: ChatBody | CompletionBody,
    facts: RequestFacts,
    model: Model,
    tokenizer: ModelTokenizer,
    tokens: list[int],
    choices: Sequence[int],
) -> list[Order]:
    """Return one order for each of a prompt's choices."""
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    if not tokens:
        raise InvalidRequest("the prompt is empty", param=param)
    sampling = sampling_of(body, fit_output(len(tokens), body.tokens_max(), model.context_tokens_max, param))
    tokenizer.check_tokens(sampling.stop_token_ids, "stop_token_ids")
    tokenizer.check_tokens(list(sampling.logit_bias or ()), "logit_bias")
    packed = pack_tokens(tokens)
    root = root_key(model.digest, salt=body.cache_salt or "")
    return [
        Order(
            request=f"{facts.request}-{choice}",
            model=model,
            tokens=packed,
            prompt_tokens=len(tokens),
            root=root,
            # As in vLLM, choices of one seed differ from each other and are the same every time.
            sampling=sampling
            if sampling.seed is None or not number
            else msgspec.structs.replace(sampling, seed=sampling.seed + number),
            eos_tokens=tokenizer.eos_tokens,
            cache_salt=body.cache_salt or "",
            disaggregation=facts.disaggregation,
            received_at_s=facts.received_at_s,
            deadline_at_s=facts.deadline_at_s,
            operation=facts.operation,
            trace=facts.trace,
        )
        for number, choice in enumerate(choices)
    ]


def fit_output(prompt_tokens: int, asked_tokens: int | None, context_tokens_max: int, param: str) -> int:
    """Return the output's bound. Raises ContextLengthExceeded, with the figures, where the context is too short."""
    room = context_tokens_max - prompt_tokens
    if asked_tokens is not None and asked_tokens <= room:
        return asked_tokens
    if asked_tokens is None and room >= 1:
        return room
    asked = (
        f"{prompt_tokens + asked_tokens} tokens ({prompt_tokens} in the prompt, {asked_tokens} for the answer)"
        if asked_tokens is not None
        else f"{prompt_tokens} tokens in the prompt, which leaves none for the answer"
    )
    raise ContextLengthExceeded(
        f"this model's maximum context length is {context_tokens_max} tokens, and the request has {asked}", param=param
    )


class Production:
    """The drivers of a job at work. Leaving the context ends them, and tells their workers."""

    def __init__(self, gateway: Gateway, job: Job, outlet: Outlet, on_ended: Callable[[], None]) -> None:
        """`on_ended` is called as each choice has ended."""
        self._outlet = outlet
        self._on_ended = on_ended
        self._drivers = [
            AnswerDriver(
                order, partial(ChoiceText, job.vocabulary, job.output), ChoiceOutlet(outlet, choice), gateway.links
            )
            for choice, order in enumerate(job.orders)
        ]

    async def run(self) -> None:
        """Produce all choices; each ends with an `Ending` in the outlet."""
        async with asyncio.TaskGroup() as group:
            for choice, driver in enumerate(self._drivers):
                group.create_task(self._produce(choice, driver))

    async def _produce(self, choice: int, driver: AnswerDriver) -> None:
        try:
            self._outlet.put(choice, Ending(await driver.run()))
        except BatonError as error:
            self._outlet.put(choice, Ending(error))
        finally:
            self._on_ended()

    def note_shown(self, choice: int) -> None:
        """The client gets the first part of a choice."""
        self._drivers[choice].post(ev.Shown())

    def abort(self, error: BatonError) -> None:
        """Nobody wants the answer any more. The drivers end on their own, at once."""
        for driver in self._drivers:
            driver.post(ev.Aborted(error))


__all__ = ["Job", "Piece", "Production", "RequestFacts", "fit_output", "prepare"]
