"""Workers change their roles under streams: no client notices, and caches, generations and the index stay."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.messages.attempts import AttemptState
from baton.messages.workers import Heartbeat, Role
from tests.harness.clients import Bystander, Clients
from tests.harness.cluster import Cluster, running_cluster
from tests.harness.limits import HANG_S
from tests.harness.role_shift import FAST, shift_load

pytestmark = pytest.mark.timeout(240)  # On a busy machine; alone it takes 30 s.

PROMPTS = [f"{number}: " + " ".join(f"line {line}, the quick brown fox" for line in range(20)) for number in range(8)]
ENGINE = {"speed": 1.0, "step_fixed_s": 0.015, "prefill_token_s": 0.0002, "blocks": 1024, "eos_probability": 0.0}
"""An answer of 200 tokens takes about four seconds."""
PATIENT = ("--accept-s", "20", "--place-resend-s", "5", "--lost-after-s", "20")
CHANGE_S = "2"
"""Less than an answer takes: some are moved."""


@pytest.fixture
async def cluster(tmp_path: Path, model: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, model=model) as cluster:
        yield cluster


async def baton(cluster: Cluster, *arguments: str) -> tuple[int, str]:
    """Run a command as a user would, and return its status and all that it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton.cli", *arguments, "--nats-url", cluster.nats_url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ},
    )
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


async def test_roles_change_under_streams_and_change_back(cluster: Cluster) -> None:
    await cluster.start_control_plane(gateway_flags=PATIENT)
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"):
        await cluster.start_worker(
            Role(name.split("-")[0]), name, "--role-change-s", CHANGE_S, "--digest-s", "0.1", options=ENGINE
        )
    await cluster.wait_ready()
    observer, seen, clients = cluster.observer, await Bystander.of(cluster), Clients(cluster, PROMPTS)
    expected = dict(zip(PROMPTS, await asyncio.gather(*map(clients.ask, PROMPTS)), strict=True))
    before = dict(observer.heartbeats)

    async with clients.asking():
        # Its answers have just begun, and would outlast the change.
        decode = await observer.worker_in(Role.DECODE, AttemptState.RUNNING)
        await cluster.change_role(decode, Role.PREFILL)
        await cluster.change_role("prefill-0", Role.DECODE)
        await cluster.change_role(decode, Role.DECODE)
        await cluster.change_role("prefill-0", Role.PREFILL)
    for prompt, answers in clients.answers.items():
        assert answers
        assert set(answers) == {expected[prompt]}
    assert set(seen.cancels) <= {"moved", "busy", "not wanted any more"}, "no attempt failed"
    assert seen.cancels["moved"], "answers outlasted a change"

    for name, beat in before.items():
        now = observer.heartbeats[name]
        assert now.address.generation == beat.address.generation
        assert now.address.role_epoch == (2 if name in (decode, "prefill-0") else 0)
    await _agree(cluster, before)


async def _agree(cluster: Cluster, before: dict[str, Heartbeat]) -> None:
    """Wait until the index and all workers agree on what each holds; none of it came by a resync."""
    async with asyncio.timeout(HANG_S):
        while True:
            status, out = await baton(cluster, "index", "--json")
            assert status == 0, out
            (report,) = json.loads(out)
            workers = {each["worker"]: each for each in report["workers"]}
            if all(each["agreed_sequence"] == each["sequence"] > 0 for each in workers.values()):
                break
    assert workers.keys() == before.keys()
    for name, worker in workers.items():
        beat = cluster.observer.heartbeats[name]
        assert (worker["generation"], worker["state"]) == (beat.address.generation, "synced")
        assert beat.held is not None
        assert worker["held"]["blocks"] == beat.held.blocks > 0
    assert not report["counters"].get("drift")


async def test_the_command_lists_roles_and_refuses_what_would_stop_the_service(cluster: Cluster) -> None:
    await cluster.start_control_plane()
    for name in ("prefill-0", "decode-0"):
        await cluster.start_worker(Role(name.split("-")[0]), name, options=ENGINE)
    await cluster.wait_ready()
    status, out = await baton(cluster, "roles", "--json")
    assert status == 0
    assert {each["worker"]: each["role"] for each in json.loads(out)} == {"prefill-0": "prefill", "decode-0": "decode"}
    for arguments, reason in (
        (("set", "decode-0", "prefill"), "baton: decode-0 is the last decode worker of the model tiny"),
        (("set", "decode-9", "prefill"), "baton: no worker 'decode-9' sends heartbeats"),
        (("set", "decode-0", "both"), "is none of: set WORKER prefill, set WORKER decode"),
    ):
        status, out = await baton(cluster, "roles", *arguments)
        assert status == 1
        assert reason in out
    assert await baton(cluster, "roles", "set", "decode-0", "decode") == (0, "decode-0 is a decode worker already\n")
    await cluster.start_worker(Role.DECODE, "decode-1", options=ENGINE)
    await cluster.wait_worker("decode-1")
    said = "decode-1 becomes a prefill worker once its attempts have ended\n"
    assert await baton(cluster, "roles", "set", "decode-1", "prefill") == (0, said)
    await cluster.observer.until(lambda: cluster.observer.heartbeats["decode-1"].role is Role.PREFILL)


@pytest.mark.timeout(480)
@pytest.mark.nightly
async def test_the_supervisor_changes_roles_as_the_load_shifts_and_no_request_fails(cluster: Cluster) -> None:
    """Long answers take all decode slots; then long prompts take all that prefill can compute."""
    await cluster.start_control_plane(gateway_flags=(*PATIENT, "--admission-wait-s", "60"), scheduler_flags=FAST)
    options = {**ENGINE, "running_max": 4, "prefill_token_s": 0.001}
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        await cluster.start_worker(
            Role(name.split("-")[0]), name, "--role-change-s", CHANGE_S, "--digest-s", "0.1", options=options
        )
    await cluster.wait_ready()
    await shift_load(cluster)
