"""compose.yaml with simulated engines: several of each service, killed and restarted while streams run."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from tests.compose.clients import connect, stream, under_load
from tests.compose.project import BASE_IMAGE, Project, docker, running

pytestmark = pytest.mark.timeout(900)

SCALE = {"gateway": 2, "scheduler": 2, "kvindex": 2, "prefill": 2, "decode": 3}
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
IMAGES = ("baton-gateway", "baton-scheduler", "baton-kvindex", "baton-prefill:simulated", "baton-decode:simulated")
HAS_TORCH = "import importlib.util as u; print(*(name for name in ('torch', 'vllm') if u.find_spec(name)))"


@pytest.fixture(scope="module")
def project() -> Iterator[Project]:
    simulated = Project(name="baton-test", settings={"ENGINE": "simulated", "DISAGGREGATION": "always"})
    with running(simulated, scale=SCALE, timeout_s=1200.0) as started:
        yield started


@pytest.fixture
def client(project: Project) -> Generator[OpenAI]:
    with connect(project.url) as opened:
        yield opened


def test_requests_pass_the_edge_and_every_decode_worker_pulls(project: Project, client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    with ThreadPoolExecutor(12) as pool:
        texts = {future.result() for future in [pool.submit(answer, client, 60) for _ in range(24)]}
    assert len(texts) == 1, "greedy answers of one prompt are the same wherever they run"
    whole = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=60, temperature=0, extra_body={"ignore_eos": True}
    )
    assert {whole.choices[0].text} == texts
    answered = [
        project.metric(gateway, 'baton_answers_total{end="length"}') for gateway in project.containers("gateway")
    ]
    assert min(answered) > 0, f"leastconn spreads the requests over all gateways, not {answered}"
    assert "KV comes over shm" in project.compose("logs", "decode"), "containers share a tmpfs, so no TCP is needed"


def test_images_are_small_and_have_no_torch() -> None:
    def megabytes(image: str) -> int:
        return int(docker("image", "inspect", "-f", "{{.Size}}", image)) // 1_000_000

    base = megabytes(BASE_IMAGE)
    for image in IMAGES:
        print(f"{image:28} {megabytes(image):5} MB, {megabytes(image) - base:5} MB of it on top of {BASE_IMAGE}")
        assert megabytes(image) - base < 400
        assert docker("run", "--rm", "--entrypoint", "python", image, "-c", HAS_TORCH) == ""


def test_containers_may_do_little(project: Project) -> None:
    for container in project.compose("ps", "-aq").split():
        facts = project.inspect(container)
        host, name = facts["HostConfig"], facts["Name"]
        assert host["ReadonlyRootfs"], name
        assert host["CapDrop"] == ["ALL"], name
        assert host["SecurityOpt"] == ["no-new-privileges:true"], name
        assert host["Memory"], name
        assert host["PidsLimit"] > 0, name
        assert host["RestartPolicy"]["Name"] == ("on-failure" if "model" in name else "unless-stopped"), name
        assert facts["Config"]["User"] not in ("", "root", "0"), name
        published = [port for ports in host["PortBindings"].values() for port in ports]
        assert [port["HostIp"] for port in published] == (["127.0.0.1"] if "edge" in name else []), name


@pytest.mark.parametrize(("service", "state"), [("decode", "running"), ("prefill", "held")])
def test_a_killed_worker_costs_no_stream(project: Project, client: OpenAI, service: str, state: str) -> None:
    working = f'baton_worker_attempts{{state="{state}"}}'
    with under_load(client, PROMPT, tokens=200, threads=6) as load:
        project.wait_until(lambda: load.parts > 100, "no stream runs")
        victim = max(project.containers(service), key=lambda container: project.metric(container, working))
        if service == "decode":
            assert project.metric(victim, working) > 0, "it is killed while it streams"
        project.kill(victim)
        project.wait_until(lambda: load.wrong or load.done >= 12, "streams do not end")
    assert not load.wrong, "\n".join(load.wrong)
    project.wait_until(lambda: project.inspect(victim)["RestartCount"] == 1, f"{victim} was not started again")
    project.wait_healthy(victim)


@pytest.mark.parametrize("service", ["scheduler", "kvindex", "prefill", "decode", "gateway", "redis", "nats"])
def test_a_rolling_restart_drops_no_stream(project: Project, client: OpenAI, service: str) -> None:
    with under_load(client, PROMPT, tokens=100, threads=6) as load:
        for container in project.containers(service):
            before = load.done
            docker("restart", container, timeout_s=350.0)
            project.wait_healthy(container)
            project.wait_until(lambda: load.wrong or load.done >= before + 6, "streams do not end")  # noqa: B023
    print(f"{service}: {load.done} streams")
    assert not load.wrong, "\n".join(load.wrong)


def test_scaling_drops_no_stream(project: Project, client: OpenAI) -> None:
    with under_load(client, PROMPT, tokens=100, threads=6) as load:
        for count in (SCALE["gateway"] + 1, SCALE["gateway"]):
            before = load.done
            project.compose("up", "-d", "--no-recreate", "--wait", *scale_to(gateway=count), timeout_s=400.0)
            project.wait_until(lambda: load.wrong or load.done >= before + 6, "streams do not end")  # noqa: B023
    assert not load.wrong, "\n".join(load.wrong)


def test_the_edge_lets_its_streams_end(project: Project) -> None:
    """It is one process, so new clients wait for its return; connected ones do not notice."""
    with connect(project.url, retries=20) as client, under_load(client, PROMPT, tokens=200, threads=4) as load:
        for container in project.containers("edge"):
            docker("restart", container, timeout_s=350.0)
            project.wait_healthy(container)
    assert not load.wrong, "\n".join(load.wrong)
    assert load.done >= 4


def answer(client: OpenAI, tokens: int) -> str:
    return "".join(stream(client, PROMPT, tokens=tokens))


def scale_to(**changed: int) -> list[str]:
    return [part for service, count in (SCALE | changed).items() for part in ("--scale", f"{service}={count}")]
