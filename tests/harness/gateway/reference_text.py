"""The gateway's text path as plainly as it can be written: token by token, and one dictionary for each event.

The gateway's own must give the same bytes; see `tests/unit/test_gateway_text_path.py`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

import msgspec
from baton_gateway.choice import Candidate, LogprobEntry, Piece
from baton_gateway.openai_answers import Format
from baton_gateway.parameters import OutputOptions
from baton_gateway.stop_strings import StopScanner

from baton.messages.attempts import TokenLogprob


class ReferenceText:
    """One choice's text, from a byte-level tokenizer."""

    def __init__(self, token_bytes: Callable[[int], bytes], special: frozenset[int], options: OutputOptions) -> None:
        self._token_bytes = token_bytes
        self._special = special if options.skip_special else frozenset[int]()
        self._options = options
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._scanner = StopScanner(options.stops, include_stop=options.include_stop)
        self.tokens = 0
        self.stopped = False

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], *, ends: bool) -> Piece:
        piece = Piece()
        for at, token in enumerate(tokens):
            if self.stopped:
                break
            self.tokens += 1
            piece.tokens += 1
            if self._options.logprobs and at < len(logprobs):
                chosen = Candidate(token, self._token_bytes(token), logprobs[at].logprob)
                top = tuple(Candidate(other, self._token_bytes(other), at_s) for other, at_s in logprobs[at].top)
                piece.logprobs.append(LogprobEntry(chosen, top))
            if ends and at == len(tokens) - 1:
                break
            if token not in self._special:
                piece.text += self._scan(self._decoder.decode(self._token_bytes(token)))
        piece.stopped = self.stopped
        return piece

    def finish(self) -> Piece:
        if self.stopped:
            return Piece(stopped=True)
        text = self._scan(self._decoder.decode(b"", final=True))
        return Piece(text + ("" if self.stopped else self._scanner.flush()), stopped=self.stopped)

    def _scan(self, text: str) -> str:
        if not text or 0 < self.tokens <= self._options.min_tokens:
            return text
        text, stop = self._scanner.feed(text)
        self.stopped = stop is not None
        return text


def reference_event(shape: Format, choice: int, piece: Piece) -> bytes:
    return b"data: " + msgspec.json.encode(shape.chunk(choice, piece)) + b"\n\n"
