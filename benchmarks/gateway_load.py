"""Load on an OpenAI-compatible server, from a process that costs little: reads jobs from stdin, one JSON object a line.

Each connection is an asyncio protocol on a plain socket, which counts events and notes times, and parses nothing.
"""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from random import Random
from typing import Final, cast

import msgspec
import uvloop

HOST: Final = "127.0.0.1"
TEXT: Final = (
    "the value of this function is returned when no other argument was given and all files in path have been read from "
    "it by a process that must not wait for more than one second before each line is written to its output again"
)
WORDS: Final = TEXT.split()
ANSWER: Final = "It returns the value."
PACED: Final = "[paced]"
ANSWER_S: Final = 30.0
"""Time for the last answers."""
QUESTION_WORDS: Final = 20
"""Length of a conversation's second question."""
FIRST_TOKEN: Final = re.compile(rb'"content": ?"[^"]')
STATUS: Final = b"HTTP/1.1 200"
LAST_CHUNK: Final = b"\r\n0\r\n\r\n"
EVENT: Final = b"data: {"
DONE: Final = b"data: [DONE]"
TAIL_BYTES: Final = 64
"""Bytes at the end of an answer that hold `DONE` and the last chunk."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Requests to send: at most `requests_max`, none after `seconds`."""

    port: int
    model: str
    concurrency: int = 1
    rate_per_s: float = 0.0
    """Requests per second at random times, whatever the concurrency; 0: the next follows an answer."""
    requests_max: int = 1_000_000
    seconds: float = 60.0
    words: int = 100
    turn: int = 1
    seed: int = 0
    """Conversations with the same seed are the same: the second turn continues the first."""
    tokens: int = 1
    paced: bool = False
    """Whether engines that can are to send a token each few milliseconds instead of as fast as they can."""
    quick_ack: bool = True
    """False: the kernel may delay acknowledgements, as for most clients."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    answers: int
    wall_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p99_s: float
    """Time between two reads of one answer that brought tokens."""
    reads: int
    """Reads that brought tokens; fewer than tokens where several came together."""
    events: int
    failure: str = ""


def conversation(seed: int, number: int, words: int, turn: int, pace: str = "") -> list[dict[str, str]]:
    """Return the messages of one conversation, which begins like no other."""
    random = Random(f"{seed} {number}")
    messages = [{"role": "user", "content": f"{pace} {seed} {number} " + " ".join(random.choices(WORDS, k=words))}]
    if turn == 2:
        question = " ".join(random.choices(WORDS, k=QUESTION_WORDS))
        messages += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": question}]
    return messages


def request(job: Job, number: int) -> bytes:
    """Return the bytes of one request."""
    content = {
        "model": job.model,
        # The engines read the pace in the prompt: not every peer passes on fields that it does not know.
        "messages": conversation(job.seed, number, job.words, job.turn, PACED if job.paced else ""),
        "max_tokens": job.tokens,
        "stream": True,
        "ignore_eos": True,
    }
    body = msgspec.json.encode(content)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)] if ordered else 0.0


class Run:
    """One job under way, with what its connections saw."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.ttfts_s: list[float] = []
        self.gaps_s: list[float] = []
        self.answers = 0
        self.reads = 0
        self.events = 0
        self.failure = ""
        self._busy: set[Connection] = set()
        """Connections that wait for an answer."""
        self._idle: list[Connection] = []
        self._numbers: Iterator[int] = iter(range(job.requests_max))
        self._until_s = time.perf_counter() + job.seconds
        self._all_answered = asyncio.Event()

    async def go(self) -> None:
        """Send all requests and wait for their answers."""
        try:
            if self.job.rate_per_s:
                await self._send_at_rate()
            else:
                for _ in range(min(self.job.concurrency, self.job.requests_max)):
                    self._send_next(await self._connect())
            while self._busy and not self.failure:
                self._all_answered.clear()
                await self._all_answered.wait()
        finally:
            connections = [*self._busy, *self._idle]
            self._busy, self._idle = set(), []
            for connection in connections:
                connection.close()

    async def _send_at_rate(self) -> None:
        """Send at random times, however many answers are missing."""
        random, due_s = Random(self.job.seed), time.perf_counter()
        while (request := self._next_request()) is not None:
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            connection = self._idle.pop() if self._idle else await self._connect()
            self._send(connection, request, due_s)
            due_s += random.expovariate(self.job.rate_per_s)

    def answered(self, connection: Connection) -> None:
        self.answers += 1
        if self.job.rate_per_s:
            self._rest(connection)
        else:
            self._send_next(connection)

    def lost(self, connection: Connection) -> None:
        """Note that the server closed a connection: a failure if it was to answer."""
        if connection in self._busy:
            connection.fail("a connection was lost")
        elif connection in self._idle:
            self._idle.remove(connection)

    def fail(self, why: str) -> None:
        self.failure = self.failure or why
        self._all_answered.set()

    async def _connect(self) -> Connection:
        create = asyncio.get_running_loop().create_connection
        _, connection = await create(lambda: Connection(self), HOST, self.job.port)
        return connection

    def _send_next(self, connection: Connection) -> None:
        request = self._next_request()
        if request is None:
            self._rest(connection)
        else:
            self._send(connection, request, time.perf_counter())

    def _send(self, connection: Connection, request: bytes, due_s: float) -> None:
        self._busy.add(connection)
        connection.send(request, due_s)

    def _rest(self, connection: Connection) -> None:
        self._busy.discard(connection)
        self._idle.append(connection)
        self._all_answered.set()

    def _next_request(self) -> bytes | None:
        if self.failure or time.perf_counter() > self._until_s:
            return None
        number = next(self._numbers, None)
        return None if number is None else request(self.job, number)


class Connection(asyncio.Protocol):
    """One client, with one request at a time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._socket: socket.socket | None = None
        self._head = b""
        """The answer up to its first token."""
        self._tail = b""
        self._due_s = 0.0
        self._token_s: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._run.job.quick_ack:
            self._socket = transport.get_extra_info("socket")

    def send(self, request: bytes, due_s: float) -> None:
        """Send a request that should have left at `due_s`."""
        self._head = self._tail = b""
        self._token_s = None
        self._due_s = due_s
        self._transport.write(request)

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self._socket is not None:
            # Holds until the kernel next decides for itself, so it is set again for every read.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        run = self._run
        run.events += data.count(EVENT)
        if self._token_s is not None:
            run.gaps_s.append(now_s - self._token_s)
            self._token_s = now_s
            run.reads += 1
        else:
            self._head += data
            if FIRST_TOKEN.search(self._head):
                run.ttfts_s.append(now_s - self._due_s)
                self._token_s = now_s
                run.reads += 1
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self._tail.endswith(LAST_CHUNK):
            if DONE in self._tail and self._token_s is not None:
                run.answered(self)
            else:
                self.fail("an answer has no token or no end")
        elif self._token_s is None and not STATUS.startswith(self._head[: len(STATUS)]):
            self.fail("an answer is an error")

    def connection_lost(self, exc: Exception | None) -> None:
        self._run.lost(self)

    def fail(self, why: str) -> None:
        self._run.fail(f"{why}: {self._head[:300]!r} … {self._tail!r}")


async def carry_out(job: Job) -> Outcome:
    run = Run(job)
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(job.seconds + ANSWER_S):
            await run.go()
    except (OSError, TimeoutError) as error:
        run.fail(repr(error))
    return Outcome(
        answers=run.answers,
        wall_s=time.perf_counter() - began_s,
        ttft_p50_s=percentile(run.ttfts_s, 0.5),
        ttft_p99_s=percentile(run.ttfts_s, 0.99),
        gap_p99_s=percentile(run.gaps_s, 0.99),
        reads=run.reads,
        events=run.events,
        failure=run.failure,
    )


def main() -> None:
    gc.disable()  # A collection would be a pause of every client.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for line in sys.stdin:
            outcome = runner.run(carry_out(msgspec.json.decode(line, type=Job)))
            gc.collect()
            print(msgspec.json.encode(outcome).decode(), flush=True)


if __name__ == "__main__":
    main()
