"""One behaviour suite for every bus, in memory and on a real NATS server: core subjects."""

from __future__ import annotations

import asyncio
import logging

import pytest
from bus_world import NOT_A_MESSAGE, Inbox, World, echo, eventually, label_of, message, sized

from baton.bus import BusLimits, Delivery
from baton.errors import (
    BusUnavailable,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NoResponders,
    PayloadTooLarge,
)
from baton.messages.attempts import TokenChunk
from baton.messages.base import Refused
from baton.messages.codec import decode
from tests.harness.limits import HANG_S


async def test_messages_arrive_in_order_and_whole(world: World, name: str) -> None:
    sender, receiver, inbox = await world.open(), await world.open(), Inbox()
    await receiver.subscribe(f"{name}.a", inbox)
    for number in range(2000):
        await sender.publish(f"{name}.a", message(number))
    assert await inbox.wait(2000) == [str(number) for number in range(2000)]
    assert inbox.deliveries[0].subject == f"{name}.a"
    assert inbox.deliveries[0].stream_sequence == 0
    await inbox.deliveries[0].respond(message("nobody asked"))


async def test_every_subscription_gets_a_copy_and_other_subjects_none(world: World, name: str) -> None:
    bus, first, second, other = await world.open(), Inbox(), Inbox(), Inbox()
    await bus.subscribe(f"{name}.a", first)
    await bus.subscribe(f"{name}.a", second)
    await bus.subscribe(f"{name}.b", other)
    await bus.publish(f"{name}.a", message("x"))
    await bus.publish(f"{name}.b", message("end"))
    assert await other.wait(1) == ["end"]
    assert await first.wait(1) == await second.wait(1) == ["x"]


async def test_a_star_stands_for_exactly_one_part(world: World, name: str) -> None:
    bus, inbox = await world.open(), Inbox()
    await bus.subscribe(f"{name}.*.task", inbox)
    for subject in ("a.task", "a.b.task", "task", "a.other", "b.task"):
        await bus.publish(f"{name}.{subject}", message(subject))
    assert await inbox.wait(2) == ["a.task", "b.task"]
    assert inbox.deliveries[1].subject == f"{name}.b.task"


async def test_a_group_shares_messages(world: World, name: str) -> None:
    bus, members, outside = await world.open(), [Inbox(), Inbox(), Inbox()], Inbox()
    for member in members:
        await (await world.open()).subscribe(f"{name}.a", member, group="workers")
    await bus.subscribe(f"{name}.a", outside)
    for number in range(300):
        await bus.publish(f"{name}.a", message(number))
    await outside.wait(300)
    await eventually(lambda: sum(len(member.deliveries) for member in members) == 300)
    together = sorted((label for member in members for label in member.labels), key=int)
    assert together == [str(number) for number in range(300)]
    assert all(member.deliveries for member in members)


async def test_a_request_is_answered(world: World, name: str) -> None:
    asker, answerer = await world.open(), await world.open()
    await answerer.subscribe(f"{name}.a", echo)
    answers = await asyncio.gather(*(asker.request(f"{name}.a", message(n), timeout_s=10) for n in range(100)))
    assert [label_of(answer) for answer in answers] == [str(number) for number in range(100)]


async def test_a_request_without_a_subscriber_fails_at_once(world: World, name: str) -> None:
    bus = await world.open()
    with pytest.raises(NoResponders):
        await bus.request(f"{name}.a", message("?"), timeout_s=3600.0)


async def test_a_request_without_answer_ends_at_its_deadline(world: World, name: str) -> None:
    bus = await world.open()
    await bus.subscribe(f"{name}.a", Inbox())
    with pytest.raises(DeadlineExceeded):
        await bus.request(f"{name}.a", message("?"), timeout_s=0.05)
    with pytest.raises(DeadlineExceeded):
        await bus.request(f"{name}.a", message("?"), timeout_s=0)


async def test_an_answer_after_the_deadline_is_ignored(world: World, name: str) -> None:
    bus = await world.open()

    async def late(delivery: Delivery) -> None:
        await asyncio.sleep(0.1)
        await delivery.respond(message("late"))

    await bus.subscribe(f"{name}.a", late)
    with pytest.raises(DeadlineExceeded):
        await bus.request(f"{name}.a", message("?"), timeout_s=0.02)
    await asyncio.sleep(0.15)
    assert label_of(await bus.request(f"{name}.a", message("?"), timeout_s=10)) == "late"


async def test_handlers_run_one_at_a_time(world: World, name: str) -> None:
    bus, done = await world.open(), Inbox()
    running = 0
    most_running = 0

    async def slow(delivery: Delivery) -> None:
        nonlocal running, most_running
        running += 1
        most_running = max(most_running, running)
        await asyncio.sleep(0.002)
        running -= 1
        await done(delivery)

    await bus.subscribe(f"{name}.a", slow)
    for number in range(20):
        await bus.publish(f"{name}.a", message(number))
    assert await done.wait(20) == [str(number) for number in range(20)]
    assert most_running == 1


async def test_a_slow_handler_loses_its_own_messages_only_and_counts_them(world: World, name: str) -> None:
    sender, bus = await world.open(), await world.open(limits=BusLimits(pending_messages_max=10))
    started, gate, slow_inbox, quick_inbox = asyncio.Event(), asyncio.Event(), Inbox(), Inbox()

    async def slow(delivery: Delivery) -> None:
        started.set()
        await gate.wait()
        await slow_inbox(delivery)

    slow_one = await bus.subscribe(f"{name}.a", slow)
    quick_one = await bus.subscribe(f"{name}.b", quick_inbox)
    await sender.publish(f"{name}.a", message(0))
    await started.wait()
    for number in range(1, 50):
        await sender.publish(f"{name}.a", message(number))
    await sender.publish(f"{name}.b", message("quick"))
    assert await quick_inbox.wait(1) == ["quick"]
    gate.set()
    # One was running and ten waited: what came first is kept.
    assert await slow_inbox.wait(11) == [str(number) for number in range(11)]
    assert slow_one.counts.dropped == 39
    assert quick_one.counts.dropped == 0
    await sender.publish(f"{name}.a", message("after"))
    assert (await slow_inbox.wait(12))[-1] == "after"


async def test_waiting_bytes_are_bounded_as_well(world: World, name: str) -> None:
    sender, bus = await world.open(), await world.open(limits=BusLimits(pending_bytes_max=100_000))
    started, gate = asyncio.Event(), asyncio.Event()
    got = 0

    async def slow(_: Delivery) -> None:
        nonlocal got
        started.set()
        await gate.wait()
        got += 1

    subscription = await bus.subscribe(f"{name}.a", slow)
    await sender.publish(f"{name}.a", sized(30_000))
    await started.wait()
    for _ in range(6):
        await sender.publish(f"{name}.a", sized(30_000))
    await eventually(lambda: subscription.counts.dropped >= 3)
    gate.set()
    await eventually(lambda: got >= 4)
    assert subscription.counts.dropped == 3


async def test_malformed_payloads_are_counted_and_refused(world: World, name: str) -> None:
    bus, inbox = await world.open(), Inbox()
    subscription = await bus.subscribe(f"{name}.a", inbox)
    await world.send_raw(f"{name}.a", NOT_A_MESSAGE)
    await world.send_raw(f"{name}.a", b"")
    refusal = decode(await world.request_raw(f"{name}.a", NOT_A_MESSAGE))
    assert isinstance(refusal, Refused)
    assert refusal.error.code == "malformed_message"
    await bus.publish(f"{name}.a", message("good"))
    assert await inbox.wait(1) == ["good"]
    assert subscription.counts.malformed == 3
    assert subscription.counts.dropped == 0
    assert subscription.counts.handled == 1
    assert [each.subject for each in bus.subscriptions] == [f"{name}.a"]
    await subscription.unsubscribe()
    assert not bus.subscriptions


async def test_a_failing_handler_is_logged_and_the_next_message_handled(
    world: World, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    bus, inbox = await world.open(), Inbox()

    async def fails_once(delivery: Delivery) -> None:
        if label_of(delivery.message) == "bad":
            raise KeyError("a bug")
        await inbox(delivery)

    await bus.subscribe(f"{name}.a", fails_once)
    with caplog.at_level(logging.ERROR):
        await bus.publish(f"{name}.a", message("bad"))
        await bus.publish(f"{name}.a", message("good"))
        assert await inbox.wait(1) == ["good"]
    assert "a bug" in caplog.text
    assert "'bad'" in caplog.text


@pytest.mark.parametrize(
    ("error", "code"), [(ModelNotFound("no such model"), "model_not_found"), (KeyError("a bug"), "internal_error")]
)
async def test_who_asks_a_failing_handler_is_refused(world: World, name: str, error: Exception, code: str) -> None:
    bus = await world.open()

    async def fails(_: Delivery) -> None:
        raise error

    await bus.subscribe(f"{name}.a", fails)
    refusal = await bus.request(f"{name}.a", message("?"), timeout_s=10)
    assert isinstance(refusal, Refused)
    assert refusal.error.code == code


async def test_what_is_too_large_is_refused_and_what_just_fits_arrives(world: World, name: str) -> None:
    bus = await world.open()
    assert bus.payload_bytes_max == 8 << 20
    got: list[int] = []

    async def measure(delivery: Delivery) -> None:
        assert isinstance(delivery.message, TokenChunk)
        got.append(len(delivery.message.tokens))
        await delivery.respond(message("ok"))

    await bus.subscribe(f"{name}.a", measure)
    for call in (
        bus.publish(f"{name}.a", sized(8 << 20)),
        bus.request(f"{name}.a", sized(8 << 20), timeout_s=10),
        bus.append(f"{name}-s", f"{name}.s.a", sized(8 << 20), message_id="1"),
    ):
        with pytest.raises(PayloadTooLarge):
            await call
    await bus.request(f"{name}.a", sized((8 << 20) - 100), timeout_s=5)
    assert got == [(8 << 20) - 100]


@pytest.mark.parametrize("subject", ["", "a..b", ".a", "a.", "a b", "a.*", "a.>", "a\r\nPUB b 0", "ä.b", "a*.b"])
async def test_what_is_no_subject_is_refused(world: World, subject: str) -> None:
    bus = await world.open()
    with pytest.raises(InvalidRequest):
        await bus.publish(subject, message("x"))
    with pytest.raises(InvalidRequest):
        await bus.request(subject, message("x"), timeout_s=10)
    with pytest.raises(InvalidRequest):
        await bus.append("s", subject, message("x"), message_id="1")
    if subject != "a.*":
        with pytest.raises(InvalidRequest):
            await bus.subscribe(subject, Inbox())


async def test_unsubscribe_waits_until_what_came_is_handled_and_ends_deliveries(world: World, name: str) -> None:
    bus, inbox = await world.open(), Inbox()
    started = asyncio.Event()

    async def slow(delivery: Delivery) -> None:
        started.set()
        await asyncio.sleep(0.03)
        await inbox(delivery)

    subscription = await bus.subscribe(f"{name}.a", slow)
    for number in range(3):
        await bus.publish(f"{name}.a", message(number))
    await asyncio.wait_for(started.wait(), HANG_S)
    await subscription.unsubscribe()
    assert inbox.labels == ["0", "1", "2"]
    await bus.publish(f"{name}.a", message("later"))
    await asyncio.sleep(0.05)
    assert inbox.labels == ["0", "1", "2"]
    await subscription.unsubscribe()
    with pytest.raises(NoResponders):
        await bus.request(f"{name}.a", message("?"), timeout_s=10)


async def test_a_member_that_leaves_its_group_under_load_loses_no_request(world: World, name: str) -> None:
    asker, subject = await world.open(), f"{name}.a"
    members = [await (await world.open()).subscribe(subject, echo, group="g") for _ in range(2)]

    async def ask(number: int) -> str:
        return label_of(await asker.request(subject, message(number), timeout_s=10))

    answers = [asyncio.create_task(ask(number)) for number in range(200)]
    await asyncio.sleep(0)
    await members[0].unsubscribe()
    assert await asyncio.gather(*answers) == [str(number) for number in range(200)]


async def test_unsubscribe_cancels_a_handler_that_does_not_end(world: World, name: str) -> None:
    bus = await world.open(limits=BusLimits(handler_grace_s=0.05))
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def stuck(_: Delivery) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    subscription = await bus.subscribe(f"{name}.a", stuck)
    await bus.publish(f"{name}.a", message("x"))
    await asyncio.wait_for(started.wait(), HANG_S)
    await subscription.unsubscribe()
    assert cancelled.is_set()


async def test_a_handler_may_end_its_own_subscription(world: World, name: str) -> None:
    bus, inbox = await world.open(), Inbox()

    async def once(delivery: Delivery) -> None:
        await subscription.unsubscribe()
        await asyncio.sleep(0)
        await inbox(delivery)

    subscription = await bus.subscribe(f"{name}.a", once)
    await bus.publish(f"{name}.a", message(1))
    await bus.publish(f"{name}.a", message(2))
    await inbox.wait(1)
    await asyncio.sleep(0.05)
    assert inbox.labels == ["1"]


async def test_a_closed_bus_says_so(world: World, name: str) -> None:
    bus = await world.open()
    await bus.subscribe(f"{name}.a", echo)
    await bus.close()
    await bus.close()
    for call in (
        bus.publish(f"{name}.a", message("x")),
        bus.request(f"{name}.a", message("x"), timeout_s=10),
        bus.subscribe(f"{name}.a", echo),
        bus.append(f"{name}-s", f"{name}.s.a", message("x"), message_id="1"),
        bus.follow(f"{name}-s", f"{name}.s.a", echo),
    ):
        with pytest.raises(BusUnavailable):
            await call


async def test_close_sends_what_was_published(world: World, name: str) -> None:
    sender, receiver, inbox = await world.open(), await world.open(), Inbox()
    await receiver.subscribe(f"{name}.a", inbox)
    for number in range(500):
        await sender.publish(f"{name}.a", message(number))
    await sender.close()
    assert len(await inbox.wait(500)) == 500


async def test_a_subscription_hears_everything_from_its_first_moment(world: World, name: str) -> None:
    sender, receiver = await world.open(), await world.open()
    for number in range(200):
        inbox = Inbox()
        subscription = await receiver.subscribe(f"{name}.{number}", inbox)
        for label in range(3):
            await sender.publish(f"{name}.{number}", message(label))
        assert await inbox.wait(3) == ["0", "1", "2"]
        await subscription.unsubscribe()
