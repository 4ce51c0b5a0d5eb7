"""A group of processes: what its parent says of them while one does not answer."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import psutil
import pytest

from baton.errors import Unavailable
from baton.processes.group import ProcessGroup

ANSWERS = """
import socket, sys

listener = socket.socket(fileno=int(sys.argv[-1]))
while True:
    connection = listener.accept()[0]
    connection.recv(8192)
    connection.sendall({answer!r})
    connection.close()
"""
READY = b"HTTP/1.1 200 OK\r\n\r\n"
NOT_READY = b'HTTP/1.1 503 \r\n\r\n{"status": "not ready", "reason": "no workers"}'


@asynccontextmanager
async def one_of_two_hangs(hung: int, answer: bytes, *, answer_s: float) -> AsyncGenerator[ProcessGroup]:
    command = (sys.executable, "-c", ANSWERS.format(answer=answer))
    group = ProcessGroup("stub", command, count=2, drain_timeout_s=1.0, answer_s=answer_s)
    parent = psutil.Process()
    before = parent.children()
    async with group.serving():
        process = [process for process in parent.children() if process not in before][hung]
        process.suspend()
        try:
            yield group
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("hung", [0, 1])
async def test_one_that_is_ready_is_enough_while_another_one_hangs(hung: int) -> None:
    async with one_of_two_hangs(hung, READY, answer_s=3600.0) as group:
        await group.check_ready()


@pytest.mark.parametrize("hung", [0, 1])
async def test_while_none_is_ready_one_that_answers_says_why(hung: int) -> None:
    # The one that hangs takes all of this time, the other one needs some of it on a busy machine.
    async with one_of_two_hangs(hung, NOT_READY, answer_s=2.0) as group:
        with pytest.raises(Unavailable, match="no workers"):
            await group.check_ready()
