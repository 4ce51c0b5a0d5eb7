"""Text of one choice in a model's answer format: parsed behind detokenising and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from baton.messages.attempts import TokenLogprob
from baton_gateway.choice import ChoiceText, Piece, ToolCall
from baton_gateway.detokenise import Vocabulary
from baton_gateway.parameters import OutputOptions
from baton_gateway.parsing.calls import call_id
from baton_gateway.parsing.forced_calls import opening_of
from baton_gateway.parsing.formats import ParsingOptions
from baton_gateway.parsing.parser import AnswerFormat, Parsed


class ParsedText(ChoiceText):
    """Turns tokens into pieces of content, reasoning and tool calls."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        options: OutputOptions,
        prompt: Sequence[int],
        *,
        parsing: ParsingOptions,
        form: AnswerFormat,
        request: str,
    ) -> None:
        """Start a choice. `request`: unique id, from which the ids of calls are made."""
        super().__init__(vocabulary, options, prompt, marks=form.marks)
        self.is_plain = False
        self._parser = form.parser(parsing)
        self._calls_max = None if parsing.parallel else 1
        self._form = form.spec
        self.reasoning_tokens = 0 if form.spec.reasoning else None
        self._shown_tokens = 0
        """Tokens up to the last piece that showed something."""
        self._request = request
        self._opening = opening_of(form.spec.calls) if parsing.or_json and form.spec.calls else ""
        """Beginning of calls, while it is open whether the answer is JSON."""
        self._beginning = ""
        self._is_json = False

    def feed(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob], *, ends: bool) -> Piece:
        piece = super().feed(tokens, logprobs, ends=ends)
        if self._opening:
            self._tell_json(piece, ends=False)
        if piece.text and not self._is_json:
            self._parse(piece, self._parser.feed(piece.text))
        return piece

    def finish(self) -> Piece:
        piece = super().finish()
        if self._opening:
            self._tell_json(piece, ends=True)
        if not self._is_json:
            self._parse(piece, self._parser.finish(piece.text))
        return piece

    def _tell_json(self, piece: Piece, *, ends: bool) -> None:
        """Hold text back until it tells whether the answer is JSON, or ends."""
        self._beginning += piece.text
        piece.text = ""
        begun = self._beginning.lstrip()
        if ends or len(begun) >= len(self._opening):
            self._is_json = not begun.startswith(self._opening)
            self._opening, piece.text = "", self._beginning

    def _parse(self, piece: Piece, parsed: Parsed) -> None:
        piece.text, piece.reasoning, piece.calls_at = parsed.content, parsed.reasoning, parsed.calls_at
        if piece.reasoning and self.reasoning_tokens is not None:
            self.reasoning_tokens += self.tokens - self._shown_tokens
        if piece.reasoning or piece.text or parsed.calls:
            self._shown_tokens = self.tokens
        room = None if self._calls_max is None else self._calls_max - self.calls
        for call in parsed.calls[:room]:
            made = call_id(self._request, self.calls, prefix=self._form.id_prefix, chars=self._form.id_chars)
            piece.calls += (ToolCall(self.calls, call.id or made, call.name, call.arguments),)
            self.calls += 1
