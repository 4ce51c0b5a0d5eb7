"""The counts of `make bench-gateway-tokens`."""

from __future__ import annotations

import pytest

from benchmarks.gateway_tokens import Client, Clients

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = (b'data: {"text":"word"}\n\n', b'data: {"text":"wordword"}\n\n', b"data: {}\n\ndata: [DONE]\n\n")
ANSWER = HEAD + b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in EVENTS) + b"0\r\n\r\n"


@pytest.mark.parametrize("read_bytes", [1, 5, 7, len(ANSWER) - 5, len(ANSWER)])
def test_counts_do_not_depend_on_where_reads_end(read_bytes: int):
    clients = Clients(b"word")
    client = Client(clients, b"")
    for start in range(0, len(ANSWER), read_bytes):
        client.data_received(ANSWER[start : start + read_bytes])
    assert (clients.begun, clients.words, clients.events, clients.ended) == (1, 3, 3, 1)
