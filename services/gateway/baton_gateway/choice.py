"""Text of one choice: its tokens detokenised, cut at stop strings, counted, with log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton.messages.attempts import TokenLogprob
from baton_gateway.detokenise import Vocabulary
from baton_gateway.parameters import OutputOptions
from baton_gateway.stop_strings import StopScanner


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate token at one position, and its log-probability."""

    id: int
    bytes: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """The chosen token, and the most likely candidates at its position."""

    chosen: Candidate
    top: tuple[Candidate, ...]


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call, whole: clients get it when the model has finished writing it."""

    index: int
    id: str
    name: str
    arguments: str
    """A JSON object."""


class Piece(msgspec.Struct):
    """The part of a choice that some tokens add."""

    text: str = ""
    tokens: int = 0
    logprobs: list[LogprobEntry] = msgspec.field(default_factory=list)
    stopped: bool = False
    """Whether a stop string was found; later tokens are not needed."""
    reasoning: str = ""
    """Text that the model wrote before its answer."""
    calls: tuple[ToolCall, ...] = ()
    ids: tuple[int, ...] = ()
    """The tokens themselves, where the client asked for them."""
    tokens_so_far: int = 0
    """Tokens of the choice up to here, where the client asked for counts."""
    calls_at: int = 0
    """Number of characters of `text` that come before the first of `calls`."""

    @property
    def is_shown(self) -> bool:
        """Whether clients see anything of it."""
        return bool(self.text or self.logprobs or self.reasoning or self.calls or self.ids or self.tokens_so_far)


class ChoiceText:
    """Turns tokens, fed in order, into pieces of text.

    The concatenated pieces depend on the tokens alone, not on how frames grouped them.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        options: OutputOptions,
        prompt: Sequence[int] = (),
        *,
        marks: frozenset[int] = frozenset(),
    ) -> None:
        """Start a choice.

        `prompt`: the tokens that the output continues, or the last of them. `marks`: special tokens that are text.
        """
        self._vocabulary = vocabulary
        self._options = options
        self._detokeniser = vocabulary.detokeniser(skip_special=options.skip_special, prompt=prompt, marks=marks)
        self._scanner = StopScanner(options.stops, include_stop=options.include_stop)
        self._stopped = False
        self.stop = ""
        """The stop string that was found."""
        self._detailed = options.is_detailed
        self.is_plain = not (options.stops or options.is_detailed)
        """Whether `feed_plain` may be used: pieces are the texts of single tokens, and nothing else."""
        self.tokens = 0
        self.calls = 0
        self.reasoning_tokens: int | None = None
        """Tokens of reasoning; None: the model's format has none."""

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], *, ends: bool) -> Piece:
        """Return the piece that `tokens` add. `ends`: the last of them ended the output and is not shown."""
        if self._options.stops:
            return self._feed_until_stop(tokens, logprobs, ends=ends)
        self.tokens += len(tokens)
        if len(tokens) == 1 and not ends:  # As in most frames.
            text = self._detokeniser.feed(tokens[0])
        else:
            text = "".join(map(self._detokeniser.feed, tokens[:-1] if ends else tokens))
        piece = Piece(text, len(tokens))
        if self._detailed:
            self._detail(piece, tokens, logprobs)
        return piece

    def feed_plain(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the texts that the tokens complete, as JSON strings; the same texts as those of `feed`."""
        self.tokens += len(tokens)
        return self._detokeniser.feed_json(tokens)

    def _feed_until_stop(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], *, ends: bool) -> Piece:
        piece = Piece()
        shown: list[str] = []
        for at, token in enumerate(tokens):
            if self._stopped:
                break
            self.tokens += 1
            piece.tokens += 1
            if ends and at == len(tokens) - 1:
                break
            text = self._detokeniser.feed(token)
            if text:
                shown.append(self._scan(text))
        piece.text = "".join(shown)
        piece.stopped = self._stopped
        if self._detailed:
            self._detail(piece, tokens[: piece.tokens], logprobs[: piece.tokens])
        return piece

    def _detail(self, piece: Piece, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Add what the client asked to know of these tokens."""
        if self._options.logprobs:
            piece.logprobs += map(self._entry, tokens, logprobs)
        if self._options.token_ids:
            piece.ids = tuple(tokens)
        if self._options.counts:
            piece.tokens_so_far = self.tokens

    def finish(self) -> Piece:
        """Return the text held back, as the output has ended. A stop string may still become complete here."""
        if self._stopped:
            return Piece(stopped=True)
        text = self._detokeniser.flush()
        text = (self._scan(text) if text else "") + ("" if self._stopped else self._scanner.flush())
        return Piece(text=text, stopped=self._stopped)

    def _scan(self, text: str) -> str:
        # As in vLLM, stop strings do not count within the first `min_tokens` tokens.
        if self.tokens <= self._options.min_tokens and self._options.min_tokens:
            return text
        text, stop = self._scanner.feed(text)
        self._stopped, self.stop = stop is not None, stop or ""
        return text

    def _entry(self, token: int, logprob: TokenLogprob) -> LogprobEntry:
        return LogprobEntry(
            self._candidate(token, logprob.logprob), tuple(self._candidate(*other) for other in logprob.top)
        )

    def _candidate(self, token: int, logprob: float) -> Candidate:
        return Candidate(token, self._vocabulary.token_bytes(token), logprob)
