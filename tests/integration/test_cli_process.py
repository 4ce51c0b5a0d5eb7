"""How the process of a command ends: without a traceback, and with a status that says why."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing

import pytest

from tests.harness.limits import HANG_S


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_ends_first_is_no_error(unbuffered: str) -> None:
    """The same as `baton … | head`, when `head` has seen enough before or after all is printed."""
    reads, writes = os.pipe()
    os.close(reads)
    ended = subprocess.run(
        [sys.executable, "-m", "baton.cli", "doctor"],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=writes,
        stderr=subprocess.PIPE,
        check=False,
        timeout=HANG_S,
    )
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


def test_an_interrupted_command_ends_without_a_traceback() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        silent.settimeout(HANG_S)
        url = f"nats://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "baton.cli", "index", "--nats-url", url]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            connection, _ = silent.accept()
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=HANG_S)
            connection.close()
    assert (process.returncode, said) == (128 + signal.SIGINT, b"")
