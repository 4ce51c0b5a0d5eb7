"""The fork server of the tests: a forked process is to its caller what a real one is."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.harness.fork_server import forked
from tests.harness.limits import HANG_S
from tests.harness.processes import runs

LOOK = """
import json, os, resource, signal, sys
numbers = signal.SIGINT, signal.SIGTERM, signal.SIGPIPE
handlers = [str(signal.getsignal(number)).partition(" at ")[0] for number in numbers]
limit = resource.getrlimit(resource.RLIMIT_NOFILE)
descriptors = sorted(int(each) for each in os.listdir("/proc/self/fd"))[:-1]
print(json.dumps([
    *(__name__, sys.argv, sys.path, sys.executable, sys.orig_argv, dict(os.environ), os.getcwd(), os.getppid()),
    *(os.getpgid(0), os.getsid(0), sys.stdin.read(), handlers, list(signal.pthread_sigmask(0, [])), limit, descriptors),
]))
print("said", file=sys.stderr)
raise SystemExit(3)
"""
PARENT = """
import os, subprocess, sys, time
from tests.harness.fork_server import forked
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=forked(os.environ))
print(child.pid, flush=True)
time.sleep(600)
"""


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *arguments], env=forked(os.environ), stdout=subprocess.PIPE, text=True)


def sleeping() -> subprocess.Popen[str]:
    """Start a process that sleeps, and return once it does."""
    process = start("-c", "import time; print('asleep', flush=True); time.sleep(600)")
    assert process.stdout is not None and process.stdout.readline() == "asleep\n"
    return process


def until_gone(processes: Sequence[psutil.Process]) -> None:
    give_up_at_s = time.monotonic() + HANG_S
    for process in processes:
        while runs(process):
            assert time.monotonic() < give_up_at_s, f"{process} is left"
            time.sleep(0.02)


@pytest.mark.parametrize("way", ["-c", "-m", "script"])
def test_it_sees_and_says_what_a_real_process_does(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "look.py"
    program.write_text(LOOK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep))
    monkeypatch.setenv("BATON_ANY", "thing=with=signs ü")
    arguments = {"-c": ["-c", LOOK], "-m": ["-m", "look"], "script": [str(program)]}[way]
    said = [
        subprocess.run(
            [sys.executable, *arguments, "--flag", "ü"],
            env=environ,
            cwd=tmp_path,
            input="asked",
            capture_output=True,
            text=True,
            check=False,
        )
        for environ in (dict(os.environ), forked(os.environ))
    ]
    real, fork = said
    assert json.loads(fork.stdout) == json.loads(real.stdout)
    assert (fork.stderr, fork.returncode) == (real.stderr, real.returncode) == ("said\n", 3)


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("pass", 0, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(300)", 44, ""),
        ("raise SystemExit('a sentence')", 1, "a sentence\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os._exit(9)", 9, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import atexit, sys; atexit.register(lambda: sys.stderr.write('last words'))", 0, "last words"),
        ("import sys, threading; threading.Timer(0.01, lambda: sys.stderr.write('late')).start()", 0, "late"),
    ],
)
async def test_its_end_is_told(code: str, status: int, error: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=forked(os.environ), stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == status
    assert errors.decode().endswith(error) and bool(errors) == bool(error)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it(number: signal.Signals) -> None:
    with sleeping() as process:
        assert process.poll() is None
        process.send_signal(number)
        assert process.wait(HANG_S) == -number


def test_it_is_a_child_that_can_be_stopped() -> None:
    with sleeping() as process:
        assert psutil.Process(process.pid) in psutil.Process().children()
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
        process.kill()
        assert process.wait(HANG_S) == -signal.SIGKILL


def test_random_numbers_are_its_own() -> None:
    code = "import random, numpy, uuid; print(random.random(), numpy.random.random(), uuid.uuid4())"
    drawn = [start("-c", code).communicate()[0].split() for _ in range(2)]
    assert all(first != second for first, second in zip(*drawn, strict=True))


def test_nothing_outlives_a_test_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        started = psutil.Process(parent.pid).children(recursive=True)
        parent.kill()
    # The fork server, too, and perhaps the process in between, whose end the fork server had not seen yet.
    assert child in started and len(started) >= 2, started
    until_gone(started)
