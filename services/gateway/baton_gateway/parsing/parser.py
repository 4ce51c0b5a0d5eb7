"""Incremental parser: the text of one answer split into reasoning, content and tool calls.

`transformers`' `ResponseParser` finds the regions. It gets templates whose regions are plain text, so that no text is
an error to it; what is in a region is read here when the region ends.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

import msgspec

from baton.errors import ConfigurationError
from baton_gateway.parsing.calls import MALFORMED, Call, calls_of
from baton_gateway.parsing.formats import FormatName, FormatSpec, ParsingOptions, find_format, own_format
from baton_gateway.parsing.python_calls import python_calls

log = logging.getLogger(__name__)

THINKING: Final = "thinking"
CALLS: Final = "tool_calls"
CONTENT: Final = "content"
REST: Final = "rest"
"""Text outside all marks, in formats whose regions all have marks that open them; it is content."""
PREFIX_CHARS_MAX: Final = 4096
"""Longest beginning of an answer in the prompt that is parsed."""
SPACE: Final = r"\s{0,4}"
"""White space beside a mark, which belongs to no region; more of it is rare, and would have to be held back."""
TAIL_CHARS: Final = 64
"""Longest text that ends a call, with white space after it."""
_MARKS: Final = ("open", "open_pattern", "close", "close_pattern")


class Parsed(msgspec.Struct):
    """The parts that a text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = msgspec.field(default_factory=list[Call])
    calls_at: int = 0
    """Number of characters of `content` that come before the first of `calls`."""


class AnswerFormat:
    """A format, ready to parse answers. Immutable; shared by all requests of a model."""

    def __init__(self, spec: FormatSpec, special: Mapping[int, str] | None = None) -> None:
        """Compile a format. Raises ConfigurationError if its template is malformed.

        `special`: spellings of the model's special tokens.
        """
        # Imported here because the import takes seconds, and the gateway answers meanwhile.
        from transformers.utils import chat_parsing

        self.spec = spec
        self._library = cast("Any", chat_parsing)
        load, template = self._library.response_templates.load_response_template, spec.response_template
        try:
            loaded = load(template)
            self._with_tools = load(_regions(template, (THINKING, CALLS, CONTENT)))
            self._without_tools = load(_regions(template, (THINKING, CONTENT)))
            tags = _argument_pattern(loaded.fields.get(CALLS))
        except (ValueError, TypeError, KeyError, re.error) as error:
            raise ConfigurationError(f"the answer format `{spec.name}` is malformed: {error}") from error
        self._anchor = loaded.start_anchor_re
        self._calls = loaded.fields.get(CALLS)
        self._argument = tags
        """Pattern of one argument, in formats with all arguments as text."""
        self.closing = next(iter(_literals(template["fields"].get(CALLS, {}).get("close"))), "")
        """Text that ends a call; empty if a pattern does."""
        self.marks = _marks(template, special or {})
        """Special tokens that mark regions: they must reach the parser."""

    def prefix_of(self, prompt: str) -> str:
        """Return the beginning of the answer that the prompt already has, such as `<think>`."""
        tail, start = prompt[-PREFIX_CHARS_MAX:], None
        for anchor in self._anchor.finditer(tail):
            start = anchor.end()
        return "" if start is None else tail[start:]

    @property
    def writes_text(self) -> bool:
        """Whether all arguments are written as text, so that the tools' schemas tell their types."""
        return self._argument is not None

    def parser(self, options: ParsingOptions) -> AnswerParser:
        template = self._with_tools if options.tools else self._without_tools
        # White space at its end would come out as content of the answer.
        parser = self._library.ResponseParser(template, prefix=options.prefix.rstrip())
        return AnswerParser(self, parser, options)

    def end_of_call(self, body: str) -> int:
        """Return where the text after a call begins, in formats without a mark that ends calls."""
        if self.closing or self.writes_text or self.spec.is_python:
            return len(body)
        begin = len(body) - len(body.lstrip())
        try:
            return json.JSONDecoder().raw_decode(body, begin)[1]
        except (ValueError, RecursionError):
            return len(body)

    def read(self, opening: str, body: str, options: ParsingOptions, *, is_closed: bool) -> list[Call]:
        """Return the calls in a region; none if it is malformed, or no tools were offered."""
        if not options.tools:
            return []
        if self._argument is not None and not (is_closed and not self._argument.sub("", body).strip()):
            return []  # Unlike JSON, tags do not tell whether all of them are there.
        try:
            if self.spec.is_python:
                return python_calls(body)
            match = self._calls.open_re.search(opening + body)
            captures = {name: text for name, text in match.groupdict().items() if text is not None} if match else {}
            value = self._library.content_parsers.process_field(body, self._calls, captures)
            return calls_of(value, options if self.writes_text else None)
        except MALFORMED:
            return []


def load_format(
    chat_template: str, response_template: Mapping[str, Any] | None, wanted: FormatName
) -> AnswerFormat | None:
    """Return the format of a model's answers: a tokenizer's own, if it is usable, or its family's."""
    if response_template is not None and wanted is FormatName.AUTO:
        try:
            return AnswerFormat(own_format(response_template))
        except ConfigurationError as error:
            log.warning("%s", error)
    spec = find_format(chat_template, wanted)
    return AnswerFormat(spec) if spec else None


class AnswerParser:
    """Parser of one answer. Its results depend on the text alone, not on how it was cut into pieces."""

    def __init__(self, form: AnswerFormat, parser: Any, options: ParsingOptions) -> None:
        self._form = form
        self._parser = parser
        self._options = options
        self._tail = ""
        """End of the text so far."""

    def feed(self, text: str) -> Parsed:
        parsed = Parsed()
        self._tail = (self._tail + text)[-TAIL_CHARS:]
        self._add(parsed, self._parser.feed(text), is_closed=True)
        return parsed

    def finish(self, text: str = "") -> Parsed:
        """Return the rest: the answer ends after `text`. A complete call counts even without its closing mark."""
        parsed = self.feed(text)
        _, events = self._parser.finalize()
        self._add(parsed, events, is_closed=self._tail.rstrip().endswith(self._form.closing))
        return parsed

    def _add(self, parsed: Parsed, events: Iterable[Mapping[str, Any]], *, is_closed: bool) -> None:
        for event in events:
            match event["type"], event["field"]:
                case "region_chunk", "content" | "rest":
                    parsed.content += event["text"]
                case "region_chunk", "thinking":
                    parsed.reasoning += event["text"]
                case "region_close", "tool_calls":
                    opening, body = event["value"]["opening"], event["value"]["body"]
                    end = self._form.end_of_call(body)
                    calls = self._form.read(opening, body[:end], self._options, is_closed=is_closed)
                    if not parsed.calls:
                        parsed.calls_at = len(parsed.content)
                    parsed.calls += calls
                    if calls:
                        parsed.content += body[end:].strip()
                    else:
                        parsed.content += opening + body + (self._form.closing if is_closed else "")
                case _:
                    pass


def _regions(template: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a template of these regions, with their text as it is, but without white space beside the marks."""
    fields: dict[str, dict[str, Any]] = {}
    for name in names:
        if (field := template["fields"].get(name)) is None:
            continue
        opening, closing = _pattern(field, "open"), _pattern(field, "close")
        fields[name] = {"content_args": {"strip": False}}
        if opening:
            after = SPACE if name == THINKING else ""
            fields[name]["open_pattern"] = f"(?P<opening>{SPACE}(?:{opening}){after})"
            fields[name]["transform"] = {"opening": "{opening}", "body": "{content}"}
        if closing:
            before = SPACE if name == THINKING else ""
            fields[name]["close_pattern"] = f"{before}(?:{closing}){SPACE}"
    if CALLS in fields and "open_pattern" not in fields[CALLS]:
        raise ValueError("calls have no mark that opens them")
    if all("open_pattern" in field for field in fields.values()):
        fields[REST] = {"content_args": {"strip": False}}
    return {**{key: value for key, value in template.items() if key.startswith("start_anchor")}, "fields": fields}


def _pattern(field: Mapping[str, Any], mark: str) -> str:
    """Return the pattern of a region's opening or closing mark; empty if it has none."""
    return field.get(f"{mark}_pattern") or "|".join(
        map(re.escape, sorted(_literals(field.get(mark)), key=len, reverse=True))
    )


def _argument_pattern(calls: Any) -> re.Pattern[str] | None:
    if calls is None or calls.content != "xml-inline":
        return None
    return re.compile(calls.content_args["tag_pattern"], re.DOTALL)


def _marks(template: Mapping[str, Any], special: Mapping[int, str]) -> frozenset[int]:
    fields = cast("dict[str, dict[str, Any]]", template["fields"]).values()
    texts = [text for field in fields for key in _MARKS for text in _literals(field.get(key))]
    written = "\n".join(texts).replace("\\", "")
    return frozenset(token for token, spelled in special.items() if spelled and spelled in written)


def _literals(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    return cast("list[str]", value) if isinstance(value, list) else []
