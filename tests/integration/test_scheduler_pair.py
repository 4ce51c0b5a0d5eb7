"""Two schedulers under load: each gets all heartbeats, the workers' ledgers decide, and no request is lost, nor
computed twice, even if one of the schedulers is."""

from __future__ import annotations

import asyncio
import re
import signal
from collections import Counter
from pathlib import Path

import httpx
import pytest

from baton.bus import Delivery
from baton.messages.attempts import AttemptState, Cancel, DecodeTask
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

PATIENT = ("--accept-s", "5", "--place-resend-s", "5", "--lost-after-s", "10")
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
    async with httpx.AsyncClient() as client:
        shown = (await client.get(f"http://{cluster.status_address(scheduler)}/metrics")).text
    return sum(int(float(value)) for value in re.findall(r"^baton_placements_total\S* (\S+)$", shown, re.MULTILINE))


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
FIRM = ("--admission-wait-s", "60", "--place-resend-s", "0.5")
PROMPTS = [f"{number} and then" for number in range(24)]
"""Four for each slot of the two decode workers, so that most of them are held at first."""
OUTPUT_TOKENS = 40


async def computed(cluster: Cluster) -> Counter[str]:
    """Return what the workers count: prompts computed for a pull, whole answers, and tokens of answers."""
    shown = ""
    async with httpx.AsyncClient() as client:
        for name in ("prefill-0", "decode-0", "decode-1"):
            shown += (await client.get(f"http://{cluster.status_address(name)}/metrics")).text
    found: Counter[str] = Counter()
    series = r'^baton_(?:worker_attempts_ended_total\{end="(held|length)"\}|engine_(output)_tokens_total) (\S+)$'
    for end, output, value in re.findall(series, shown, re.MULTILINE):
        found[end or output] += int(float(value))
    return found


async def queued(cluster: Cluster) -> int:
    """Return how many requests wait for a placement, by the gateway's count."""
    async with httpx.AsyncClient() as client:
        shown = (await client.get(f"{cluster.url}/metrics")).text
    return sum(int(float(value)) for value in re.findall(r"^baton_admission_waiting\S* (\S+)$", shown, re.MULTILINE))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ENDINGS)
async def test_a_scheduler_lost_under_streams_changes_no_answer(
    tmp_path: Path, model: Path, how: signal.Signals
) -> None:
    async with running_cluster(tmp_path, model=model) as cluster:
        await cluster.start_control_plane(gateway_flags=(*PATIENT, *FIRM))
        await cluster.start("scheduler-1", "baton_scheduler", "--disaggregation", "always")
        for name in ("prefill-0", "decode-0", "decode-1"):
            flags = ("--digest-s", "0.1", *(("--slots", "3") if name != "prefill-0" else ()))
            await cluster.start_worker(Role(name.split("-")[0]), name, *flags, options={**ENGINE, "step_fixed_s": 0.03})
        await cluster.wait_ready()
        clients = Clients(cluster, (), output_tokens=OUTPUT_TOKENS)
        undisturbed = await asyncio.gather(*map(clients.ask, PROMPTS))
        before = await computed(cluster)
        running = asyncio.create_task(cluster.observer.worker_in(Role.DECODE, AttemptState.RUNNING))
        answers = [asyncio.create_task(clients.ask(prompt)) for prompt in PROMPTS]
        await running
        while not await held(cluster, "scheduler"):
            assert not all(answer.done() for answer in answers), "nothing was held"
        cluster.services["scheduler"].signal(how)
        if how is signal.SIGSTOP:
            # Both hold the same requests when it goes on.
            while await held(cluster, "scheduler-1") < await queued(cluster):
                pass
            cluster.services["scheduler"].signal(signal.SIGCONT)
        assert await asyncio.gather(*answers) == undisturbed
        assert await computed(cluster) - before == {
            "held": len(PROMPTS),
            "length": len(PROMPTS),
            "output": len(PROMPTS) * OUTPUT_TOKENS,
        }
