"""Scripted schedulers and workers for tests of the gateway.

The actors speak the real messages. A worker's output depends only on how many tokens came before, so an
answer that moves between workers must read as if nothing had happened. Each actor can be told to lose,
repeat, delay and reorder its messages, to refuse tasks, to fall silent and to die.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final

from baton_gateway.parsing.formats import FormatName
from baton_gateway.tokenise import ModelTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from baton import subjects
from baton.bus import Bus, Delivery
from baton.clock import Clock
from baton.errors import BatonError, BusUnavailable, InvalidRequest, NoWorkers
from baton.messages.attempts import (
    Accepted,
    Acknowledge,
    AttemptState,
    Busy,
    Cancel,
    ConstraintKind,
    DecodeTask,
    Digest,
    DigestEntry,
    Finish,
    FinishReason,
    Frame,
    Frames,
    Prefilled,
    PrefillTask,
    Resend,
    TokenChunk,
    TokenLogprob,
    Usage,
)
from baton.messages.base import Context, ErrorReport, Refused, WorkerAddress, pack_tokens, unpack_tokens
from baton.messages.codec import AnyMessage
from baton.messages.placement import Candidate, Disaggregation, Held, Place, Placement, Released
from baton.messages.workers import Heartbeat, Role
from tests.harness.heartbeats import heartbeat
from tests.harness.limits import HANG_S

MODEL: Final = "tiny"
CONTEXT_TOKENS: Final = 4096
EOS: Final = 2
HOLD_S: Final = 0.05
SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE: Final = (
    "{% for m in messages %}{% if m['role'] == 'developer' %}{{ raise_exception('no developers here') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CORPUS: Final = ("the quick brown fox jumps over the lazy dog, and then it stops. ", "naïve café, 你好世界, 😀 done. ")


def make_tokenizer(folder: Path, template: str = CHAT_TEMPLATE, marks: Sequence[str] = ()) -> Path:
    """Write a small byte-level BPE tokenizer, laid out like a model's folder.

    `marks`: special tokens beside those of ChatML.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL, *marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS[0]] * 8 + [CORPUS[1]], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[EOS],
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 512}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS]}))
    return folder


@cache
def tiny_model(
    template: str = CHAT_TEMPLATE, marks: tuple[str, ...] = (), answer_format: FormatName = FormatName.AUTO
) -> tuple[Path, ModelTokenizer]:
    """Return the folder and the tokenizer that all tests of a session share."""
    folder = tempfile.mkdtemp(prefix="baton-tiny-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = make_tokenizer(Path(folder), template, marks)
    return path, ModelTokenizer(str(path), answer_format)


@dataclass
class Attempt:
    """A worker's state of one task."""

    task: PrefillTask | DecodeTask
    prompt: list[int]
    tokens: list[int] = field(default_factory=list[int])
    finish: Finish | None = None
    run: asyncio.Task[None] | None = None


@dataclass
class Script:
    """A worker's behaviour. Every field is read when it is needed, so tests may change it at any time."""

    interval_s: float = 0.0
    tokens_per_frame: int = 1
    busy: str = ""
    """Refuse tasks with this reason."""
    refuse: BatonError | None = None
    silent: bool = False
    """Ignore tasks: no answer, no run."""
    stall_at: int | None = None
    """Stop producing after this many tokens of an attempt, but stay alive."""
    die_at: int | None = None
    """Stop everything, heartbeats included, after this many tokens of an attempt."""
    fail_at: int | None = None
    failure: BatonError | None = None
    """End an attempt with this error after `fail_at` tokens."""
    twist: Callable[[list[Frame]], list[Frame]] = lambda frames: frames
    """The network's effect on a frame: lost ([]), repeated or changed."""
    capacity: int = 1 << 30
    cached_tokens: int = 0
    forget: bool = False
    """Send empty digests."""


class Worker:
    def __init__(
        self, actors: Actors, name: str, role: Role = Role.DECODE, *, generation: int = 1, model: str = MODEL
    ) -> None:
        self.actors = actors
        self.name = name
        self.role = role
        self.generation = generation
        self.model = model
        self.script = Script()
        self.parameters: tuple[str, ...] = (
            *("guided_choice", "guided_regex"),
            *(kind.parameter for kind in (ConstraintKind.JSON, ConstraintKind.REGEX, ConstraintKind.STRUCTURAL_TAG)),
        )
        """Parameters that heartbeats declare."""
        self.alive = True
        self.attempts: dict[tuple[str, int], Attempt] = {}
        self.chunks: dict[tuple[str, int], bytes] = {}
        self.tombstones: set[tuple[str, int]] = set()
        self.received: list[AnyMessage] = []
        self.gateways: set[str] = set()
        self.peak = 0

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(worker=self.name, generation=self.generation, agents=(f"agent-{self.name}",))

    def got(self, kind: type[AnyMessage]) -> list[AnyMessage]:
        return [message for message in self.received if isinstance(message, kind)]

    @property
    def running(self) -> int:
        return sum(attempt.finish is None for attempt in self.attempts.values())

    async def handle(self, delivery: Delivery) -> None:
        if not self.alive:
            return
        message = delivery.message
        self.received.append(message)
        match message:
            case TokenChunk(context=context):
                key = (context.request, context.attempt)
                self.chunks[key] = self.chunks.get(key, b"") + message.tokens
            case PrefillTask() | DecodeTask():
                await self._on_task(message, delivery)
            case Cancel(context=context):
                self.tombstones.add((context.request, context.attempt))
                self._drop(context)
            case Acknowledge(context=context):
                self._drop(context)
            case Resend(context=context, index=index):
                await self._resend(context, index)
            case _:
                raise AssertionError(f"unexpected {message}")

    def _drop(self, context: Context) -> None:
        attempt = self.attempts.pop((context.request, context.attempt), None)
        if attempt is not None and attempt.run is not None:
            attempt.run.cancel()

    async def _on_task(self, task: PrefillTask | DecodeTask, delivery: Delivery) -> None:
        key = (task.context.request, task.context.attempt)
        script = self.script
        if script.silent:
            return
        reason = script.busy
        if key in self.tombstones:
            reason = "tombstone"
        elif task.generation != self.generation:
            reason = "generation"
        elif self.running >= script.capacity:
            reason = "full"
        if reason:
            await delivery.respond(Busy(worker=self.name, reason=reason))
            return
        if script.refuse is not None:
            await delivery.respond(Refused(error=ErrorReport.of(script.refuse)))
            return
        self.gateways.add(task.gateway)
        prompt = unpack_tokens(self.chunks.pop(key, b"") + task.tokens)
        assert len(prompt) == task.prompt_tokens, "the prompt did not arrive whole"
        attempt = self.attempts[key] = Attempt(task, prompt)
        self.peak = max(self.peak, self.running)
        await delivery.respond(Accepted(worker=self.name, generation=self.generation))
        if self.role is Role.DECODE:
            assert isinstance(task, DecodeTask)
            attempt.run = self.actors.spawn(self._produce(task.context, task.gateway, attempt))
        else:
            usage = Usage(prompt_tokens=len(prompt), completion_tokens=0, cached_tokens=script.cached_tokens)
            await self.actors.bus.publish(
                subjects.gateway(task.gateway), Prefilled(context=task.context, worker=self.name, usage=usage)
            )

    async def _produce(self, context: Context, gateway: str, attempt: Attempt) -> None:
        sampling = attempt.task.sampling
        origin = self.actors.origins.setdefault(context.request, len(attempt.prompt))
        while attempt.finish is None:
            script = self.script
            index = len(attempt.tokens)
            limits = [limit for limit in (script.stall_at, script.die_at, script.fail_at) if limit is not None]
            room = min([sampling.max_tokens, *limits]) - index
            fresh: list[int] = []
            reason: FinishReason | None = None
            for _ in range(min(script.tokens_per_frame, room)):
                token = self.actors.token_at(len(attempt.prompt) + len(attempt.tokens) - origin)
                fresh.append(token)
                attempt.tokens.append(token)
                ends = (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids
                if ends and len(attempt.tokens) > sampling.min_tokens:
                    reason = FinishReason.STOP
                    break
                if len(attempt.tokens) == sampling.max_tokens:
                    reason = FinishReason.LENGTH
            if reason is not None:
                attempt.finish = Finish(reason=reason, usage=self._usage(attempt))
            elif script.fail_at is not None and len(attempt.tokens) >= script.fail_at:
                error = ErrorReport.of(script.failure or BatonError("scripted"))
                attempt.finish = Finish(reason=FinishReason.ERROR, usage=self._usage(attempt), error=error)
            await self._send(gateway, self._frame(context, attempt, index, fresh))
            if script.die_at is not None and len(attempt.tokens) >= script.die_at:
                self.die()
            if script.stall_at is not None and len(attempt.tokens) >= script.stall_at:
                return
            await self.actors.clock.sleep(script.interval_s)

    def _frame(self, context: Context, attempt: Attempt, index: int, tokens: Sequence[int]) -> Frame:
        alternatives = attempt.task.sampling.logprobs
        logprobs: tuple[TokenLogprob, ...] = ()
        if alternatives is not None:
            top = tuple((100 + rank, -1.0 - rank) for rank in range(alternatives))
            logprobs = tuple(TokenLogprob(logprob=-0.5, top=top) for _ in tokens)
        return Frame(
            request=context.request,
            attempt=context.attempt,
            index=index,
            tokens=pack_tokens(tokens),
            logprobs=logprobs,
            finish=attempt.finish,
            usage=self._usage(attempt) if index == 0 else None,
        )

    def _usage(self, attempt: Attempt) -> Usage:
        return Usage(
            prompt_tokens=len(attempt.prompt),
            completion_tokens=len(attempt.tokens),
            cached_tokens=self.script.cached_tokens,
        )

    async def _resend(self, context: Context, index: int) -> None:
        attempt = self.attempts.get((context.request, context.attempt))
        if attempt is not None and isinstance(attempt.task, DecodeTask):
            await self._send(attempt.task.gateway, self._frame(context, attempt, index, attempt.tokens[index:]))

    async def _send(self, gateway: str, frame: Frame) -> None:
        for twisted in self.script.twist([frame]):
            frames = Frames(worker=self.name, generation=self.generation, frames=(twisted,))
            await self.actors.bus.publish(subjects.gateway(gateway), frames)

    def die(self) -> None:
        self.alive = False
        for attempt in self.attempts.values():
            if attempt.run is not None and attempt.run is not asyncio.current_task():
                attempt.run.cancel()
        self.attempts.clear()

    def restart(self) -> None:
        self.alive = True
        self.generation += 1
        self.script = Script()

    def heartbeat(self) -> Heartbeat:
        # A worker without capacity has one slot, which is taken: without slots it would serve nothing at any time.
        slots = max(1, min(self.script.capacity, 1024))
        return heartbeat(
            self.name,
            self.role,
            generation=self.generation,
            model=self.model,
            model_path=str(self.actors.model_path),
            engine="scripted",
            parameters=self.parameters,
            context_tokens_max=CONTEXT_TOKENS,
            running=max(self.running, slots - self.script.capacity),
            computing=self.running,
            progress_tokens=sum(len(attempt.tokens) for attempt in self.attempts.values()),
            running_max=slots,
        )

    async def beat(self) -> None:
        rounds = 0
        while True:
            if self.alive:
                with suppress(BusUnavailable):
                    await self.actors.bus.publish(subjects.HEARTBEAT, self.heartbeat())
                    if rounds % 4 == 0:
                        await self._send_digests()
            rounds += 1
            await self.actors.clock.sleep(0.25)

    async def _send_digests(self) -> None:
        entries = tuple(
            DigestEntry(
                request=request,
                attempt=number,
                emitted=len(attempt.tokens),
                state=AttemptState.RUNNING if attempt.finish is None else AttemptState.RETAINED,
            )
            for (request, number), attempt in self.attempts.items()
            if not self.script.forget
        )
        digest = Digest(worker=self.name, generation=self.generation, entries=entries)
        for gateway in self.gateways:
            await self.actors.bus.publish(subjects.gateway(gateway), digest)


class Scheduler:
    """Places on the first live worker that is not excluded. All workers are alike: what one refuses, all refuse.

    A request whose worker was just unavailable is held for `HOLD_S`.
    """

    def __init__(self, actors: Actors) -> None:
        self.actors = actors
        self.places: list[Place] = []
        self.answers: list[AnyMessage | None] = []
        """Answers to give first, in order; None: no answer."""
        self.refusal: BatonError | None = None
        self.predicted_cached_tokens = 0

    async def handle(self, delivery: Delivery) -> None:
        place = delivery.message
        assert isinstance(place, Place)
        self.places.append(place)
        if self.answers:
            answer = self.answers.pop(0)
            if answer is not None:
                await delivery.respond(answer)
            return
        if self.refusal is not None:
            await delivery.respond(Refused(error=ErrorReport.of(self.refusal)))
            return
        if place.refused:
            refused = InvalidRequest("every live decode worker refuses this request")
            await delivery.respond(Refused(error=ErrorReport.of(refused)))
            return
        placement = self._choose(place)
        if placement is None:
            await delivery.respond(Refused(error=ErrorReport.of(NoWorkers("no worker is left"))))
        elif {address.worker for address in placement.addresses} & set(place.unavailable):
            await delivery.respond(Held(scheduler="scripted"))
            self.actors.spawn(self.release(place))
        else:
            await delivery.respond(placement)

    async def release(self, place: Place) -> None:
        """Place a request that was held, or not answered."""
        await self.actors.clock.sleep(HOLD_S)
        placement = self._choose(place)
        error = None if placement else ErrorReport.of(NoWorkers("no worker is left"))
        context = place.context
        released = Released(request=context.request, attempt=context.attempt, placement=placement, error=error)
        with suppress(BusUnavailable):
            await self.actors.bus.publish(subjects.gateway(place.gateway), released)

    def _choose(self, place: Place) -> Placement | None:
        decode, prefill = self._pick(place, Role.DECODE), self._pick(place, Role.PREFILL)
        wants_prefill = place.disaggregation is Disaggregation.ALWAYS
        if decode is None or (wants_prefill and prefill is None):
            return None
        source = prefill.address if wants_prefill and prefill is not None else None
        predicted = Candidate(decode=decode.name, cached_tokens=self.predicted_cached_tokens, predicted_ttft_s=0.1)
        return Placement(decode=decode.address, prefill=source, reason="scripted", predicted=predicted)

    def _pick(self, place: Place, role: Role) -> Worker | None:
        fit = [
            worker
            for worker in self.actors.workers.values()
            if worker.role is role and worker.alive and worker.model == place.model and worker.name not in place.exclude
        ]
        return min(fit, key=lambda worker: (worker.running, worker.name), default=None)


class Actors:
    """All actors of one test. `say` sets the answer to every request."""

    def __init__(self, bus: Bus, clock: Clock, model: tuple[Path, ModelTokenizer] | None = None) -> None:
        self.model_path, self.tokenizer = model or tiny_model()
        self.bus = bus
        self.clock = clock
        self.workers: dict[str, Worker] = {}
        self.scheduler = Scheduler(self)
        self.scripted_scheduler = True
        """Whether `scheduler` answers; False: a real one does."""
        self.origins: dict[str, int] = {}
        """Prompt length of each request's first attempt."""
        self.answer: list[int] = [65, 66, 67, EOS]
        self._group: asyncio.TaskGroup | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def token_at(self, index: int) -> int:
        """Return an output token; the last one repeats."""
        return self.answer[min(index, len(self.answer) - 1)]

    def say(self, text: str, *, ends: bool = True) -> None:
        self.answer = self.tokenizer.encode(text, add_special=False) + ([EOS] if ends else [])

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        assert self._group is not None
        task = self._group.create_task(work)
        self._tasks.append(task)
        return task

    async def add(self, name: str, role: Role = Role.DECODE, *, model: str = MODEL) -> Worker:
        worker = self.workers[name] = Worker(self, name, role, model=model)
        await self.bus.subscribe(subjects.task(name), worker.handle)
        self.spawn(worker.beat())
        return worker

    async def wait_for(self, condition: Callable[[], object], timeout_s: float = HANG_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110  The condition spans actors that know nothing of each other.
                await asyncio.sleep(0.005)

    @asynccontextmanager
    async def acting(self) -> AsyncGenerator[None]:
        if self.scripted_scheduler:
            await self.bus.subscribe(subjects.PLACE, self.scheduler.handle, group=subjects.SCHEDULERS)
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                yield
            finally:
                for task in self._tasks:
                    task.cancel()
