"""Clients that never read, beside clients that do, on one gateway process with many open streams."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import socket
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

import httpx

from baton.cli.servers import free_port
from tests.harness.gateway.actors import MODEL
from tests.harness.gateway.process import actors, gateway, wait_ready

STREAMS, STALLED = 200, 20
TOKENS = 80
FILES_MAX = 128
"""Soft limit of open files under which the gateway is started: fewer than there are streams."""


def request(*, stalled: bool) -> bytes:
    # More and longer events, which fill the buffers: twenty log-probabilities make kilobytes of each.
    more = {"logprobs": True, "top_logprobs": 20, "max_tokens": 3 * TOKENS} if stalled else {}
    messages = [{"role": "user", "content": "x"}]
    body = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": TOKENS, "ignore_eos": True, **more}
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n"
    return head.encode() + b"\r\n" + content


async def read(url: str) -> str:
    """Return the text of a stream that is read to its end."""
    where = urlsplit(url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(request(stalled=False))
    answer = (await reader.read()).decode()
    writer.close()
    assert "data: [DONE]" in answer
    events = [json.loads(event) for event in re.findall(r"^data: (\{.*)$", answer, re.MULTILINE)]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


def stall(url: str) -> socket.socket:
    """Send a request, and read nothing."""
    where = urlsplit(url)
    connection = socket.socket()
    # The kernel sizes the sender's buffer by segments, which are of 64 KiB here unless the client asks for short ones.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect((where.hostname, where.port))
    connection.sendall(request(stalled=True))
    return connection


async def test_streams_that_are_not_read_are_cut_off_and_all_others_are_whole(nats_url: str) -> None:
    async with AsyncExitStack() as stack:
        cast = await stack.enter_async_context(actors(nats_url))
        cast.say("abc " * TOKENS, ends=False)
        status_port = free_port()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES_MAX, hard))
        try:
            flags = ("--unread-tokens-max", "16", "--status-port", str(status_port))
            _, url = await stack.enter_async_context(gateway(nats_url, *flags))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await wait_ready(url)
        worker = cast.workers["d1"]
        worker.script.interval_s = 1.0  # All are open before any has ended.
        for _ in range(STALLED):
            stack.callback(stall(url).close)
        reading = [asyncio.create_task(read(url)) for _ in range(STREAMS - STALLED)]
        await cast.wait_for(lambda: len(worker.attempts) == STREAMS)
        worker.script.interval_s = 0.02
        answers = await asyncio.gather(*reading)
        assert len(set(answers)) == 1
        assert ("abc " * TOKENS).startswith(answers[0])
        assert len(answers[0]) > TOKENS / 2
        await cast.wait_for(lambda: not worker.attempts)
        async with httpx.AsyncClient() as client:
            metrics = (await client.get(f"http://127.0.0.1:{status_port}/metrics")).text
        assert f'baton_answers_total{{end="length"}} {STREAMS - STALLED}.0' in metrics
        assert f'baton_answers_total{{end="client_gone"}} {STALLED}.0' in metrics
