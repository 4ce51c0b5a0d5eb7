"""The gateway as a member of the system: its subscriptions, its heartbeat, and the dispatch of messages."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Final

from baton import subjects
from baton.bus import Delivery
from baton.errors import BatonError, NoResponders, NoWorkers, Overloaded, Unavailable
from baton.messages.attempts import (
    Acknowledge,
    AttemptState,
    Cancel,
    Digest,
    DigestEntry,
    Frames,
    Prefilled,
    PrefillFailed,
)
from baton.messages.base import Context, Refused
from baton.messages.placement import Place, Placement, QueuePositions, Released, Withdraw
from baton.messages.workers import GatewayBeat, Goodbye, Heartbeat, Role
from baton.node.failure_detector import PauseDetector
from baton.node.membership import Event, Left, Lost, Restarted
from baton.node.progress import Progress
from baton.node.service import Node, subscribed
from baton.redis import RedisConnection
from baton.telemetry import Reading, catalogue
from baton_gateway import attempt_events as ev
from baton_gateway.attempt import Phase
from baton_gateway.attempt_messages import no_scheduler
from baton_gateway.config import Settings
from baton_gateway.drain_state import DrainState
from baton_gateway.driver import AnswerDriver, Links
from baton_gateway.metrics import RESULTS, GatewayMetrics
from baton_gateway.models import Models
from baton_gateway.publisher import Publisher
from baton_gateway.request_body import BodyReader
from baton_gateway.routes import Routes
from baton_gateway.search import Retries
from baton_gateway.tenants.tenancy import tenancy
from baton_gateway.workers import WorkerTable

log = logging.getLogger(__name__)

BEAT_S: Final = 1.0
EXPIRY_S: Final = 0.1
READY_KEPT_S: Final = 1.0
FAREWELL_S: Final = 1.0
QUESTIONS_MAX: Final = 64
"""Unanswered questions to schedulers: enough for thousands of placements per second."""


class Gateway:
    """The gateway without HTTP. Its tasks run inside `running`."""

    def __init__(
        self,
        settings: Settings,
        *,
        gateway: str,
        node: Node,
        models: Models,
        redis: RedisConnection | None = None,
    ) -> None:
        self.settings = settings
        self.ports = node.ports
        self.bus = node.ports.bus
        self.clock = node.ports.clock
        self.tracing = node.tracing
        self.models = models
        self.redis = redis
        self.keyring, self.quotas = tenancy(settings, redis, node.ports)
        self.workers = WorkerTable(settings.lost_after_s)
        self.routes = Routes[AnswerDriver]()
        self._progress: dict[str, Progress] = {}
        """Progress of the live workers."""
        self.publisher = Publisher(self.bus)
        self.figures = GatewayMetrics(node.metrics, self.clock)
        node.metrics.read(self._readings)
        node.metrics.read(self.quotas.readings)
        self.links = Links(
            gateway=gateway,
            bus=self.bus,
            clock=self.clock,
            tracing=self.tracing,
            figures=self.figures,
            publisher=self.publisher,
            timers=settings.attempt_timers(),
            unanswered=set(),
            retries=Retries(),
            questions=asyncio.Semaphore(QUESTIONS_MAX),
            routes=self.routes,
        )
        self.background: set[asyncio.Task[None]] = set()
        """Work that no client waits for."""
        self._group: asyncio.TaskGroup | None = None
        self.bodies = BodyReader(
            self.clock,
            body_bytes_max=settings.body_bytes_max,
            bodies_bytes_max=settings.bodies_bytes_max,
            timeout_s=settings.body_read_s,
        )
        self.drain_state = DrainState.OPEN
        self._ready_until_s = 0.0
        self._refusal: tuple[BatonError, float] | None = None
        """Why the gateway was not ready at the last probe, and when that probe ended."""
        self._probe = asyncio.Lock()

    def _readings(self) -> Iterator[Reading]:
        yield Reading(catalogue.ANSWERS_RUNNING, len(self.routes))
        held = Counter(driver.model for driver in self.routes.all() if driver.machine.phase is Phase.QUEUED)
        waits = {model.name: 0 for model in self.workers.models()} | held
        for model, waiting in waits.items():
            yield Reading(catalogue.ADMISSION_WAITING, waiting, (model,))
        for labels, count in self.workers.counts().items():
            yield Reading(catalogue.WORKERS, count, labels)
        none = {(model.name, result): 0 for model in self.workers.models() for result in RESULTS}
        for labels, count in (none | self.figures.objectives).items():
            yield Reading(catalogue.OBJECTIVES, count, labels)
        live = {heartbeat.address.worker for heartbeat in self.workers.members.beats()}
        for labels, count in self.figures.by_worker(live).items():
            yield Reading(catalogue.WORKER_OBJECTIVES, count, labels)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Take part in the system inside this context. A bug in one of the tasks ends it."""
        handlers = {subjects.HEARTBEAT: self._on_worker, subjects.gateway(self.links.gateway): self._on_message}
        async with subscribed(self.bus, handlers), asyncio.TaskGroup() as group:
            self._group = group
            loops = (self._beat(), self._expire(), self.publisher.run(), self.quotas.run())
            tasks = [group.create_task(loop) for loop in loops]
            try:
                yield
            finally:
                self.end_requests()
                if self.background:
                    await asyncio.wait(self.background, timeout=FAREWELL_S)
                await self.publisher.drain(self.clock, FAREWELL_S)
                await self.quotas.drain(FAREWELL_S)
                for task in (*tasks, *self.background):
                    task.cancel()

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Do work that no client waits for. It ends with the gateway."""
        assert self._group is not None, "the gateway does not run"
        task = self._group.create_task(_logged(work))
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    def end_requests(self) -> None:
        """End every unfinished answer; its client gets an error, and its workers are told."""
        for driver in self.routes.all():
            driver.post(ev.Aborted(Unavailable("the server is being stopped", retry_after_s=1.0)))

    async def check_ready(self) -> None:
        """Raise Unavailable unless a request could be placed now.

        The schedulers decide, as only they know what the deployment needs. A positive answer holds for a second, so
        that probes do not become load. A negative one is for all who asked before it came: while schedulers are silent,
        each waits for two probes at most, and the status port answers in time.
        """
        self.drain_state.check_ready()
        asked_s = self.clock.now_s()
        async with self._probe:
            if self.clock.now_s() < self._ready_until_s:
                return
            if self._refusal is not None and asked_s < self._refusal[1]:
                raise self._refusal[0].with_traceback(None)
            try:
                await self._probe_models()
            except BatonError as error:
                self._refusal = error, self.clock.now_s()
                raise
            self._ready_until_s = self.clock.now_s() + READY_KEPT_S

    async def _probe_models(self) -> None:
        """Raise why no model could be asked for now, unless one could."""
        models = self.workers.models()
        if not models:
            raise NoWorkers("no decode worker is live")
        refusals = [refusal for model in models if (refusal := await self._probe_model(model.name)) is not None]
        if len(refusals) == len(models):
            raise refusals[0]

    async def _probe_model(self, name: str) -> BatonError | None:
        """Return why a tiny request to this model could not be placed, or None if it could."""
        model = self.workers.model(name)
        tokenizer = self.models.prepare(model.path, model.digest)
        if not tokenizer.done():
            return Unavailable(f"the tokenizer of `{name}` is being loaded")
        if (error := tokenizer.exception()) is not None:
            return Unavailable(str(error))
        context = Context(request=f"ready-{self.links.gateway}", budget_s=self.settings.place_resend_s)
        place = Place(context=context, model=name, blocks=b"", prompt_tokens=1, output_tokens_max=1, probe=True)
        try:
            answer = await self.bus.request(subjects.PLACE, place, timeout_s=self.settings.place_resend_s)
        except NoResponders:
            return no_scheduler()
        except BatonError as error:
            return error
        if isinstance(answer, Refused):
            error = answer.error.to_error()
            return None if isinstance(error, Overloaded) else error
        return None if isinstance(answer, Placement) else Unavailable("the scheduler did not answer the question")

    # ------------------------------------------------------------ messages

    async def _on_worker(self, delivery: Delivery) -> None:
        message = delivery.message
        if not isinstance(message, Heartbeat | Goodbye):
            return
        address = message.address
        member = self.workers.members.get(address.worker)
        drained = isinstance(message, Goodbye) and member is not None and member.leaving
        self._note(self.workers.members.take(message, self.clock.now_s()), drained=drained)
        if isinstance(message, Heartbeat):
            self._note_progress(message)
            if message.draining:
                self._note_leaving(message)
            if message.role is Role.DECODE:
                self.models.prepare(message.model_path, message.model_digest)

    async def _on_message(self, delivery: Delivery) -> None:
        message = delivery.message
        match message:
            case Frames():
                now_s = self.clock.now_s()
                for frame in message.frames:
                    driver = self.routes.get(frame.request)
                    if driver is not None:
                        driver.take_frame(now_s, message.worker, message.generation, frame)
            case Digest():
                self._on_digest(message)
            case Released():
                self._on_released(message)
            case QueuePositions(positions=positions):
                for request, attempt, before, turn_s in positions:
                    self._on_position(request, ev.PlaceHeld(attempt, before, turn_s))
            case Prefilled(context=context, usage=usage):
                driver = self.routes.get(context.request)
                if driver is not None:
                    driver.post(ev.PromptComputed(context.attempt, usage.cached_tokens, usage.promoted_tokens))
                    driver.audit(context.attempt, message.worker, usage.cached_tokens)
            case PrefillFailed(context=context, worker=worker, error=error):
                log.info("prefill %s on %s failed: %s", context.request, worker, error.detail)
            case _:
                log.warning("unexpected %s on %s", type(message).__name__, delivery.subject)

    def _on_released(self, released: Released) -> None:
        driver, attempt = self.routes.get(released.request), released.attempt
        if driver is None:
            return
        if released.placement is not None:
            driver.grant(attempt, released.placement)
        elif released.error is not None:
            driver.post(ev.PlaceRefused(attempt, released.error.to_error()))
        else:
            driver.post(ev.PlaceHandedBack(attempt))

    def _on_position(self, request: str, held: ev.PlaceHeld) -> None:
        driver = self.routes.get(request)
        if driver is not None and driver.machine.seeks(held.attempt):
            driver.hold(held)
        else:
            # The earlier message was lost, or another scheduler has placed it.
            self.publisher.post(subjects.WITHDRAWALS, Withdraw(request=request, attempt=held.attempt))

    def _on_digest(self, digest: Digest) -> None:
        entries = {(entry.request, entry.attempt): entry for entry in digest.entries}
        for request, driver in self.routes.running_on(digest.worker):
            entry = entries.get((request, driver.attempt))
            driver.post(ev.DigestArrived(digest.worker, digest.generation, entry))
        for entry in digest.entries:
            driver = self.routes.get(entry.request)
            if driver is None or driver.attempt > entry.attempt:
                self._disown(digest.worker, entry)

    def _disown(self, worker: str, entry: DigestEntry) -> None:
        """Tell a worker again that this attempt is over: the earlier message was lost."""
        context = Context(request=entry.request, attempt=entry.attempt, budget_s=BEAT_S)
        gone = (
            Acknowledge(context=context)
            if entry.state is AttemptState.RETAINED
            else Cancel(context=context, reason="not wanted any more")
        )
        self.publisher.post(subjects.task(worker), gone)

    def _note(self, events: list[Event], *, drained: bool = False) -> None:
        """Tell running answers that their worker is gone; `drained`: it said before that it would leave."""
        for event in events:
            match event:
                case Restarted(member, _, generation):
                    detail = "was restarted"
                case Left(member, generation):
                    detail = "left"
                case Lost(member, generation):
                    detail = f"sent no heartbeat for {self.settings.lost_after_s:g} s"
                case _:
                    continue
            log.info("worker %s (generation %d) %s", member, generation, detail)
            self._progress.pop(member, None)
            if not drained:
                self.links.retries.suspects.note_lost((member, generation), self.clock.now_s())
            for _, driver in self.routes.running_on(member):
                driver.post(ev.WorkerGone(member, generation, detail))

    def _note_progress(self, heartbeat: Heartbeat) -> None:
        """Tell running answers of a worker that is alive and does nothing."""
        worker, generation, now_s = heartbeat.address.worker, heartbeat.address.generation, self.clock.now_s()
        if not self.workers.members.is_live(worker, generation):
            return
        progress = self._progress.get(worker)
        if progress is None or progress.generation != generation:
            self._progress[worker] = Progress(heartbeat, now_s, floor_s=self.settings.progress_s)
            return
        progress.hear(heartbeat, now_s)
        if progress.is_stuck:
            for _, driver in self.routes.running_on(worker):
                driver.post(ev.WorkerStuck(worker, generation))

    def _note_leaving(self, heartbeat: Heartbeat) -> None:
        worker, generation = heartbeat.address.worker, heartbeat.address.generation
        leaving = ev.WorkerLeaving(worker, generation, heartbeat.leaves_in_s, heartbeat.token_interval_s())
        for _, driver in self.routes.running_on(worker):
            driver.post(leaving)

    # ------------------------------------------------------------ tasks

    async def _beat(self) -> None:
        while True:
            self.publisher.post(subjects.GATEWAY_BEAT, GatewayBeat(gateway=self.links.gateway))
            if len(self.models.loaded) > 1:
                self.models.forget(self.workers.served())
            await self.clock.sleep(BEAT_S)

    async def _expire(self) -> None:
        members, pauses = self.workers.members, PauseDetector(interval_s=EXPIRY_S)
        while True:
            now_s = self.clock.now_s()
            members.extend_deadlines(pauses.local_pause_s(now_s, connected=self.bus.connected), now_s)
            self._note(members.expire(now_s))
            await self.clock.sleep(EXPIRY_S)


async def _logged(work: Coroutine[object, object, None]) -> None:
    try:
        await work
    except Exception:  # The boundary of background work: a bug in it must not end the gateway.
        log.exception("background work failed")
