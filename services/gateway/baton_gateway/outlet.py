"""Bounded buffer between the drivers of one request and its client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from baton_gateway.choice import Piece
from baton_gateway.order import Outcome

TextWriter = Callable[[list[bytes]], bool]
"""Writes an event for each of some texts, which are JSON strings, at once; or returns False and writes none."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a choice: its outcome, or the error that ended it."""

    result: Outcome | Exception


class Outlet:
    """Buffer of one request. `put` never waits.

    A piece that comes while the reader waits and nothing is unread goes to `pass_on` first, which returns whether it
    took the piece: while the client takes all that comes, its reader need not wake up for each token.
    A reader with more than `unread_tokens_max` tokens unread is given up: `on_overflow` is called once. `on_ended` is
    called whenever a choice has ended.
    """

    def __init__(
        self,
        unread_tokens_max: int | None,
        on_overflow: Callable[[], None] = lambda: None,
        pass_on: Callable[[int, Piece], bool] = lambda _choice, _piece: False,
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        self._unread_tokens_max = unread_tokens_max
        self._on_overflow = on_overflow
        self._pass_on = pass_on
        self._on_ended = on_ended
        self.reader_waits = False
        self.items: list[tuple[int, Piece | Ending]] = []
        """What is unread."""
        self.wrote_texts = False
        """Set by each `TextWriter`."""
        self._unread_tokens = 0
        self._overflowed = False
        self._endings = 0
        self._failed = False
        self._filled = asyncio.Event()

    def put(self, choice: int, item: Piece | Ending) -> bool:
        """Add a choice's piece or ending. Return False if the reader was given up."""
        if isinstance(item, Piece):
            if self.reader_waits and not self.items and self._pass_on(choice, item):
                return True
            self._unread_tokens += item.tokens
            if self._unread_tokens_max is not None and self._unread_tokens > self._unread_tokens_max:
                if not self._overflowed:
                    self._overflowed = True
                    self._on_overflow()
                return False
        else:
            self._endings += 1
            self._failed |= isinstance(item.result, Exception)
            self._on_ended()
        self.items.append((choice, item))
        self._filled.set()
        return True

    async def take(self) -> list[tuple[int, Piece | Ending]]:
        """Wait for items, or for `wake_reader`, and return all that have gathered."""
        self.reader_waits = True
        try:
            await self._filled.wait()
        finally:
            self.reader_waits = False
        return self._take()

    def wake_reader(self) -> None:
        self._filled.set()

    async def take_whole(self, choices: int) -> list[tuple[int, Piece | Ending]]:
        """Wait until `choices` choices have ended, or one has failed, and return all items."""
        while self._endings < choices and not self._failed:
            await self._filled.wait()
            self._filled.clear()
        return self._take()

    def take_back(self, choice: int) -> None:
        """Drop a choice's items that have not been taken yet."""
        kept = [(number, item) for number, item in self.items if number != choice]
        self.items = kept
        self._unread_tokens = sum(item.tokens for _, item in kept if isinstance(item, Piece))

    def _take(self) -> list[tuple[int, Piece | Ending]]:
        self._filled.clear()
        items, self.items = self.items, []
        self._unread_tokens = 0
        return items


class ChoiceOutlet:
    """One choice's end of its request's outlet."""

    __slots__ = ("_choice", "_outlet", "by_token", "write_texts")

    def __init__(self, outlet: Outlet, choice: int, *, by_token: bool) -> None:
        """Make an end. `by_token`: each token is a piece of its own."""
        self._outlet = outlet
        self._choice = choice
        self.by_token = by_token
        self.write_texts: TextWriter | None = None

    def put(self, item: Piece | Ending) -> bool:
        return self._outlet.put(self._choice, item)

    def complete(self, outcome: Outcome) -> None:
        self.put(Ending(outcome))

    def take_back(self) -> None:
        self._outlet.take_back(self._choice)


def text_writer(outlet: Outlet, around: tuple[bytes, bytes], write: Callable[..., bool]) -> TextWriter:
    """Return a writer of events with these bytes around their texts. `write`: writes parts, or returns False."""
    before, after = around

    def write_texts(texts: list[bytes]) -> bool:
        # As in `Outlet.put`: what is unread comes first.
        if not outlet.reader_waits or outlet.items:
            return False
        outlet.wrote_texts = True
        return write(*[b"%b%b%b" % (before, text, after) for text in texts])

    return write_texts
