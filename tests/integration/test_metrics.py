"""Every panel and rule on real processes: a real Prometheus scrapes a system under load and faults."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import httpx
import pytest
import pytest_asyncio
import yaml
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser

from baton.messages.attempts import AttemptState
from baton.messages.workers import Role
from baton.telemetry import catalogue
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.limits import HANG_S
from tests.harness.servers import DEPLOY, RULES, Prometheus, needs_prometheus, promtool, start_prometheus

pytestmark = [needs_prometheus, pytest.mark.timeout(180)]

WINDOW: Final = "10s"
"""Stands for Grafana's `$__rate_interval` at a scrape each second."""
COMPARISON: Final = re.compile(r" (==|>|<) [0-9.]+( |$)")
OPENMETRICS: Final = {"accept": "application/openmetrics-text; version=1.0.0"}
ENGINE: Final = {
    "speed": 1.0,
    "step_fixed_s": 0.01,
    "prefill_token_s": 0.0004,
    "blocks": 256,
    "eos_probability": 0.0,
}
read_metrics: Final = cast(
    "Callable[[str], Iterator[Metric]]",
    parser.text_string_to_metric_families,  # pyright: ignore[reportUnknownMemberType]
)
API_KEY: Final = "a-key-of-the-settings"
AUTHORIZED: Final = {"authorization": f"Bearer {API_KEY}"}
STORY: Final = " ".join(f"line {number}: the quick brown fox" for number in range(60))


@dataclass
class Watched:
    """A system that has run under load and faults for a while, and its Prometheus."""

    cluster: Cluster
    prometheus: Prometheus
    since_s: float

    async def until(self, expression: str, holds: Callable[[list[float]], bool]) -> None:
        """Wait until the values that the expression has had satisfy `holds`."""
        async with asyncio.timeout(HANG_S):
            while not holds(await self.prometheus.values(expression, since_s=self.since_s)):  # noqa: ASYNC110
                await asyncio.sleep(0.2)


def expressions() -> Iterator[tuple[str, str]]:
    """Yield every expression of the dashboard and of the rules, with its name."""
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "baton.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield f"{panel['title']}: {target['legendFormat']}", target["expr"].replace("$__rate_interval", WINDOW)
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule.get("record") or rule["alert"], rule["expr"]


async def start_worker(cluster: Cluster, role: Role, number: int, *flags: str) -> None:
    name = f"{role}-{number}"
    await cluster.start_worker(role, name, "--slots", "4", "--digest-s", "0.05", *flags, options=ENGINE)


def watch(cluster: Cluster, prometheus: Prometheus) -> None:
    """Scrape every process of the cluster where it now listens."""
    jobs: dict[str, list[str]] = {}
    for name in cluster.services:
        jobs.setdefault(name.partition("-")[0], []).append(cluster.status_address(name))
    prometheus.scrape(jobs)


async def ask(cluster: Cluster, prompt: str, *, tokens: int = 24, chat: bool = False, **more: Any) -> int:
    async with httpx.AsyncClient(base_url=cluster.url, headers=AUTHORIZED, timeout=HANG_S) as client:
        said = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        body = {"model": "tiny", "max_tokens": tokens, "temperature": 0, **said, **more}
        return (await client.post(path, json=body)).status_code


async def work_and_fail(cluster: Cluster) -> None:
    """Load the system, overload it, damage bytes, kill a worker during an answer, send invalid requests, disconnect."""
    assert await ask(cluster, STORY, temperature=-1) == 400
    for number in range(4):
        assert await ask(cluster, f"{STORY} {number % 2}", chat=bool(number % 2), stream=True) == 200
    # Twice the capacity of two decode workers with four slots each.
    assert set(await asyncio.gather(*(ask(cluster, f"{number} {STORY}") for number in range(16)))) == {200}
    # Killed while it pulls, it leaves a lease behind.
    _, bereft, victim = await cluster.observer.caught_in(
        Role.DECODE, AttemptState.PULLING, ask=lambda number: ask(cluster, f"new {number} {STORY} {STORY}")
    )
    cluster.services[victim].signal(signal.SIGKILL)
    assert await bereft == 200
    _, given_up, _ = await cluster.observer.caught_in(
        Role.DECODE, AttemptState.RUNNING, ask=lambda _: ask(cluster, STORY, tokens=400, stream=True)
    )
    given_up.cancel()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(tmp_path_factory: pytest.TempPathFactory, model: Path) -> AsyncIterator[Watched]:
    folder = tmp_path_factory.mktemp("metrics")
    async with running_cluster(folder, model=model) as cluster:
        await cluster.start_control_plane(gateway_flags=("--api-keys", API_KEY))
        await start_worker(cluster, Role.PREFILL, 0)
        await start_worker(cluster, Role.PREFILL, 1, "--faults", '{"corrupt_every": 1}')
        for number in range(2):
            await start_worker(cluster, Role.DECODE, number)
        await cluster.wait_ready()
        # It learns for as long as the test lasts, so one process is never ready.
        await cluster.start("scheduler-1", "baton_scheduler", "--learn-s", "600")
        await cluster.wait_log("scheduler-1", "status is served")
        with start_prometheus(folder) as prometheus:
            since_s = time.time()
            watch(cluster, prometheus)
            # A rate needs two scrapes, the first of them before the first event.
            await prometheus.until(f"min(sum_over_time(up[1m])) >= 2 and count(up) == {len(cluster.services)}")
            await work_and_fail(cluster)
            try:
                yield Watched(cluster, prometheus, since_s)
            finally:
                await prometheus.close()


@pytest.mark.parametrize(("name", "expression"), [pytest.param(*each, id=each[0]) for each in expressions()])
@pytest.mark.asyncio(loop_scope="module")
async def test_each_expression_returns_data(watched: Watched, name: str, expression: str) -> None:
    """Promtool's test covers an alert's condition; here the series that it compares must exist."""
    asked = COMPARISON.split(expression)[0] if name.startswith("Baton") and name[5].isupper() else expression
    asked = asked.removeprefix("absent(").removesuffix(")") if asked.startswith("absent(") else asked
    await watched.until(asked, bool)


@pytest.mark.parametrize(
    "expression",
    [
        'baton_attempts_total{end="worker_lost"}',
        'baton_attempts_total{end="transfer_failed"}',
        'baton_answers_total{end="client_gone"}',
        'baton_pull_failures_total{cause="checksum"}',
        "baton_checksum_failures_total",
        'baton_worker_refusals_total{reason="full"} or baton_placements_total{result="overloaded"}',
        "baton_leases_lost_total",
        'gen_ai_server_request_duration_seconds_count{error_type="invalid_request"}',
        "baton_admission_wait_seconds_count",
        "baton_admission_waiting",
        "baton_cached_tokens_total",
        "baton_predicted_cached_tokens_total",
        'ALERTS{alertname="BatonNotReady"}',
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_happened_is_counted(watched: Watched, expression: str) -> None:
    await watched.until(expression, lambda figures: max(figures, default=0) > 0)


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_declared_is_what_services_show(watched: Watched) -> None:
    """Compare both ways, with kinds and labels; the table in `docs/metrics.md` is made of the same declaration."""
    shown: dict[str, dict[str, tuple[str, set[str]]]] = {}
    async with httpx.AsyncClient(headers=OPENMETRICS) as client:
        for name in ("gateway", "scheduler", "kvindex", "prefill-0", "decode-0", "decode-1"):
            try:
                text = (await client.get(f"http://{watched.cluster.status_address(name)}/metrics")).text
            except httpx.ConnectError:
                continue  # The one that was killed.
            families = shown.setdefault(name.partition("-")[0], {})
            for family in read_metrics(text):
                labels = {label for sample in family.samples for label in sample.labels} - {"le"}
                families[family.name] = (family.type, labels)
    for service, families in shown.items():
        ours = {name: seen for name, seen in families.items() if not name.startswith("process_")}
        declared = {
            row.name.removesuffix("_total"): (row.kind.value, set(row.labels)) for row in catalogue.rows_of(service)
        }
        assert ours == declared


@pytest.mark.asyncio(loop_scope="module")
async def test_points_of_latency_lead_to_traces(watched: Watched) -> None:
    name, traces = "gen_ai_server_time_to_first_token_seconds_bucket", set[str]()
    async with asyncio.timeout(HANG_S):
        while not traces:
            data = await watched.prometheus.ask("query_exemplars", query=name, start=watched.since_s, end=time.time())
            traces = {exemplar["labels"]["trace_id"] for series in data for exemplar in series["exemplars"]}
    assert all(re.fullmatch(r"[0-9a-f]{32}", trace) for trace in traces)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_public_port_has_no_metrics(watched: Watched) -> None:
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{watched.cluster.url}/metrics", headers=AUTHORIZED)).status_code == 404


def test_promtool_accepts_what_is_deployed(tmp_path: Path) -> None:
    promtool("check", "config", str(DEPLOY / "prometheus" / "prometheus.yml"))
    rules = [{"record": f"panel:{number}", "expr": expression} for number, (_, expression) in enumerate(expressions())]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", str(tmp_path / "panels.yml"))


def test_alerts_fire_when_they_should() -> None:
    promtool("test", "rules", str(DEPLOY / "prometheus" / "rules_test.yml"))
