"""Two schedulers under load: each gets all heartbeats, the workers' ledgers decide, and no request is lost."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from pathlib import Path

import httpx

from baton.bus import Delivery
from baton.messages.attempts import Cancel, DecodeTask
from baton.messages.workers import Role
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.limits import HANG_S

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
