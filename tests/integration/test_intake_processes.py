"""Intake processes for long bodies: bounded, replaced when they die, and ended with their gateway."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from baton_gateway.config import Settings
from baton_gateway.intake_messages import LARGE_BYTES
from baton_gateway.intake_pool import BEGINNING_BYTES, LARGE_NICENESS, ProcessPool

from baton.clock import SystemClock
from baton.messages.attempts import DecodeTask
from baton.messages.base import unpack_tokens
from tests.harness.gateway.actors import MODEL
from tests.harness.gateway.stage import Stage, open_stage
from tests.harness.gateway.stub_intake import COMMAND, TOKENS
from tests.harness.heartbeats import MODEL_DIGEST
from tests.harness.limits import HANG_S
from tests.harness.processes import command_line, runs

LONG = 5_000
COMPLETIONS = "/v1/completions"


@dataclass
class Rig:
    stage: Stage
    pool: ProcessPool
    client: httpx.AsyncClient

    def processes(self) -> list[psutil.Process]:
        """Return the live intake processes."""
        children = psutil.Process().children()
        return [child for child in children if runs(child) and COMMAND[-1] in command_line(child)]

    async def post(
        self, prompt: str, *, chars: int = LONG, deadline_s: float = 20.0, key: str = "any"
    ) -> httpx.Response:
        headers = {"x-baton-deadline-s": str(deadline_s), "authorization": f"Bearer {key}"}
        body = {"model": MODEL, "prompt": prompt + " " + "x" * chars, "max_tokens": 4}
        return await self.client.post(COMPLETIONS, json=body, headers=headers)

    async def occupy(self, group: asyncio.TaskGroup, prompt: str, *, chars: int = LONG) -> asyncio.Task[httpx.Response]:
        """Send a prompt, and wait until a process works on it."""
        at_work = self.at_work()
        task = group.create_task(self.post(prompt, chars=chars))
        await self.stage.wait_for(lambda: self.at_work() > at_work)
        return task

    def at_work(self) -> int:
        return self.pool.lent


@asynccontextmanager
async def rig(
    settings: Settings | None = None,
    *,
    processes_max: int = 1,
    waiting_bytes_max: int = 1 << 20,
    command: tuple[str, ...] = COMMAND,
) -> AsyncGenerator[Rig]:
    async with AsyncExitStack() as stack:
        pool = ProcessPool(
            clock=SystemClock(), processes_max=processes_max, waiting_bytes_max=waiting_bytes_max, command=command
        )
        stage = await stack.enter_async_context(open_stage(settings or Settings(port=0), pool))
        stage.say("ok")
        client = httpx.AsyncClient(base_url=stage.base_url, timeout=HANG_S)
        opened = Rig(stage, pool, await stack.enter_async_context(client))
        # The first model is loaded in both places; until then there is no process to look at.
        await stage.wait_for(lambda: stage.models.known(str(stage.model_path), MODEL_DIGEST))
        yield opened


async def test_a_long_body_is_read_in_another_process_and_a_short_one_is_not() -> None:
    async with rig() as opened:
        assert (await opened.post("hello")).status_code == 200
        assert (await opened.post("hello", chars=1)).status_code == 200
        tasks = opened.stage.workers["d1"].got(DecodeTask)
        read = [unpack_tokens(task.tokens) for task in tasks if isinstance(task, DecodeTask)]
        assert read == [TOKENS, opened.stage.tokenizer.encode("hello x", add_special=True)]


async def test_the_queue_is_bounded_and_short_bodies_pass_it() -> None:
    async with rig(waiting_bytes_max=LONG * 3 // 2) as opened, asyncio.TaskGroup() as group:
        hanging = await opened.occupy(group, "hang")
        waiting = group.create_task(opened.post("hello"))
        await opened.stage.wait_for(lambda: opened.pool.waiting_bytes)
        refused = await opened.post("hello")
        assert refused.status_code == 429, refused.text
        assert refused.json()["error"]["code"] == "overloaded"
        assert refused.headers["retry-after"] == "1"
        assert (await opened.post("hello", chars=1)).status_code == 200
        opened.processes()[0].kill()
        assert (await hanging).status_code == 503
        assert (await waiting).status_code == 200


async def test_a_client_that_leaves_takes_its_waiting_body_along(tmp_path: Path) -> None:
    async with rig() as opened, asyncio.TaskGroup() as group:
        working = await opened.occupy(group, f"until {tmp_path}/done")
        leaving = group.create_task(opened.post("hello"))
        await opened.stage.wait_for(lambda: opened.pool.waiting_bytes)
        leaving.cancel()
        await opened.stage.wait_for(lambda: not opened.pool.waiting_bytes)
        assert not working.done()
        (tmp_path / "done").touch()
        assert (await working).status_code == 200


async def test_a_client_that_leaves_costs_no_process(tmp_path: Path) -> None:
    async with rig() as opened, asyncio.TaskGroup() as group:
        leaving = await opened.occupy(group, f"until {tmp_path}/done")
        (process,) = opened.processes()
        # A process that has only parsed the body by then would be free at once.
        await opened.stage.wait_for((tmp_path / "done.begun").exists)
        leaving.cancel()
        next_one = group.create_task(opened.post("hello"))
        await opened.stage.wait_for(lambda: opened.pool.waiting_bytes)
        (tmp_path / "done").touch()
        assert (await next_one).status_code == 200
        assert opened.processes() == [process]


async def test_a_body_takes_the_process_that_is_free_first(tmp_path: Path) -> None:
    """One more is started beside. A start takes seconds, and most bodies milliseconds."""
    held = tmp_path / "held"
    async with rig(processes_max=2, command=(*COMMAND, str(held))) as opened, asyncio.TaskGroup() as group:
        held.touch()
        first = await opened.occupy(group, f"until {tmp_path}/first")
        second = group.create_task(opened.post(f"until {tmp_path}/second"))
        await opened.stage.wait_for(Path(f"{held}.begun").exists)
        (tmp_path / "first").touch()
        assert (await first).status_code == 200
        await opened.stage.wait_for((tmp_path / "second.begun").exists)
        third = group.create_task(opened.post("hello"))
        held.unlink()
        assert (await third).status_code == 200, "the other one has started"
        assert not second.done()
        (tmp_path / "second").touch()
        assert (await second).status_code == 200


async def test_a_process_that_does_not_start_holds_up_nothing(tmp_path: Path) -> None:
    held = tmp_path / "held"
    async with rig(processes_max=2, command=(*COMMAND, str(held))) as opened, asyncio.TaskGroup() as group:
        (ready,) = opened.processes()
        held.touch()
        first = await opened.occupy(group, f"until {tmp_path}/first")
        second = group.create_task(opened.post("hello"))
        await opened.stage.wait_for(Path(f"{held}.begun").exists)
        (starting,) = (each for each in opened.processes() if each != ready)
        starting.kill()
        await opened.stage.wait_for(lambda: opened.processes() == [ready])
        (tmp_path / "first").touch()
        assert [(await each).status_code for each in (first, second)] == [200, 200]


async def test_no_more_processes_stay_than_are_wanted(tmp_path: Path) -> None:
    held = tmp_path / "held"
    async with rig(processes_max=2, command=(*COMMAND, str(held))) as opened, asyncio.TaskGroup() as group:
        (ready,) = opened.processes()
        held.touch()
        first = await opened.occupy(group, "hang")
        second = group.create_task(opened.post(f"until {tmp_path}/second"))
        await opened.stage.wait_for(Path(f"{held}.begun").exists)
        (starting,) = (each for each in opened.processes() if each != ready)
        ready.kill()
        assert (await first).status_code == 503
        third = await opened.occupy(group, f"until {tmp_path}/third")
        held.unlink()
        await opened.stage.wait_for(lambda: not runs(starting))
        for name, post in (("second", second), ("third", third)):
            (tmp_path / name).touch()
            assert (await post).status_code == 200


async def test_a_deadline_ends_what_hangs() -> None:
    async with rig() as opened:
        (process,) = opened.processes()
        late = await opened.post("hang", deadline_s=0.3)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert (await opened.post("hello")).status_code == 200
        assert not runs(process)


async def test_a_deadline_holds_while_waiting(tmp_path: Path) -> None:
    async with rig() as opened, asyncio.TaskGroup() as group:
        working = await opened.occupy(group, f"until {tmp_path}/done")
        late = await opened.post("hello", deadline_s=0.3)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        (tmp_path / "done").touch()
        assert (await working).status_code == 200


async def test_processes_that_die_are_replaced() -> None:
    async with rig() as opened:
        (process,) = opened.processes()
        process.kill()
        await opened.stage.wait_for(lambda: not runs(process))
        assert (await opened.post("hello")).status_code in (200, 503), "its end may not be known yet"
        died = await opened.post("exit")
        assert (died.status_code, died.headers["retry-after"]) == (503, "1")
        assert (await opened.post("hello")).status_code == 200


async def test_large_bodies_hold_up_no_others() -> None:
    async with rig(waiting_bytes_max=8 << 20) as opened, asyncio.TaskGroup() as group:
        others = opened.processes()
        first = await opened.occupy(group, "hang", chars=LARGE_BYTES)
        second = group.create_task(opened.post("hello", chars=LARGE_BYTES))
        await opened.stage.wait_for(lambda: opened.pool.waiting_bytes)
        assert (await opened.post("hello")).status_code == 200
        assert not second.done()

        def gentle() -> list[psutil.Process]:
            niceness = min(19, psutil.Process().nice() + LARGE_NICENESS)
            return [each for each in opened.processes() if each not in others and each.nice() == niceness]

        await opened.stage.wait_for(gentle)
        gentle()[0].kill()
        assert (await first).status_code == 503
        assert (await second).status_code == 200


async def test_a_tenants_bodies_leave_room_for_those_of_another() -> None:
    """Both where long bodies are received and where they wait for a process."""
    settings = Settings(port=0, api_keys=("greedy", "other"), bodies_bytes_max=6 * LARGE_BYTES)
    async with rig(settings, waiting_bytes_max=4 * LONG) as opened, asyncio.TaskGroup() as group:
        hanging = group.create_task(opened.post("hang", key="greedy"))
        await opened.stage.wait_for(lambda: opened.at_work() == 1)
        posts = [group.create_task(opened.post("hello", key="greedy"))]
        await opened.stage.wait_for(lambda: opened.pool.waiting_bytes)
        refused = await opened.post("hello", key="greedy")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        posts.append(group.create_task(opened.post("hello", key="other")))
        await opened.stage.wait_for(lambda: opened.pool.waiting_bytes > 2 * LONG)
        assert not posts[0].done()
        opened.processes()[0].kill()
        assert (await hanging).status_code == 503
        assert [(await post).status_code for post in posts] == [200, 200]


async def test_a_conversation_stays_with_the_process_that_knows_its_beginning() -> None:
    async with rig(processes_max=2) as opened:
        pool, path = opened.pool, str(opened.stage.model_path)
        one, other = (beginning * BEGINNING_BYTES for beginning in (b"1", b"2"))
        async with pool.lend(one, None) as reads_one, pool.lend(other, None) as reads_other:
            await reads_one.load(path, "d")
            await reads_other.load(path, "d")
        for _ in range(2):
            for body, process in ((one, reads_one), (other, reads_other)):
                async with pool.lend(body + b"next turn", None) as chosen:
                    assert chosen is process
        async with pool.lend(one, None), pool.lend(one, None) as chosen:
            assert chosen is reads_other, "a body does not wait for the one that knows more"


OWNER = f"""
import asyncio
from baton.clock import SystemClock
from baton_gateway.intake_pool import ProcessPool

async def main():
    pool = ProcessPool(clock=SystemClock(), processes_max=1, waiting_bytes_max=0, command={COMMAND!r})
    async with pool.lend(b"", None) as worker:
        parsed = await worker.parse("text_completion", b'{{"model": "m", "prompt": "hang"}}')
        print(parsed.model, flush=True)
        from baton_gateway.workers import Model
        await worker.plan(
            Model(name="m", path="", digest="", block_tokens=16, context_tokens_max=64), model_defaults=True
        )

asyncio.run(main())
"""


async def test_processes_end_with_their_gateway_even_at_work() -> None:
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, stdout=asyncio.subprocess.PIPE)
    try:
        assert owner.stdout is not None
        assert await owner.stdout.readline() == b"m\n"
        (process,) = psutil.Process(owner.pid).children()
    finally:
        owner.kill()
        await owner.wait()
    async with asyncio.timeout(HANG_S):
        while runs(process):  # noqa: ASYNC110  Nothing tells of the end of another process's child.
            await asyncio.sleep(0.05)
