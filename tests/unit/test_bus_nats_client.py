"""The way from the socket to a receiver: every message once and in order, however the bytes are cut."""

# The parser and its receivers are driven without a connection.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from nats.aio.msg import Msg

from baton.bus.nats_client import DirectClient, DirectReader

# Payloads that look like the protocol, an empty one, and one beyond what is joined here.
PAYLOADS = st.sampled_from([b"", b"x", b"\r\n", b"MSG a 1 3\r\nabc\r\n", b"MSG ", b"+OK\r\n", bytes(100_000)])
# None, a client's, and the server's, which have a status.
HEADERS = st.sampled_from([b"", b"NATS/1.0\r\nA: b\r\n\r\n", b"NATS/1.0 100 Idle Heartbeat\r\nA: b\r\n\r\n"])


def _line(payload: bytes, *, reply: str, headers: bytes) -> bytes:
    size = len(headers) + len(payload)
    if headers:
        return b"HMSG a 1 %s%d %d\r\n%s%s\r\n" % (reply.encode(), len(headers), size, headers, payload)
    return b"MSG a 1 %s%d\r\n%s\r\n" % (reply.encode(), size, payload)


MESSAGES = st.lists(st.tuples(PAYLOADS, st.sampled_from(["", "r "]), HEADERS, st.booleans()), max_size=8)


@given(messages=MESSAGES, data=st.data())
def test_every_message_arrives_once_and_in_order_however_the_bytes_are_cut(
    messages: list[tuple[bytes, str, bytes, bool]], data: st.DataObject
) -> None:
    wire = b""
    for payload, reply, headers, has_ok in messages:
        wire += _line(payload, reply=reply, headers=headers) + (b"+OK\r\n" if has_ok else b"")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    reads = data.draw(st.lists(st.booleans(), min_size=len(cuts), max_size=len(cuts)))

    async def feed() -> list[tuple[bytes, str, str | None, str | None]]:
        client, got = DirectClient(), list[tuple[bytes, str, str | None, str | None]]()

        def receive(message: Msg) -> None:
            headers = message.headers or {}
            got.append((message.data, message.reply, headers.get("A"), headers.get("Status")))

        client._receivers[1] = receive
        reader = DirectReader(client, 1 << 16)
        for begin, end, is_read in zip([0, *cuts], [*cuts, len(wire)], [*reads, True], strict=True):
            reader.feed_data(wire[begin:end])
            while is_read and not reader.is_empty:
                await client._ps.parse(await reader.read(32768))
        return got

    assert asyncio.run(feed()) == [
        (payload, reply.strip(), "b" if headers else None, "100" if b" 100 " in headers else None)
        for payload, reply, headers, _ in messages
    ]
