"""`baton up` as a user runs it: it serves, reports, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest
from openai import AuthenticationError, OpenAI

from baton.cli.asking import NATS_URL_FILE, REDIS_URL_FILE
from baton.cli.servers import free_port
from baton.cli.tiny_model import make_tiny_model
from baton.cli.up import METRICS_TARGETS_FILE
from tests.harness.launcher import Launcher, launched, up_command
from tests.harness.limits import HANG_S
from tests.harness.processes import command_line

TOKENS = 100
"""Two seconds of output: more than a busy machine takes to pass a token on."""
PROCESSES = 8
"""NATS, Redis, index, scheduler, gateway and its process that reads bodies, one prefill and one decode worker."""

pytestmark = pytest.mark.timeout(300)


def assert_gone(processes: list[psutil.Process], timeout_s: float = HANG_S) -> None:
    assert processes, "there was nothing to end"
    _, alive = psutil.wait_procs(processes, timeout_s)
    assert not alive, f"still there: {[command_line(process) for process in alive]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model in it, so that it is made once."""
    folder = tmp_path_factory.mktemp("up")
    make_tiny_model(folder / ".cache" / "models" / "tiny-qwen3")
    return folder


@pytest.fixture(scope="module")
def launcher(folder: Path) -> Generator[Launcher]:
    with launched(folder) as launcher:
        yield launcher


def test_openais_sdk_streams_token_by_token(launcher: Launcher) -> None:
    with OpenAI(base_url=f"http://127.0.0.1:{launcher.port}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        # A busy machine may stop this process for as long as an answer takes, now and then.
        for _ in range(5):
            arrivals_s = read_stream(client)
            middle_s = arrivals_s[len(arrivals_s) // 2]
            if arrivals_s[0] + 0.1 < middle_s < arrivals_s[-1] - 0.1:
                return
    raise AssertionError("tokens do not come as they are made, 20 ms apart")


def read_stream(client: OpenAI) -> list[float]:
    """Return the instants at which the pieces of an answer came."""
    arrivals_s: list[float] = []
    usage = None
    for chunk in client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello!"}],
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    ):
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            arrivals_s.append(time.monotonic())
    assert usage is not None
    assert usage.completion_tokens == TOKENS
    # A few tokens are halves of a character, which come with the next one; on the whole each comes alone.
    assert len(arrivals_s) >= 0.6 * TOKENS
    return arrivals_s


def test_the_printed_curl_works(launcher: Launcher) -> None:
    lines = launcher.output.splitlines()
    start = next(index for index, line in enumerate(lines) if line.strip().startswith("curl -N"))
    end = next(index for index in range(start, len(lines)) if lines[index].endswith("}'"))
    answer = subprocess.run(
        ["sh", "-c", "\n".join(lines[start : end + 1])], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert answer.stdout.count("data: ") > 5
    assert answer.stdout.rstrip().endswith("data: [DONE]")
    assert "noise" in launcher.output, "the tiny model's text must not be taken for an answer"


def test_a_killed_worker_is_said_and_comes_back(launcher: Launcher) -> None:
    worker = next(child for child in launcher.descendants() if "decode-0" in command_line(child))
    worker.kill()
    launcher.wait_for("decode-0 was killed (SIGKILL); starting it again")
    launcher.wait_for("decode-0 is back")
    with OpenAI(base_url=f"http://127.0.0.1:{launcher.port}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Again"}], max_tokens=5
        )
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_who_is_killed_often_starts_again_at_once(launcher: Launcher) -> None:
    for command in ("nats-server", "baton_scheduler"):
        for _ in range(4):
            (victim,) = [child for child in launcher.descendants() if command in " ".join(child.cmdline())]
            backs = launcher.output.count(" is back")
            victim.kill()
            launcher.wait_until(lambda output, backs=backs: output.count(" is back") > backs, "it came back")
    assert "starting it again in" not in launcher.output


def test_each_process_serves_its_metrics_where_prometheus_is_told(launcher: Launcher, folder: Path) -> None:
    targets = json.loads((folder / ".run" / str(launcher.port) / METRICS_TARGETS_FILE).read_text())
    jobs = [target["labels"]["job"] for target in targets]
    assert jobs == ["kvindex", "scheduler", "gateway", "prefill", "decode"]
    for target in targets:
        (address,) = target["targets"]
        assert "process_start_time_seconds" in httpx.get(f"http://{address}/metrics").text


def test_secrets_are_on_no_command_line(launcher: Launcher) -> None:
    configuration = (launcher.output_path.parent / ".run" / str(launcher.port) / "nats.conf").read_text()
    token = configuration.partition('token: "')[2].partition('"')[0]
    assert len(token) > 20
    assert not any(token in word for child in launcher.descendants() for word in command_line(child))


def test_a_second_one_on_the_same_port_says_so(launcher: Launcher, folder: Path) -> None:
    answer = subprocess.run(
        up_command(folder, launcher.port), capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert answer.returncode == 2
    assert answer.stderr == (
        f"baton: port {launcher.port} is in use on 127.0.0.1: end what listens there, "
        f"or choose another, such as PORT={launcher.port + 1}\n"
    )


def test_a_second_one_in_the_same_folder_leaves_the_first_as_it_is(launcher: Launcher, folder: Path) -> None:
    command = up_command(folder, launcher.port, "--host", "127.0.0.2")
    answer = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    run_folder = folder / ".run" / str(launcher.port)
    assert answer.returncode == 2
    assert f"another `baton up` uses {run_folder}" in answer.stderr
    assert all((run_folder / name).exists() for name in (NATS_URL_FILE, REDIS_URL_FILE))


def test_stored_keys_are_taken_until_ctrl_c_ends_everything(folder: Path) -> None:
    with launched(folder, "--stored-keys") as launcher:
        children = launcher.descendants()
        assert len(children) == PROCESSES
        command = (sys.executable, "-m", "baton.cli", "keys", "create", "--tenant", "acme", "--port")
        said = subprocess.run(
            [*command, str(launcher.port)], cwd=folder, capture_output=True, text=True, timeout=HANG_S, check=True
        ).stdout
        assert "the setting stored_keys only" in said
        with OpenAI(base_url=f"{launcher.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(AuthenticationError):
                client.responses.create(model="tiny", input="Hello!", max_output_tokens=16)
            client.api_key = said.splitlines()[0]
            response = client.responses.create(model="tiny", input="Hello!", max_output_tokens=16)
            assert response.output_text == client.responses.retrieve(response.id).output_text != ""
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.process.wait(HANG_S) == 0, launcher.output
        assert_gone(children)
        with closing(socket.create_server(("127.0.0.1", launcher.port))):
            pass
        for question in (["index"], ["keys", "list"]):
            command = (sys.executable, "-m", "baton.cli", *question, "--port", str(launcher.port))
            asked = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG_S, check=False)
            assert f"no `baton up` runs in {folder / '.run' / str(launcher.port)}: name its port" in asked.stderr


def test_ctrl_c_lets_a_short_answer_finish(folder: Path) -> None:
    options = '{"speed": 1.0, "step_fixed_s": 0.02, "eos_probability": 0.0}'
    with launched(folder, "--engine-options", options, "--drain-s", "60") as launcher:
        with OpenAI(base_url=f"http://127.0.0.1:{launcher.port}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(model="tiny", prompt="x", max_tokens=50, stream=True)
            next(stream)
            launcher.process.send_signal(signal.SIGINT)
            finish = [choice.finish_reason for chunk in stream for choice in chunk.choices]
        assert finish[-1] == "length"
        assert launcher.process.wait(HANG_S) == 0, launcher.output
        assert "the gateway finishes what streams (60 s at most)" in launcher.output


def test_kill_9_leaves_nothing_behind(folder: Path) -> None:
    with launched(folder, "--gateway-processes", "2") as launcher:
        children = launcher.descendants()
        assert len(children) >= PROCESSES + 2, "a second gateway and the parent of both"
        launcher.process.kill()
        assert_gone(children)


def test_without_a_reader_of_its_output_it_restarts_workers_and_ends(folder: Path) -> None:
    """The same as `make up | tee up.log` when Ctrl-C ends `tee` first."""
    command = up_command(folder, free_port())
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    try:
        with process.stdout as output:
            assert any(b"Ctrl-C ends everything" in line for line in output), "it ended before it was ready"
        launcher = psutil.Process(process.pid)
        worker = next(child for child in launcher.children() if "decode-0" in command_line(child))
        worker.kill()
        give_up_at_s = time.monotonic() + HANG_S
        while not any("decode-0" in command_line(child) for child in launcher.children() if child != worker):
            assert process.poll() is None, "it ended"
            assert time.monotonic() < give_up_at_s, "the worker is not started again"
            time.sleep(0.05)
        children = launcher.children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 0
        assert_gone(children)
    finally:
        process.kill()
        process.wait()


def test_with_its_parent_killed_it_ends_itself(folder: Path) -> None:
    """The same as `make up` when `make` is killed."""
    with launched(folder, "--die-with-parent", shell="wait") as launcher:
        children = launcher.descendants()
        assert len(children) == PROCESSES + 1
        launcher.process.kill()
        assert_gone(children)


def test_an_engine_that_does_not_start_is_one_sentence(folder: Path) -> None:
    port = free_port()
    command = up_command(folder, port, "--engine-options", '{"blockz": 7}')
    answer = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1, answer.stderr
    assert "prefill-0 did not start" in answer.stderr
    assert "blockz" in answer.stderr
    mine = str(folder / ".run" / str(port))
    left = [process for process in psutil.process_iter(["cmdline"]) if mine in " ".join(process.info["cmdline"] or ())]
    assert left == []


def test_servers_that_do_not_answer_are_one_sentence(folder: Path) -> None:
    redis_port = free_port()
    away = ("--nats-url", f"nats://127.0.0.1:{free_port()}", "--redis-url", f"redis://:secret@127.0.0.1:{redis_port}")
    command = up_command(folder, free_port(), *away)
    answer = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False, env=dict(os.environ))
    assert answer.returncode == 1
    assert "REDIS_URL: Redis does not serve" in answer.stdout, "Redis is not needed for a start, so this is no error"
    assert str(redis_port) in answer.stdout
    assert "secret" not in answer.stdout + answer.stderr
    assert answer.stderr.count("\n") == 1, answer.stderr
    assert "cannot be reached" in answer.stderr
