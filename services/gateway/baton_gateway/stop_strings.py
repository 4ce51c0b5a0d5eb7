"""Search for stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Passes text on, but holds back a possible start of a stop string; ends at the first complete stop string.

    "First" is the one completed first, and the longest of those completed by the same character, so the
    result depends on the text alone and never on how it was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held: str = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that can be shown now, and the stop string if one was found."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, _, stop = min(found)
            self._held = ""
            return text[: end if self._include_stop else end - len(stop)], stop
        kept = self._kept_chars(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], None

    def flush(self) -> str:
        """Return the text held back: the output has ended, so no stop string can be completed."""
        held, self._held = self._held, ""
        return held

    def _kept_chars(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that begins a stop string."""
        kept = 0
        for stop in self._stops:
            for chars in range(min(len(text), len(stop) - 1), kept, -1):
                if stop.startswith(text[-chars:]):
                    kept = chars
                    break
        return kept
