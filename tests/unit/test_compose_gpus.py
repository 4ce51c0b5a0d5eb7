"""The profiles of compose.yaml for GPUs, as the file has them; Docker reads it in tests/compose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

SERVICES: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "compose.yaml").read_text())["services"]


@pytest.mark.parametrize(("profile", "gpus"), [("gpu", 1), ("gpus-2", 2), ("gpus-4", 4), ("gpus-8", 8)])
def test_each_gpu_of_a_profile_has_a_worker_of_its_own(profile: str, gpus: int) -> None:
    workers = [
        service
        for name, service in SERVICES.items()
        if name.startswith("decode-gpu") and profile in service["profiles"]
    ]
    devices = [worker["deploy"]["resources"]["reservations"]["devices"] for worker in workers]
    assert [(device["device_ids"], device["capabilities"]) for (device,) in devices] == [
        (["${DECODE_GPU:-0}" if index == 0 else str(index)], ["gpu"]) for index in range(gpus)
    ]
    # They share the host's network.
    assert all(worker["network_mode"] == "host" for worker in workers)
    ports = [worker["environment"]["BATON_DECODE_STATUS_PORT"] for worker in workers]
    assert len(set(ports)) == gpus
    assert [worker["healthcheck"]["test"][-1] for worker in workers] == ports
    assert [worker["environment"]["BATON_DECODE_AGENT_VERBS_DEVICES"] for worker in workers] == [
        f"${{RDMA_{index}:-}}" for index in range(gpus)
    ]
    assert all("BATON_DECODE_NATS_URL" in worker["environment"] for worker in workers)


def test_nats_is_reachable_in_every_profile_for_gpus() -> None:
    wanted = {profile for name, service in SERVICES.items() if "gpu" in name for profile in service["profiles"]}
    assert set(SERVICES["nats-loopback"]["profiles"]) == wanted
