"""Children that a parent keeps: how soon they start again after an end, a failed start, a hang."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.processes.child import Child, Program
from baton.processes.keep_alive import RestartPolicy, StartFailed, keep_alive, until_ready

SLEEPS = "import time; time.sleep(60)"
COUNTS_SIGTERM = """
import signal, time

asked = 0

def ask(*_):
    global asked
    asked += 1
    print("asked", flush=True)
    if asked == 2:
        raise SystemExit(2)

def end(*_):
    raise SystemExit(10)

signal.signal(signal.SIGWINCH, end)
signal.signal(signal.SIGTERM, ask)
print("began", flush=True)
while True:
    time.sleep(60)
"""
QUICK = RestartPolicy(first_s=0.01, max_s=0.02, alive_interval_s=0.01, failed_probes_max=3)


def test_a_child_that_was_ready_starts_at_once_and_failed_starts_wait_ever_longer() -> None:
    policy, waits, wait_s = RestartPolicy(first_s=0.5, max_s=3.0), list[float](), 0.0
    for was_ready in (True, True, True, False, False, False, False, False, True, False):
        wait_s = policy.wait_s(wait_s, was_ready=was_ready)
        waits.append(wait_s)
    assert waits == [0.0, 0.0, 0.0, 0.5, 1.0, 2.0, 3.0, 3.0, 0.0, 0.5]


@dataclass
class World:
    """A child whose probes answer what the test says."""

    folder: Path | None
    command: tuple[str, ...] = (sys.executable, "-c", SLEEPS)
    start_timeout_s: float = 60.0
    ready: bool = True
    sockets: tuple[int, ...] = ()
    alive: Callable[[], bool] = lambda: True
    lines: list[str] = field(default_factory=list[str])
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, text: str) -> None:
        self.lines.append(text)
        self.changed.set()

    async def until(self, condition: Callable[[list[str]], object]) -> None:
        while not condition(self.lines):
            self.changed.clear()
            await self.changed.wait()

    @asynccontextmanager
    async def started(self) -> AsyncGenerator[Child]:
        async def answers_ready() -> bool:
            return self.ready

        async def answers_alive() -> bool:
            return self.alive()

        child = Child(
            Program(
                name="child",
                command=self.command,
                environ=dict(os.environ),
                log_path=self.folder and self.folder / "log",
                ready=answers_ready,
                alive=answers_alive,
                start_timeout_s=self.start_timeout_s,
                sockets=self.sockets,
            )
        )
        child.start()
        try:
            yield child
        finally:
            child.kill()
            await child.wait()

    @asynccontextmanager
    async def kept(self) -> AsyncGenerator[Child]:
        async with self.started() as child:
            keeper = asyncio.create_task(keep_alive(child, self.tell, QUICK))
            try:
                yield child
            finally:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)


def backs(lines: list[str]) -> int:
    return lines.count("child is back")


async def test_however_often_a_ready_child_is_killed_it_starts_again_at_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    async with world.kept() as child:
        for number in range(1, 7):
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            await world.until(lambda lines, number=number: backs(lines) == number)
    restarts = [line for line in world.lines if "starting it again" in line]
    assert len(restarts) == 6
    assert all("child was killed (SIGKILL); starting it again (log:" in line for line in restarts), restarts


async def test_starts_that_fail_are_tried_after_growing_waits(tmp_path: Path) -> None:
    world = World(tmp_path, command=(sys.executable, "-c", "raise SystemExit(3)"), ready=False)
    async with world.kept():
        await world.until(lambda lines: len(lines) == 4)
    waits = [line.partition("starting it again")[2].partition(" (log")[0] for line in world.lines]
    assert waits == ["", " in 0.01 s", " in 0.02 s", " in 0.02 s"], "the first end was of a child that had been ready"


async def test_a_start_that_is_impossible_is_tried_again_after_growing_waits(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.symlink_to("/bin/sleep")
    world = World(tmp_path, command=(str(program), "60"))
    async with world.kept() as child:
        assert child.pid is not None
        program.unlink()
        os.kill(child.pid, signal.SIGKILL)
        await world.until(lambda lines: len(lines) == 4)
        program.symlink_to("/bin/sleep")
        await world.until(backs)
    assert "starting it again (log:" in world.lines[0]
    assert all("child cannot be started: [Errno 2]" in line for line in world.lines[1:4])
    waits = [line.rpartition("trying again in ")[2] for line in world.lines[1:4]]
    assert waits == ["0.01 s", "0.02 s", "0.02 s"]


@pytest.mark.parametrize("stopped", [False, True], ids=["silent", "stopped"])
async def test_a_child_that_runs_but_does_not_answer_is_ended_and_starts_again(tmp_path: Path, stopped: bool) -> None:
    world = World(tmp_path)
    async with world.kept() as child:
        hung = child.pid
        assert hung is not None
        if stopped:
            os.kill(hung, signal.SIGSTOP)
        world.alive = lambda: False
        await world.until(lambda lines: any("does not answer" in line for line in lines))
        world.alive = lambda: True
        await world.until(backs)
        assert child.pid != hung
    assert world.lines[0] == "child runs but does not answer: ending it"
    assert world.lines[1].startswith("child was killed (SIGKILL); starting it again (log:")


async def test_a_restart_that_never_gets_ready_is_a_failed_start(tmp_path: Path) -> None:
    world = World(tmp_path, ready=False, start_timeout_s=0.05)
    async with world.kept() as child:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        await world.until(lambda lines: any("in 0.01 s" in line for line in lines))
    assert "child was not ready within 0.05 s: ending it" in world.lines


async def test_silences_that_end_are_no_hang(tmp_path: Path) -> None:
    """A pause of the launcher itself lets a probe's time run out, and counts as one silence."""
    answers = iter([True, False, False, True, False, False, True])
    asked_all = asyncio.Event()

    def alive() -> bool:
        if (answer := next(answers, None)) is None:
            asked_all.set()
        return answer is not False

    world = World(tmp_path, alive=alive)
    async with world.kept() as child:
        pid = child.pid
        await asked_all.wait()
        assert child.pid == pid
    assert world.lines == []


async def test_a_first_start_that_ends_or_takes_too_long_is_an_error(tmp_path: Path) -> None:
    for command, timeout_s, status in (
        ((sys.executable, "-c", "raise SystemExit(3)"), 60.0, 3),
        ((sys.executable, "-c", SLEEPS), 0.01, None),
    ):
        async with World(tmp_path, command=command, start_timeout_s=timeout_s, ready=False).started() as child:
            with pytest.raises(StartFailed) as failed:
                await until_ready([child])
            assert (failed.value.child, failed.value.status) == (child, status)


@pytest.mark.parametrize("stops", [False, True], ids=["asked again", "stopped"])
async def test_a_child_that_was_asked_to_end_gets_another_signal_only_from_stop(tmp_path: Path, stops: bool) -> None:
    async with World(tmp_path, command=(sys.executable, "-c", COUNTS_SIGTERM)).started() as child:
        assert child.pid is not None
        await until_logged(child, "began")
        child.terminate()
        await until_logged(child, "asked")
        if stops:
            await child.stop()
        else:
            child.terminate()
            os.kill(child.pid, signal.SIGWINCH)  # Delivered after a SIGTERM that was sent before it.
        assert await child.wait() == (2 if stops else 10)


async def test_a_child_that_was_started_again_can_be_asked_to_end_again(tmp_path: Path) -> None:
    async with World(tmp_path).started() as child:
        for _ in range(2):
            child.terminate()
            assert await child.wait() == -signal.SIGTERM
            child.start()


async def test_killing_a_child_does_not_hold_up_its_parent(tmp_path: Path) -> None:
    async with World(tmp_path).started() as child:
        assert child.pid is not None
        child.kill()
        # Fails where the process was waited for: the kernel may take seconds to free what it held.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # noqa: ASYNC222 - WNOHANG.
        assert await child.wait() == -signal.SIGKILL


async def test_the_end_of_a_child_is_noticed_while_no_descriptor_is_free(tmp_path: Path) -> None:
    async with World(tmp_path).started() as child:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            waiting = asyncio.create_task(child.wait())
            await asyncio.sleep(0)
            child.terminate()
            assert await waiting == -signal.SIGTERM
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def until_logged(child: Child, line: str) -> None:
    while line not in child.log_tail():  # noqa: ASYNC110 - written by another process.
        await asyncio.sleep(0.01)


async def test_a_child_without_a_log_writes_to_its_parents_output(capfd: pytest.CaptureFixture[str]) -> None:
    async with World(None, command=(sys.executable, "-c", "print('said')")).started() as child:
        assert await child.wait() == 0
        assert child.log_tail() == ""
    assert capfd.readouterr().out == "said\n"


async def test_a_child_inherits_the_sockets_of_its_program(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        says = f"import socket; print(socket.socket(fileno={listener.fileno()}).getsockname()[1])"
        world = World(tmp_path, command=(sys.executable, "-c", says), sockets=(listener.fileno(),))
        async with world.started() as child:
            assert await child.wait() == 0
            assert child.log_tail().strip() == str(listener.getsockname()[1])
