"""Requests over NATS: one inbox per connection, which matches each answer to its request.

nats-py has this too, but its requests wait for their whole timeout when the connection is lost.
"""

# nats-py leaves some of its parameters without types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
from math import inf

import nats.errors
from nats.aio.msg import Msg
from nats.js.api import Header

from baton.bus.nats_client import DirectClient
from baton.clock import LATE_S
from baton.errors import BusUnavailable, DeadlineExceeded, NoResponders

_NO_RESPONDERS = "503"


class Requests:
    """The open requests of one connection."""

    def __init__(self, client: DirectClient) -> None:
        self.client = client
        self._inbox = client.new_inbox()
        self._asked = 0
        self._waiting: dict[str, asyncio.Future[Msg | None]] = {}

    async def open(self) -> None:
        await self.client.listen(f"{self._inbox}.*", self._on_answer)

    async def ask(self, subject: str, payload: bytes, timeout_s: float, headers: dict[str, str] | None = None) -> Msg:
        """Return the first answer. Raises NoResponders or BusUnavailable at once, DeadlineExceeded at the timeout."""
        self._asked += 1
        answer_to = f"{self._inbox}.{self._asked}"
        try:
            message = await self._answer(answer_to, timeout_s, subject, payload, answer_to, headers)
        except TimeoutError:
            raise DeadlineExceeded(f"no answer on {subject} within {timeout_s:.3f} s") from None
        if message.headers is not None and message.headers.get(Header.STATUS.value) == _NO_RESPONDERS:
            raise NoResponders(f"the subject {subject} has no subscriber")
        return message

    async def round_trip(self, timeout_s: float) -> None:
        """Return once the server has taken everything sent before. Raises BusUnavailable.

        Sends a message to itself, because nats-py's flush sends its PING ahead of data that is not yet written.
        """
        self._asked += 1
        answer_to = f"{self._inbox}.{self._asked}"
        try:
            await self._answer(answer_to, timeout_s, answer_to, b"", "", None)
        except TimeoutError:
            raise BusUnavailable(f"the message bus does not answer within {timeout_s:.3f} s") from None

    async def _answer(
        self, answer_to: str, timeout_s: float, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None
    ) -> Msg:
        """Publish, and return the first message that arrives at `answer_to`."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Msg | None] = loop.create_future()
        self._waiting[answer_to] = answer
        # Cheaper than `asyncio.timeout`. Publishing, which it does not end, has a limit of its own (`flush_timeout`).
        timer = loop.call_later(timeout_s, _give_up, answer, loop.time() + timeout_s)
        try:
            if not self.client.post(subject, payload, reply, headers):
                await self.client.publish(subject, payload, reply=reply, headers=headers)
            message = await answer
        except (nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"the message bus failed: {error}") from error
        finally:
            timer.cancel()
            del self._waiting[answer_to]
        if message is None:
            raise TimeoutError
        return message

    def fail(self, reason: str) -> None:
        """Fail all open requests: the connection is lost, so no answer can come."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(BusUnavailable(reason))

    def _on_answer(self, message: Msg) -> None:
        answer = self._waiting.get(message.subject)
        if answer is not None and not answer.done():
            answer.set_result(message)


def _give_up(answer: asyncio.Future[Msg | None], due_s: float) -> None:
    if answer.done():
        return
    loop = answer.get_loop()
    if loop.time() - due_s > LATE_S:
        loop.call_later(LATE_S, _give_up, answer, inf)
    else:
        answer.set_result(None)
