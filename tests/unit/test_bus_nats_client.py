"""The way from the socket to a receiver: every message once and in order, however the bytes are cut."""

# The parser and its receivers are driven without a connection.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from baton.bus.nats_client import DirectClient, DirectReader

# Payloads that look like the protocol, an empty one, and one beyond what is joined here.
PAYLOADS = st.sampled_from([b"", b"x", b"\r\n", b"MSG a 1 3\r\nabc\r\n", b"MSG ", b"+OK\r\n", bytes(100_000)])
HEADER = b"NATS/1.0\r\nA: b\r\n\r\n"


def _line(payload: bytes, *, reply: str, has_header: bool) -> bytes:
    if has_header:
        return b"HMSG a 1 %s%d %d\r\n%s%s\r\n" % (
            reply.encode(),
            len(HEADER),
            len(HEADER) + len(payload),
            HEADER,
            payload,
        )
    return b"MSG a 1 %s%d\r\n%s\r\n" % (reply.encode(), len(payload), payload)


MESSAGES = st.lists(st.tuples(PAYLOADS, st.sampled_from(["", "r "]), st.booleans(), st.booleans()), max_size=8)


@given(messages=MESSAGES, data=st.data())
def test_every_message_arrives_once_and_in_order_however_the_bytes_are_cut(
    messages: list[tuple[bytes, str, bool, bool]], data: st.DataObject
) -> None:
    wire = b""
    for payload, reply, has_header, has_ok in messages:
        wire += _line(payload, reply=reply, has_header=has_header) + (b"+OK\r\n" if has_ok else b"")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    reads = data.draw(st.lists(st.booleans(), min_size=len(cuts), max_size=len(cuts)))

    async def feed() -> list[tuple[bytes, str, bool]]:
        client, got = DirectClient(), list[tuple[bytes, str, bool]]()
        client._receivers[1] = lambda message: got.append((message.data, message.reply, bool(message.headers)))
        reader = DirectReader(client, 1 << 16)
        for begin, end, is_read in zip([0, *cuts], [*cuts, len(wire)], [*reads, True], strict=True):
            reader.feed_data(wire[begin:end])
            while is_read and not reader.is_empty:
                await client._ps.parse(await reader.read(32768))
        return got

    assert asyncio.run(feed()) == [(payload, reply.strip(), header) for payload, reply, header, _ in messages]
