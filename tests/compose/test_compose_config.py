"""compose.yaml and its servers' files as they are read; nothing is started but the programs that read them."""

from __future__ import annotations

import pytest

from tests.compose.project import ROOT, Project, docker, make_images_available

pytestmark = pytest.mark.timeout(900)

PUBLIC = ("-f", "compose.yaml", "-f", "compose.public.yaml")


def config(*arguments: str, **settings: str) -> str:
    return Project(name="baton-test-config", settings=settings).compose(*arguments)


def test_all_profiles_are_understood() -> None:
    services = config("--profile", "gpu", "--profile", "observability", "config", "--services").split()
    assert {"decode-gpu", "jaeger", "otel-collector", "prometheus", "grafana"} <= set(services)
    assert "jaeger" not in config("config", "--services").split()
    assert "decode-gpu-3" in config("--profile", "gpus-4", "config", "--services").split()


def test_a_port_for_others_asks_for_a_key() -> None:
    assert "host_ip: 127.0.0.1" in config("config")
    with pytest.raises(RuntimeError, match="other machines get in, so choose the key"):
        config(*PUBLIC, "config")
    opened = config(*PUBLIC, "config", API_KEY="k-1")
    assert "host_ip: 0.0.0.0" in opened
    assert "host_ip: 127.0.0.1" not in opened
    assert "BATON_GATEWAY_API_KEYS: k-1" in opened


@pytest.mark.parametrize(
    ("file", "password", "said"),
    [("edge.cfg", "", ""), ("nats.cfg", "secret", ""), ("nats.cfg", "", "choose NATS_PASSWORD")],
)
def test_haproxy_reads_its_files(file: str, password: str, said: str) -> None:
    image = "haproxy:3.2-alpine"
    make_images_available([image])
    command = ["run", "--rm", "-e", f"NATS_PASSWORD={password}", "-v", f"{ROOT}/deploy/haproxy:/etc/haproxy:ro", image]
    command += ["haproxy", "-c", "-f", "/etc/haproxy/docker.cfg", "-f", f"/etc/haproxy/{file}"]
    if said:
        with pytest.raises(RuntimeError, match=said):
            docker(*command)
    else:
        docker(*command)
