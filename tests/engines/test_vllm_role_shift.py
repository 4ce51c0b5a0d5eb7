"""The supervisor changes roles of real vLLM workers as the load shifts."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import PATIENCE, start_worker

from baton.messages.workers import Role
from tests.harness.cluster import running_cluster
from tests.harness.role_shift import FAST, shift_load


@pytest.mark.nightly
async def test_roles_follow_a_load_that_shifts_and_no_request_fails(tiny_model: Path, tmp_path: Path) -> None:
    async with running_cluster(tmp_path, model=tiny_model) as cluster:
        await cluster.start_control_plane(gateway_flags=(*PATIENCE, "--admission-wait-s", "60"), scheduler_flags=FAST)
        for name in ("prefill-0", "decode-0", "prefill-1", "decode-1"):
            await start_worker(cluster, Role(name.partition("-")[0]), name, "vllm", max_num_seqs=4)
        await cluster.wait_ready()
        await shift_load(cluster, prompt_lines=100, body={"ignore_eos": True})
