"""Behaviour of a real NATS server only: crash, return, silence, credentials, closed connections."""

# The guard of our client reads the private parts of nats-py that it stands on.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import inspect
import logging
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop
from bus_world import NOT_A_MESSAGE, Inbox, echo, eventually, label_of, message
from nats.aio.client import Client
from nats.aio.subscription import Subscription as ClientSubscription
from nats.aio.transport import TcpTransport
from nats.protocol.parser import Parser

from baton.bus import BusLimits, Delivery, NatsBus
from baton.bus.nats import _NatsSubscription
from baton.bus.nats_client import DirectClient
from baton.bus.nats_requests import Requests
from baton.bus.nats_stream import NatsFollower
from baton.cli.servers import free_port
from baton.errors import BatonError, BusUnavailable, ConfigurationError, DeadlineExceeded, NoResponders
from tests.harness.limits import HANG_S
from tests.harness.servers import Server, start_nats


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server of the test's own for fault injection; no task may be left afterwards."""
    with start_nats() as started:
        yield started
    leftover = asyncio.all_tasks() - {asyncio.current_task()}
    assert not leftover, f"tasks are left after close: {leftover}"


@pytest.fixture
async def connect(server: Server) -> AsyncIterator[Callable[[], Awaitable[NatsBus]]]:
    buses: list[NatsBus] = []

    async def open_bus() -> NatsBus:
        buses.append(await NatsBus.connect(server.url, name="test"))
        return buses[-1]

    yield open_bus
    for bus in buses:
        await bus.close()


Connect = Callable[[], Awaitable[NatsBus]]


async def _restored(bus: NatsBus, subject: str) -> None:
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                await bus.request(subject, message("?"), timeout_s=0.2)
            except BatonError:
                await asyncio.sleep(0.01)
            else:
                return


async def test_a_killed_server_is_reported_and_subscriptions_survive_its_restart(
    server: Server, connect: Connect
) -> None:
    bus, inbox = await connect(), Inbox()
    await bus.subscribe("a.*", echo)
    await bus.subscribe("b", inbox)
    server.kill()
    await eventually(lambda: not bus.connected)
    for call in (
        bus.publish("b", message("lost")),
        bus.request("a.x", message("?"), timeout_s=1),
        bus.subscribe("c", inbox),
        bus.append("S", "s.a", message("x"), message_id="1"),
        bus.follow("S", "s.a", inbox),
        bus.get("b", "k"),
        bus.put("b", "k", message("x"), revision=0),
    ):
        with pytest.raises(BusUnavailable) as raised:
            await call
        assert str(server.port) not in str(raised.value), "a gateway's clients get this text"
    server.start()
    await _restored(bus, "a.x")
    assert bus.reconnects == 1
    await bus.publish("b", message("after"))
    assert await inbox.wait(1) == ["after"]


async def test_a_stream_survives_on_disk_and_a_follower_misses_and_repeats_nothing(
    server: Server, connect: Connect
) -> None:
    bus, inbox = await connect(), Inbox()
    reader = await connect()
    await reader.follow("S", "s.*", inbox)
    stop = asyncio.Event()
    appended = 0

    async def append_on_and_on() -> None:
        nonlocal appended
        while not stop.is_set():
            try:
                await bus.append("S", "s.a", message(appended), message_id=str(appended))
            except BusUnavailable:
                # Not acknowledged: the same id again stores it once, whether or not it had arrived.
                await asyncio.sleep(0.02)
            else:
                appended += 1

    async with asyncio.TaskGroup() as group:
        group.create_task(append_on_and_on())
        for _ in range(3):
            await asyncio.sleep(0.2)
            before = appended
            server.kill()
            await asyncio.sleep(0.1)
            server.start()
            await eventually(lambda before=before: appended > before + 10)
        stop.set()
    assert await inbox.wait(appended) == [str(number) for number in range(appended)]
    assert [delivery.stream_sequence for delivery in inbox.deliveries] == list(range(1, appended + 1))


async def test_a_server_that_forgot_the_stream_gets_it_again(server: Server, connect: Connect) -> None:
    bus, inbox = await connect(), Inbox()
    for number in range(5):
        await bus.append("S", "s.a", message(number), message_id=str(number))
    await bus.follow("S", "s.*", inbox)
    await inbox.wait(5)
    server.kill()
    server.wipe()
    await eventually(lambda: not bus.connected)
    server.start()
    await eventually(lambda: bus.connected)
    assert await bus.append("S", "s.a", message("new"), message_id="n") == 1
    assert (await inbox.wait(6))[-1] == "new"


async def test_many_batches_come_through_one_consumer(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    bus, inbox = await connect(), Inbox()
    appends = (bus.append("S", "s.a", message(number), message_id=str(number)) for number in range(1500))
    await asyncio.gather(*appends)
    with caplog.at_level(logging.DEBUG):
        await bus.follow("S", "s.*", inbox)
        await inbox.wait(1500)
        await bus.append("S", "s.a", message("last"), message_id="last")
        assert (await inbox.wait(1501))[-1] == "last"
    assert [delivery.stream_sequence for delivery in inbox.deliveries] == list(range(1, 1502))
    assert "following" not in caplog.text


async def test_a_malformed_message_in_a_stream_is_counted_and_passed_over(server: Server, connect: Connect) -> None:
    bus, inbox = await connect(), Inbox()
    subscription = await bus.follow("S", "s.*", inbox)
    raw = Client()
    await raw.connect(server.url)
    await raw.jetstream().publish("s.a", NOT_A_MESSAGE)
    await raw.close()
    await bus.append("S", "s.a", message("good"), message_id="1")
    assert await inbox.wait(1) == ["good"]
    assert subscription.counts.malformed == 1


async def test_a_paused_server_costs_a_request_its_deadline_and_no_more(server: Server, connect: Connect) -> None:
    bus = await connect()
    await bus.subscribe("a", echo)
    server.pause()
    try:
        with pytest.raises(DeadlineExceeded):
            await bus.request("a", message("?"), timeout_s=0.1)
    finally:
        server.resume()
    assert label_of(await bus.request("a", message("again"), timeout_s=10)) == "again"


def test_what_a_stalled_server_does_not_take_is_bounded() -> None:
    """On the loop of services: asyncio's own, before Python 3.12.9 and 3.13.2, bounds nothing (CVE-2024-12254)."""

    async def overfill(server: Server) -> None:
        bus = await NatsBus.connect(server.url, name="test")
        server.pause()
        try:
            with pytest.raises(BusUnavailable):
                async with asyncio.timeout(HANG_S):
                    for _ in range(100):
                        await bus.publish("a", message("x" * (4 << 20)))
        finally:
            server.resume()
            await bus.close()

    with start_nats() as server:
        uvloop.run(overfill(server))


async def test_closing_while_the_server_is_down_ends_soon(server: Server, connect: Connect) -> None:
    bus = await connect()
    await bus.subscribe("a", echo)
    await bus.follow("S", "s.a", echo)
    server.kill()
    await eventually(lambda: not bus.connected)
    async with asyncio.timeout(HANG_S):
        await bus.close()


async def test_no_server_is_one_clear_error() -> None:
    with pytest.raises(BusUnavailable, match="cannot be reached"):
        async with asyncio.timeout(HANG_S):
            await NatsBus.connect(f"nats://127.0.0.1:{free_port()}", name="test", timeout_s=0.5)


async def test_connect_waits_for_a_server_that_is_late(server: Server) -> None:
    server.kill()
    connecting = asyncio.create_task(NatsBus.connect(server.url, name="test", timeout_s=HANG_S))
    await asyncio.sleep(0.3)
    server.start()
    bus = await connecting
    await bus.close()


@pytest.mark.parametrize(
    "url",
    ["", "nats://", "http://127.0.0.1:1", "ws://127.0.0.1:1", "nats://127.0.0.1:port", "nats://u:secret@:1"],
)
async def test_what_is_no_address_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        await NatsBus.connect(url, name="test", timeout_s=1)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "right", "wrong"),
    [
        ('authorization { user: "us er", password: "p@ss:word" }', "us%20er:p%40ss%3Aword", "us%20er:secret"),
        ('authorization { token: "t0ken/x" }', "t0ken%2Fx", "secret"),
    ],
)
async def test_credentials_in_the_address(settings: str, right: str, wrong: str) -> None:
    with start_nats(settings=settings) as server:
        host = server.url.removeprefix("nats://")
        bus = await NatsBus.connect(f"nats://{right}@{host}", name="test")
        await bus.subscribe("a", echo)
        await bus.request("a", message("x"), timeout_s=10)
        await bus.close()
        for credentials in (f"{wrong}@", ""):
            with pytest.raises(ConfigurationError, match="uthorization") as raised:
                await NatsBus.connect(f"nats://{credentials}{host}", name="test")
            assert "secret" not in str(raised.value)


async def test_an_address_with_tls_never_sends_credentials_in_plain_text(server: Server) -> None:
    host = server.url.removeprefix("nats://")
    with pytest.raises(ConfigurationError, match="does not require TLS"):
        await NatsBus.connect(f"tls://user:secret@{host}", name="test", timeout_s=HANG_S)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed (Debian, Ubuntu: openssl)")
def test_a_certificate_that_is_not_trusted_is_one_clear_error(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    made = subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], capture_output=True, check=False)
    assert made.returncode == 0, made.stderr.decode()

    async def connect(url: str) -> None:
        async with asyncio.timeout(HANG_S):
            await NatsBus.connect(url, name="test", timeout_s=0.5)

    with (
        start_nats(settings=f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}') as server,
        pytest.raises(BusUnavailable, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        asyncio.run(connect(server.url))


async def test_a_connection_that_the_server_ends_for_good_is_replaced(server: Server, connect: Connect) -> None:
    bus, inbox = await connect(), Inbox()
    await bus.subscribe("a", echo)
    await bus.follow("S", "s.*", inbox)
    # With other credentials in force, the server tells a connection that is up to go, and nats-py gives up on it.
    server.reload("authorization { user: someone, password: else }")
    await eventually(lambda: not bus.connected)
    with pytest.raises(BusUnavailable):
        await bus.publish("a", message("x"))
    server.reload("")
    await _restored(bus, "a")
    await bus.append("S", "s.a", message("after"), message_id="1")
    assert await inbox.wait(1) == ["after"]
    assert bus.reconnects == 1
    with pytest.raises(NoResponders):
        await bus.request("nobody", message("?"), timeout_s=10)


class FailsOnce:
    """A subscription that the first new connection does not get."""

    attached: None = None

    def __init__(self) -> None:
        self.asked = 0

    async def attach(self, requests: Requests) -> None:
        del requests
        self.asked += 1
        if self.asked == 1:
            raise BusUnavailable("lost again")

    async def unsubscribe(self) -> None: ...


async def test_a_replacement_that_fails_is_replaced_once(server: Server, connect: Connect) -> None:
    bus, fails = await connect(), FailsOnce()
    await bus.subscribe("a", echo)
    bus._subscriptions.add(cast("Any", fails))  # pyright: ignore[reportPrivateUsage]
    server.reload("authorization { user: someone, password: else }")
    await eventually(lambda: not bus.connected)
    server.reload("")
    await _restored(bus, "a")
    await eventually(lambda: all(task.get_name() != "bus replace" for task in asyncio.all_tasks()))
    assert (fails.asked, bus.reconnects) == (2, 1), "a second connection would deliver everything twice"


async def test_a_subscription_that_ends_while_the_connection_is_replaced_stays_ended(
    server: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await connect()
    pair = [await bus.subscribe(subject, echo) for subject in ("a", "b")]
    attach, attached = _NatsSubscription.attach, list[object]()

    async def end_the_other(self: _NatsSubscription, requests: Requests) -> None:
        attached.append(self)
        await pair[pair[0] is self].unsubscribe()
        await attach(self, requests)

    monkeypatch.setattr(_NatsSubscription, "attach", end_the_other)
    server.reload("authorization { user: someone, password: else }")
    await eventually(lambda: not bus.connected)
    server.reload("")
    await eventually(lambda: bus.reconnects == 1)
    assert len(attached) == 1, "messages of its group would go to one that does not read them"


async def test_the_payload_limit_is_the_servers() -> None:
    with start_nats(payload_bytes_max=1 << 20) as server:
        bus = await NatsBus.connect(server.url, name="test")
        assert bus.payload_bytes_max == 1 << 20
        await bus.close()


class Answering:
    """Requests that JetStream answers with an empty message."""

    async def ask(self, *_: object) -> SimpleNamespace:
        return SimpleNamespace(data=b"{}")


async def test_a_bug_while_following_is_no_end_of_it(caplog: pytest.LogCaptureFixture) -> None:
    asked = 0

    def current() -> Requests:
        nonlocal asked
        asked += 1
        if asked == 1:
            return cast("Requests", Answering())
        raise ZeroDivisionError("a bug")

    async def ignore(_: Delivery) -> None: ...

    follower = NatsFollower(current, "s", "s.a", ignore, 0, BusLimits(), lambda _: None)
    await follower.start()
    try:
        await eventually(lambda: asked >= 3)
    finally:
        await follower.unsubscribe()
    assert "a bug" in caplog.text


def _with_header(header: bytes) -> bytes:
    return b"HPUB a.x %d %d\r\n%sx\r\n" % (len(header), len(header) + 1, header)


@pytest.mark.parametrize(
    "hostile",
    [
        b"PUB a.\xff 1\r\nx\r\n",
        b"PUB a.x \xff 1\r\nx\r\n",
        _with_header(b"NATS/1.0 \xff\xff\xff\r\n\r\n"),
        _with_header(b"NATS/1.0"),
    ],
    ids=["subject", "reply subject", "status", "header without end"],
)
async def test_bytes_that_are_no_text_end_no_connection(server: Server, connect: Connect, hostile: bytes) -> None:
    bus, inbox = await connect(), Inbox()
    subscription = await bus.subscribe("a.*", inbox)
    host, port = server.url.removeprefix("nats://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b'CONNECT {"verbose":false,"headers":true}\r\n' + hostile + b"PING\r\n")
    await reader.readuntil(b"PONG\r\n")
    await bus.publish("a.b", message("after"))
    assert await inbox.wait(1) == ["after"]
    assert (bus.reconnects, subscription.counts.malformed) == (0, 0 if hostile.startswith(b"HPUB") else 1)
    writer.close()


def test_nats_py_is_the_one_that_our_client_was_written_for() -> None:
    """If this fails, read `baton/bus/nats_client.py` beside nats-py's new source, then renew the digest."""
    methods = (
        "subscribe _attempt_reconnect _connect_to_server _process_headers _process_msg _process_op_err _read_loop "
        "_remove_sub _send_publish _send_command _flush_pending _flusher _send_unsubscribe _parse_header_lines"
    )
    relied_on = (
        *(getattr(Client, name) for name in methods.split()),
        ClientSubscription.unsubscribe,
        Parser,
        TcpTransport,
    )
    source = "".join(map(inspect.getsource, relied_on))
    assert blake2b(source.encode(), digest_size=8).hexdigest() == "5eeca13b57b5dfc0"


class Counting(DirectClient):
    """Counts the messages that take nats-py's way."""

    taken_by_nats_py = 0

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        self.taken_by_nats_py += 1
        await super()._process_msg(sid, subject, reply, data, headers)


async def test_only_the_servers_own_messages_take_the_way_of_nats_py(server: Server) -> None:
    client, received = Counting(), list[tuple[bytes, dict[str, str] | None]]()
    await client.connect(server.url)
    await client.listen("a", lambda message: received.append((message.data, message.headers)))
    await client.flush()
    sent = [(b"plain", None), (b"with headers", {"A": "b", "C": "d: e"}), (b"", {"A": "b"}), (b"plain again", None)]
    for count, (data, headers) in enumerate(sent, 1):
        await client.publish("a", data, headers=headers)
        await eventually(lambda count=count: len(received) == count)
    for data, headers in sent:
        assert client.post("a", data, headers=headers)
    await eventually(lambda: len(received) == 2 * len(sent))
    assert received == [*sent, *sent]
    assert client.taken_by_nats_py == 0
    assert client.post("nobody", b"", "a")
    await eventually(lambda: len(received) == 2 * len(sent) + 1)
    assert (received[-1][1] or {})["Status"] == "503"
    assert client.taken_by_nats_py == 1
    await client.close()
    await asyncio.sleep(0)


async def test_messages_of_one_turn_are_written_at_once(server: Server, connect: Connect) -> None:
    bus, inbox = await connect(), Inbox()
    await bus.subscribe("a", inbox)
    writes: list[int] = []
    transport = cast("Any", bus._client._transport)
    write = transport.writelines

    def count(commands: list[bytes]) -> None:
        writes.append(len(commands))
        write(commands)

    transport.writelines = count
    for label in "abc":
        await bus.publish("a", message(label))
    assert not writes, "nothing leaves before the end of the turn"
    assert await inbox.wait(3) == ["a", "b", "c"]
    assert writes == [3]


async def test_messages_keep_their_order_when_the_socket_is_full(server: Server, connect: Connect) -> None:
    """Some leave at the end of a turn, others by nats-py's task, which waits for the socket."""
    bus, inbox = await connect(), Inbox()
    await bus.subscribe("a", inbox)
    taken: list[bool] = []
    post = bus._client.post

    def note(*message: Any) -> bool:
        taken.append(post(*message))
        return taken[-1]

    cast("Any", bus._client).post = note
    sent: list[str] = []

    async def publish() -> None:
        sent.append(f"{len(sent)} " + "x" * (1 << 18 if len(sent) % 2 else 1))
        await bus.publish("a", message(sent[-1]))
        await asyncio.sleep(0)

    server.pause()
    try:
        while all(taken) and len(sent) < 200:
            await publish()
    finally:
        server.resume()
    assert not all(taken)
    while len(taken) < 20 or not any(taken[-10:]):
        await publish()
    assert await inbox.wait(len(sent)) == sent


async def test_a_server_that_says_nothing_is_named_as_such() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        url = f"nats://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(BusUnavailable, match="cannot be reached: no answer in time"):
            async with asyncio.timeout(HANG_S):
                await NatsBus.connect(url, name="test", timeout_s=0.5)
