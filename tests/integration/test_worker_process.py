"""Prefill and decode workers as real processes on real NATS, with the simulated engine; the test plays gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest

from baton import subjects
from baton.blocks import hash_blocks, root_key, split_ids
from baton.bus import Delivery, NatsBus
from baton.messages.attempts import (
    Accepted,
    Acknowledge,
    AttemptState,
    Busy,
    Cancel,
    DecodeTask,
    Digest,
    Frames,
    PrefillTask,
    Resend,
    Sampling,
    TokenChunk,
)
from baton.messages.base import Context, pack_tokens, unpack_tokens
from baton.messages.codec import AnyMessage
from baton.messages.index import BlocksStored, KvEvents, ShadowPage, ShadowQuery
from baton.messages.workers import GatewayBeat, Goodbye, Heartbeat, Role
from tests.harness.fork_server import forked
from tests.harness.limits import HANG_S
from tests.harness.servers import Server, start_nats

PROMPT = [5 + (position * 7919) % 300 for position in range(200)]
SLOW = {"speed": 1.0, "step_fixed_s": 0.02, "prefill_token_s": 0.001, "eos_probability": 0.0, "seed": 1, "blocks": 256}
"""A prompt takes a quarter of a second, a token 20 ms."""
HELD_BACK_S = 1.0
"""Bytes of a pull wait this long at prefill, so that HELD and PULLING can be seen."""


def command(role: Role, nats_url: str, worker: str, *flags: str, options: Mapping[str, object] = SLOW) -> list[str]:
    return [
        *(sys.executable, "-m", f"baton_{role}", "--nats-url", nats_url, "--worker", worker, "--model", "simulated"),
        *("--engine", "simulated", "--engine-options", json.dumps(dict(options))),
        *("--digest-s", "0.1", "--lost-after-s", "1.5", *flags),
    ]


@contextmanager
def worker_process(log: Path, *arguments: str) -> Generator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=forked(os.environ)
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        print(log.read_text())


class Gateway:
    """Speaks to workers as a gateway does, and records their messages."""

    def __init__(self, bus: NatsBus) -> None:
        self.bus = bus
        self.name = f"g-{uuid.uuid4().hex[:8]}"
        self.received: list[AnyMessage] = []
        self.heartbeats: dict[str, Heartbeat] = {}
        self.goodbyes: set[str] = set()
        self.states: dict[tuple[str, str], AttemptState] = {}
        self.outputs: dict[str, dict[int, int]] = {}
        self.ends: dict[str, object] = {}
        self.beats = True
        self._changed = asyncio.Event()

    async def hear(self, delivery: Delivery) -> None:
        match delivery.message:
            case Heartbeat() as beat:
                self.heartbeats[beat.address.worker] = beat
            case Goodbye(address=address):
                self.goodbyes.add(address.worker)
            case Digest(worker=worker, entries=entries):
                for key in [key for key in self.states if key[0] == worker]:
                    del self.states[key]
                self.states |= {(worker, entry.request): entry.state for entry in entries}
            case Frames(frames=frames):
                for frame in frames:
                    output = self.outputs.setdefault(frame.request, {})
                    output |= dict(enumerate(unpack_tokens(frame.tokens), start=frame.index))
                    if frame.finish is not None:
                        self.ends[frame.request] = frame.finish
            case other:
                self.received.append(other)
        self._changed.set()

    async def beat(self) -> None:
        while True:
            if self.beats:
                await self.bus.publish(subjects.GATEWAY_BEAT, GatewayBeat(gateway=self.name))
            await asyncio.sleep(0.3)

    async def until(self, condition: Callable[[], object], *, timeout_s: float = HANG_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def ask(self, worker: str, message: AnyMessage) -> AnyMessage:
        return await self.bus.request(subjects.task(worker), message, timeout_s=2.0)

    async def tell(self, worker: str, message: AnyMessage) -> None:
        await self.bus.publish(subjects.task(worker), message)

    def output(self, request: str) -> list[int]:
        return [token for _, token in sorted(self.outputs.get(request, {}).items())]

    async def until_free(self, *workers: str, timeout_s: float = HANG_S) -> None:
        """Wait for heartbeats, newer than this call, of workers that hold nothing."""
        before = dict(self.heartbeats)

        def free(worker: str) -> bool:
            beat = self.heartbeats[worker]
            return beat is not before[worker] and (beat.attempts, beat.kv_blocks_used, beat.running) == ((), 0, 0)

        await self.until(lambda: all(free(worker) for worker in workers), timeout_s=timeout_s)


def context(request: str, attempt: int = 0, budget_s: float = 30.0) -> Context:
    return Context(request=request, attempt=attempt, budget_s=budget_s)


def decode_task(
    gateway: Gateway,
    request: str,
    *,
    worker: str = "d0",
    source: str | None = "p0",
    tokens: int = 20,
    salt: str = "",
    prompt: list[int] = PROMPT,
) -> DecodeTask:
    return DecodeTask(
        context=context(request),
        gateway=gateway.name,
        generation=gateway.heartbeats[worker].address.generation,
        tokens=pack_tokens(prompt),
        prompt_tokens=len(prompt),
        sampling=Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        cache_salt=salt or request,
        source=gateway.heartbeats[source].address if source else None,
    )


def prefill_task(gateway: Gateway, request: str, *, prompt: list[int] = PROMPT) -> PrefillTask:
    return PrefillTask(
        context=context(request),
        gateway=gateway.name,
        generation=gateway.heartbeats["p0"].address.generation,
        tokens=pack_tokens(prompt),
        prompt_tokens=len(prompt),
        sampling=Sampling(max_tokens=20),
        cache_salt=request,
    )


@pytest.fixture(scope="module")
def server() -> Generator[Server]:
    with start_nats() as server:
        yield server


@pytest.fixture(scope="module")
def pair(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """One prefill and one decode worker for the tests that leave them running."""
    folder = tmp_path_factory.mktemp("pair")
    faults = ("--faults", json.dumps({"delay_s": HELD_BACK_S}))
    with (
        worker_process(folder / "p0.log", *command(Role.PREFILL, server.url, "p0", *faults)),
        worker_process(folder / "d0.log", *command(Role.DECODE, server.url, "d0")),
    ):
        yield


@asynccontextmanager
async def open_gateway(url: str, *workers: str) -> AsyncGenerator[Gateway]:
    bus = await NatsBus.connect(url, name="test")
    gateway = Gateway(bus)
    await bus.subscribe(subjects.HEARTBEAT, gateway.hear)
    await bus.subscribe(subjects.gateway(gateway.name), gateway.hear)
    beating = asyncio.create_task(gateway.beat())
    try:
        await gateway.until(lambda: set(workers) <= gateway.heartbeats.keys())
        yield gateway
    finally:
        beating.cancel()
        await asyncio.wait([beating])
        await bus.close()


@pytest.fixture
async def gateway(pair: None, server: Server) -> AsyncGenerator[Gateway]:
    async with open_gateway(server.url, "p0", "d0") as gateway:
        yield gateway
        await gateway.until_free("p0", "d0")


async def start_attempt(gateway: Gateway, request: str, *, tokens: int = 20) -> None:
    answers = await asyncio.gather(
        gateway.ask("p0", prefill_task(gateway, request)),
        gateway.ask("d0", decode_task(gateway, request, tokens=tokens)),
    )
    assert all(isinstance(answer, Accepted) for answer in answers), answers


async def test_handed_over_output_equals_aggregated_output(gateway: Gateway) -> None:
    await start_attempt(gateway, "handed")
    await gateway.ask("d0", decode_task(gateway, "whole", source=None))
    await gateway.until(lambda: {"handed", "whole"} <= gateway.ends.keys())
    assert len(gateway.output("handed")) == 20
    assert gateway.output("handed") == gateway.output("whole")
    finish = gateway.ends["handed"]
    assert getattr(finish, "usage").computed_tokens == 1  # noqa: B009
    for worker, request in (("p0", "handed"), ("d0", "handed"), ("d0", "whole")):
        await gateway.tell(worker, Acknowledge(context=context(request)))


@pytest.mark.parametrize(
    ("worker", "state"),
    [
        ("p0", AttemptState.COMPUTING),
        ("p0", AttemptState.HELD),
        ("d0", AttemptState.PULLING),
        ("d0", AttemptState.RUNNING),
        ("d0", AttemptState.RETAINED),
    ],
)
async def test_a_cancel_in_any_state_frees_both_sides(gateway: Gateway, worker: str, state: AttemptState) -> None:
    request = f"cancel-{state}"
    await start_attempt(gateway, request, tokens=5 if state is AttemptState.RETAINED else 500)
    await gateway.until(lambda: gateway.states.get((worker, request)) is state)
    for name in ("p0", "d0"):
        await gateway.tell(name, Cancel(context=context(request)))
    await gateway.until_free("p0", "d0")
    refusals = await asyncio.gather(
        gateway.ask("p0", prefill_task(gateway, request)), gateway.ask("d0", decode_task(gateway, request))
    )
    assert [refusal.reason for refusal in refusals if isinstance(refusal, Busy)] == ["tombstone", "tombstone"]


async def test_a_cancel_before_its_task(gateway: Gateway) -> None:
    await gateway.tell("d0", Cancel(context=context("early")))
    refusal = await gateway.ask("d0", decode_task(gateway, "early", source=None))
    assert isinstance(refusal, Busy)
    assert refusal.reason == "tombstone"


async def test_lost_frames_are_sent_again_until_acknowledged(gateway: Gateway) -> None:
    await gateway.ask("d0", decode_task(gateway, "lossy", source=None))
    await gateway.until(lambda: gateway.states.get(("d0", "lossy")) is AttemptState.RETAINED)
    whole = gateway.output("lossy")
    assert len(whole) == 20
    gateway.outputs.clear()
    gateway.ends.clear()
    await gateway.tell("d0", Resend(context=context("lossy"), index=7))
    await gateway.until(lambda: "lossy" in gateway.ends)
    assert gateway.outputs["lossy"] == dict(list(enumerate(whole))[7:])
    await gateway.tell("d0", Acknowledge(context=context("lossy")))
    await gateway.until(lambda: ("d0", "lossy") not in gateway.states)


async def test_what_belongs_to_a_silent_gateway_is_aborted(gateway: Gateway) -> None:
    await start_attempt(gateway, "silent", tokens=1000)
    await gateway.until(lambda: gateway.states.get(("d0", "silent")) is AttemptState.RUNNING)
    gateway.beats = False
    await gateway.until_free("p0", "d0")
    assert "silent" not in gateway.ends
    gateway.beats = True


async def test_a_prompt_in_chunks_runs(gateway: Gateway) -> None:
    task = decode_task(gateway, "chunks", source=None)
    await gateway.tell("d0", TokenChunk(context=task.context, offset=0, tokens=pack_tokens(PROMPT[:150])))
    tail = decode_task(gateway, "chunks", source=None, prompt=PROMPT[150:])
    joined = DecodeTask(
        context=task.context,
        gateway=task.gateway,
        generation=task.generation,
        tokens=tail.tokens,
        prompt_tokens=len(PROMPT),
        sampling=task.sampling,
        cache_salt="chunks",
    )
    assert isinstance(await gateway.ask("d0", joined), Accepted)
    await gateway.until(lambda: "chunks" in gateway.ends)
    assert len(gateway.output("chunks")) == 20
    await gateway.tell("d0", Acknowledge(context=task.context))


async def test_kv_events_and_resync_name_the_blocks_of_the_prompt(gateway: Gateway) -> None:
    digest = gateway.heartbeats["d0"].model_digest
    expected = split_ids(hash_blocks(root_key(digest, salt="events"), pack_tokens(PROMPT), 32))
    stored: set[bytes] = set()

    async def take(delivery: Delivery) -> None:
        assert isinstance(delivery.message, KvEvents)
        for event in delivery.message.events:
            if isinstance(event, BlocksStored):
                stored.update(split_ids(event.blocks))
        await gateway.hear(delivery)

    await gateway.bus.follow(subjects.KV_STREAM, subjects.kv_events("d0"), take)
    await gateway.ask("d0", decode_task(gateway, "events", source=None))
    await gateway.until(lambda: set(expected) <= stored)
    held: list[bytes] = []
    cursor = 0
    while True:
        page = await gateway.bus.request(subjects.shadow("d0"), ShadowQuery(cursor=cursor), timeout_s=2.0)
        assert isinstance(page, ShadowPage)
        held += [block for run in page.runs for block in split_ids(run.blocks)]
        if not (cursor := page.next_cursor):
            break
    assert set(expected) <= set(held)
    assert len(held) == len(set(held))
    await gateway.tell("d0", Cancel(context=context("events")))


async def test_sigterm_drains(server: Server, tmp_path: Path) -> None:
    with worker_process(tmp_path / "log", *command(Role.DECODE, server.url, "drains")) as process:
        async with open_gateway(server.url, "drains") as gateway:
            await gateway.ask("drains", decode_task(gateway, "last", worker="drains", source=None, tokens=50))
            await gateway.until(lambda: gateway.states.get(("drains", "last")) is AttemptState.RUNNING)
            process.send_signal(signal.SIGTERM)
            await gateway.until(lambda: gateway.heartbeats["drains"].draining)
            refusal = await gateway.ask("drains", decode_task(gateway, "late", worker="drains", source=None))
            assert isinstance(refusal, Busy)
            assert refusal.reason == "draining"
            await gateway.until(lambda: "last" in gateway.ends)
            assert len(gateway.output("last")) == 50
            await gateway.tell("drains", Acknowledge(context=context("last")))
            await gateway.until(lambda: "drains" in gateway.goodbyes)
        assert await asyncio.to_thread(process.wait, 5.0) == 0


async def test_kill_9_leaves_no_child_and_the_next_start_has_a_higher_generation(
    server: Server, tmp_path: Path
) -> None:
    arguments = command(Role.PREFILL, server.url, "dies")
    with worker_process(tmp_path / "first", *arguments) as process:
        async with open_gateway(server.url, "dies") as gateway:
            first = gateway.heartbeats["dies"].address.generation
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
            gone, alive = await asyncio.to_thread(psutil.wait_procs, children, 3.0)
            assert not alive, gone
            with worker_process(tmp_path / "second", *arguments):
                await gateway.until(lambda: gateway.heartbeats["dies"].address.generation > first)


async def test_a_worker_survives_a_restart_of_the_bus(tmp_path: Path) -> None:
    with start_nats() as nats, worker_process(tmp_path / "log", *command(Role.DECODE, nats.url, "survives")) as process:
        async with open_gateway(nats.url, "survives"):
            pass
        nats.kill()
        await asyncio.sleep(1.0)
        nats.start()
        async with open_gateway(nats.url, "survives") as gateway:
            await gateway.ask("survives", decode_task(gateway, "after", worker="survives", source=None))
            await gateway.until(lambda: "after" in gateway.ends)
            # Now the messages arrive that the stream could not store meanwhile.
            await gateway.until(lambda: gateway.heartbeats["survives"].events_sequence >= 3)
        assert process.poll() is None


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model", ""], "there is no model: give the folder of one with --model"),
        (["--colour", "red"], "the setting --colour is unknown"),
        (["--engine-options", '{"block_tokens": 48}'], "must be a multiple or a divisor"),
        (["--slots", "1000"], "slots is 1000, but the engine runs 64"),
    ],
)
def test_a_start_that_cannot_be_ends_with_one_sentence(server: Server, flags: list[str], sentence: str) -> None:
    done = subprocess.run(
        [*command(Role.DECODE, server.url, "wrong"), *flags],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("baton-decode: ")
    assert sentence in last
    assert "Traceback" not in done.stderr
