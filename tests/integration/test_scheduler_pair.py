"""Two schedulers under load: each gets all heartbeats, the workers' ledgers decide, and no request is lost, nor
computed twice, even if one of the schedulers is."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path

import httpx
import pytest

from baton.bus import Delivery
from baton.messages.attempts import AttemptState, Cancel, DecodeTask
from baton.messages.placement import QueuePositions
from baton.messages.workers import Role
from tests.harness.clients import Clients
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.limits import HANG_S
from tests.integration.test_held_requests import held

WORKERS = 3
SLOTS = 8
REQUESTS = 300
AT_ONCE = 16
"""Load on 24 slots: full enough that both schedulers sometimes choose the last slot of a worker."""
BUSY_SHARE_MAX = 0.1
ENGINE = {"speed": 1.0, "step_fixed_s": 0.01, "prefill_token_s": 0.0001, "blocks": 1024, "eos_probability": 0.0}

PATIENT = ("--accept-s", "60", "--place-resend-s", "5", "--lost-after-s", "60")
"""No worker counts as lost on a busy machine, so the counts here come from the schedulers alone."""


class Tasks:
    """The tasks that gateways sent to workers: decode tasks by attempt, and the attempts that met a busy worker."""

    def __init__(self) -> None:
        self.sent: Counter[tuple[str, int]] = Counter()
        self.busy: set[tuple[str, int]] = set()
        self.others: Counter[str] = Counter()

    async def see(self, delivery: Delivery) -> None:
        match delivery.message:
            case DecodeTask(context=context):
                self.sent[context.request, context.attempt] += 1
            case Cancel(context=context, reason="busy"):
                self.busy.add((context.request, context.attempt))
            case Cancel(reason=reason):
                self.others[reason] += 1
            case _:
                pass


async def ask(client: httpx.AsyncClient, number: int) -> str:
    body = {"model": "tiny", "prompt": f"{number % 40} and then", "max_tokens": 10 + number % 30, "temperature": 0}
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    assert answer.json()["usage"]["completion_tokens"] == 10 + number % 30
    return answer.json()["choices"][0]["text"]


async def placements(cluster: Cluster, scheduler: str) -> int:
    """Return how many placements a scheduler has made."""
    shown = await cluster.metrics(scheduler)
    return sum(int(value) for series, value in shown.items() if series.startswith("baton_placements_total"))


async def test_two_schedulers_place_under_load_without_loss_or_double(tmp_path: Path, model: Path) -> None:
    async with running_cluster(tmp_path, model=model) as cluster:
        await cluster.start_control_plane(gateway_flags=PATIENT, disaggregation="never")
        await cluster.start("scheduler-1", "baton_scheduler", "--disaggregation", "never")
        for number in range(WORKERS):
            flags = ("--slots", str(SLOTS))
            await cluster.start_worker(Role.DECODE, f"decode-{number}", *flags, options=ENGINE)
        await cluster.wait_ready()
        tasks = Tasks()
        assert cluster.bus is not None
        await cluster.bus.subscribe("baton.worker.*.task", tasks.see)
        limits = httpx.Limits(max_connections=AT_ONCE)
        async with httpx.AsyncClient(base_url=cluster.url, limits=limits, timeout=HANG_S) as client:
            answers = await asyncio.gather(*(ask(client, number) for number in range(REQUESTS)))
        longest: dict[int, str] = {}
        for number, text in enumerate(answers):
            whole = longest.setdefault(number % 40, text)
            assert whole.startswith(text) or text.startswith(whole), "the same prompt, the same answer"
        made = [await placements(cluster, name) for name in ("scheduler", "scheduler-1")]
        busy_share = len(tasks.busy) / len(tasks.sent)
        print(f"{len(tasks.sent)} attempts, {busy_share:.1%} busy, placed by {made}, {dict(tasks.others)}")
        assert len({request for request, _ in tasks.sent}) == REQUESTS
        assert set(tasks.sent.values()) == {1}, "no task is sent twice"
        assert len(tasks.sent) - len(tasks.busy) == REQUESTS, "each request ran once"
        assert not tasks.others
        assert busy_share <= BUSY_SHARE_MAX
        assert min(made) > REQUESTS / 4, "both take part"


ENDINGS = (
    pytest.param(signal.SIGKILL, id="SIGKILL"),
    pytest.param(signal.SIGSTOP, id="SIGSTOP", marks=pytest.mark.nightly),
)
FIRM = ("--admission-wait-s", "120", "--place-resend-s", "0.5")
SURE = ("--lost-after-s", "60", "--lease-ttl-s", "60", "--wanted-timeout-s", "60", "--stall-timeout-s", "60")
"""No attempt is given up by a worker of a busy machine: its prompt would be computed again."""
PREFILL_SLOTS = 2
STAGES = {
    # Requests wait for prefill, and decode has room for all of them. Schedulers may choose the same last slot: where
    # that is one of decode, prefill may have computed the prompt before the gateway hears `Busy` and cancels it.
    Role.PREFILL: (("--slots", str(PREFILL_SLOTS)), {**ENGINE, "step_fixed_s": 0.5}),
    Role.DECODE: ((), {**ENGINE, "step_fixed_s": 0.03}),
}
PROMPTS = [f"{number} and then" for number in range(24)]
"""Twelve for each slot of the prefill worker: some are still held when a busy machine looks."""
OUTPUT_TOKENS = 40
COUNTED = {
    'baton_worker_attempts_ended_total{end="held"}': "held",
    'baton_worker_attempts_ended_total{end="length"}': "length",
    "baton_engine_output_tokens_total": "output",
}


async def computed(cluster: Cluster) -> Counter[str]:
    """Return what the workers count: prompts computed for a pull, whole answers, and tokens of answers."""
    found: Counter[str] = Counter()
    for name in ("prefill-0", "decode-0", "decode-1"):
        shown = await cluster.metrics(name)
        found.update({counted: int(shown.get(series, 0)) for series, counted in COUNTED.items()})
    return found


class Queues:
    """Attempts that each scheduler holds, by its last message about positions."""

    def __init__(self) -> None:
        self._held: dict[str, set[tuple[str, int]]] = {}

    async def see(self, delivery: Delivery) -> None:
        if isinstance(delivery.message, QueuePositions):
            held = {(request, attempt) for request, attempt, *_ in delivery.message.positions}
            self._held[delivery.message.scheduler] = held

    @property
    def shared(self) -> set[tuple[str, int]]:
        """Attempts that both of two schedulers hold."""
        return set[tuple[str, int]].intersection(*self._held.values()) if len(self._held) == 2 else set()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ENDINGS)
async def test_a_scheduler_lost_under_streams_changes_no_answer(
    tmp_path: Path, model: Path, how: signal.Signals
) -> None:
    async with running_cluster(tmp_path, model=model) as cluster:
        await cluster.start_control_plane(gateway_flags=(*PATIENT, *FIRM))
        await cluster.start("scheduler-1", "baton_scheduler", "--disaggregation", "always")
        for name in ("prefill-0", "decode-0", "decode-1"):
            role = Role(name.split("-")[0])
            flags, options = STAGES[role]
            await cluster.start_worker(role, name, "--digest-s", "0.1", *SURE, *flags, options=options)
        await cluster.wait_ready()
        clients = Clients(cluster, (), output_tokens=OUTPUT_TOKENS)
        undisturbed = await asyncio.gather(*map(clients.ask, PROMPTS))
        before = await computed(cluster)
        queues, tasks = Queues(), Tasks()
        assert cluster.bus is not None
        await cluster.bus.subscribe("baton.gateway.*.frames", queues.see)
        await cluster.bus.subscribe("baton.worker.*.task", tasks.see)
        running = asyncio.create_task(cluster.observer.worker_in(Role.DECODE, AttemptState.RUNNING))
        answers = [asyncio.create_task(clients.ask(prompt)) for prompt in PROMPTS]
        await running
        while await held(cluster, "scheduler") <= PREFILL_SLOTS:
            assert not all(answer.done() for answer in answers), "too few were held"
        cluster.services["scheduler"].signal(how)
        if how is signal.SIGSTOP:
            # Both hold some of the same requests when it goes on: those that it holds do not all have room at once.
            while not queues.shared:
                assert not all(answer.done() for answer in answers), "no request was taken over"
                await asyncio.sleep(0.01)
            cluster.services["scheduler"].signal(signal.SIGCONT)
        assert await asyncio.gather(*answers) == undisturbed
        assert set(tasks.sent.values()) == {1}, "no task is sent twice"
        assert await computed(cluster) - before == {
            "held": len(PROMPTS),
            "length": len(PROMPTS),
            "output": len(PROMPTS) * OUTPUT_TOKENS,
        }
