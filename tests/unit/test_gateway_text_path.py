"""The path of a token through the gateway, against a plain reference: the same bytes, state and order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from baton_gateway import attempt_events as ev
from baton_gateway.answers import AnswerHead
from baton_gateway.choice import ChoiceText, Piece
from baton_gateway.detokenise import BytesByToken, JsonByToken, Vocabulary
from baton_gateway.openai_answers import ChatFormat, CompletionFormat, EventWriter
from baton_gateway.order import Outcome
from baton_gateway.outlet import Ending, Outlet, text_writer
from baton_gateway.parameters import OutputOptions
from baton_gateway.turn_writer import HELD_BYTES_MAX, TurnTransport, TurnWriter, write_parts
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from baton.messages.attempts import FinishReason, Frame, Sampling, TokenLogprob, Usage
from tests.harness.gateway.actors import SPECIAL, tiny_model
from tests.harness.gateway.attempt_harness import AttemptHarness, frame
from tests.harness.gateway.reference_text import ReferenceText, reference_event


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(tiny_model()[1].facts.spellings)


TOKENS = st.lists(st.one_of(st.integers(0, 399), st.sampled_from([1000, 2**32 - 1])), max_size=40)
LOGPROB = st.floats(allow_nan=True, allow_infinity=True)


@given(
    tokens=TOKENS,
    options=st.builds(
        OutputOptions,
        stops=st.lists(
            st.sampled_from(["the", " f", "é", "好", "\N{REPLACEMENT CHARACTER}", "o", '"']), max_size=2
        ).map(tuple),
        include_stop=st.booleans(),
        min_tokens=st.integers(0, 10),
        skip_special=st.booleans(),
        logprobs=st.booleans(),
    ),
    logprobs=st.lists(st.builds(TokenLogprob, logprob=LOGPROB, top=st.tuples(st.tuples(st.integers(0, 399), LOGPROB)))),
    cuts=st.lists(st.integers(0, 40), max_size=10),
    ends=st.booleans(),
    chat=st.booleans(),
    with_usage=st.booleans(),
    model=st.sampled_from(["m", 'a "" b', "\n"]),
)
def test_tokens_become_the_bytes_of_the_reference(
    vocabulary: Vocabulary,
    tokens: list[int],
    options: OutputOptions,
    logprobs: list[TokenLogprob],
    cuts: list[int],
    ends: bool,
    chat: bool,
    with_usage: bool,
    model: str,
) -> None:
    head = AnswerHead(request="r", model=model, created_s=1, with_usage=with_usage, with_logprobs=options.logprobs)
    kind = ChatFormat if chat else CompletionFormat
    special = frozenset(range(len(SPECIAL)))
    text, expected = ChoiceText(vocabulary, options), ReferenceText(vocabulary.token_bytes, special, options)
    writer, shape = EventWriter(kind(head), detailed=options.is_detailed), kind(head)
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for start, end in pairwise(edges):
        part, beside = tokens[start:end], logprobs[start:end]
        piece = text.feed(part, beside, ends=ends and end == len(tokens))
        other = expected.feed(part, beside, ends=ends and end == len(tokens))
        assert repr(piece) == repr(other)  # A log-probability that is no number equals nothing.
        assert writer.piece(1, piece) == reference_event(shape, 1, other)
    assert text.finish() == expected.finish()
    assert text.tokens == expected.tokens


@given(text=st.text(), chat=st.booleans())
def test_any_text_is_escaped_as_json(text: str, chat: bool) -> None:
    head = AnswerHead(request="r", model="m", created_s=1)
    shape = ChatFormat(head) if chat else CompletionFormat(head)
    text = text.encode(errors="replace").decode()
    assert EventWriter(shape, detailed=False).piece(0, Piece(text)) == reference_event(shape, 0, Piece(text))


@given(cuts=st.lists(st.tuples(TOKENS, st.booleans()), max_size=8), skip_special=st.booleans())
def test_plain_texts_are_those_of_single_tokens(
    vocabulary: Vocabulary, cuts: list[tuple[list[int], bool]], skip_special: bool
) -> None:
    """Some tokens the short way and some the long way, of one choice, against the long way alone."""
    options = OutputOptions(skip_special=skip_special)
    mixed, plain = ChoiceText(vocabulary, options), ChoiceText(vocabulary, options)
    assert mixed.is_plain
    for tokens, is_short in cuts:
        expected = [plain.feed([token], (), ends=False).text for token in tokens]
        if is_short:
            shown = [msgspec.json.decode(text, type=str) for text in mixed.feed_plain(tokens)]
        else:
            shown = [mixed.feed([token], (), ends=False).text for token in tokens]
        assert [text for text in shown if text] == [text for text in expected if text]
        assert mixed.tokens == plain.tokens
    assert mixed.finish() == plain.finish()


@pytest.mark.parametrize(
    "options",
    [
        OutputOptions(stops=("a",)),
        OutputOptions(logprobs=True),
        OutputOptions(token_ids=True),
        OutputOptions(counts=True),
    ],
)
def test_texts_with_more_than_tokens_are_not_plain(vocabulary: Vocabulary, options: OutputOptions) -> None:
    assert not ChoiceText(vocabulary, options).is_plain


def test_ids_that_no_tokenizer_knows_are_not_kept() -> None:
    asked: list[int] = []
    known = BytesByToken(lambda token: asked.append(token) or (b"a" if token == 1 else b""))
    assert [known[1], known[1], known[10**9]] == [b"a", b"a", b""]
    assert asked == [1, 10**9]
    assert dict(known) == {1: b"a"}
    shown = JsonByToken(known)
    assert [shown[1], shown[10**9]] == [b'"a"', b""]
    assert dict(shown) == {1: b'"a"'}


# ---------------------------------------------------------------- frames


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    tokens = draw(st.lists(st.integers(2, 9), max_size=4))
    finish = draw(st.sampled_from([None, None, None, FinishReason.LENGTH, FinishReason.STOP]))
    shown = frame(draw(st.integers(0, 1)), draw(st.integers(0, 12)), tokens, finish)
    usage = draw(st.sampled_from([None, None, Usage(prompt_tokens=4, completion_tokens=1, cached_tokens=3)]))
    cut = draw(st.sampled_from([0, 0, 0, 1]))
    return replace(shown, usage=usage, tokens=shown.tokens[: len(shown.tokens) - cut])


@given(
    arrived=st.lists(
        st.tuples(st.sampled_from(["d1", "d1", "d1", "d2"]), st.sampled_from([1, 1, 2]), frames(), st.booleans()),
        max_size=12,
    )
)
def test_extending_a_stream_equals_stepping(arrived: list[tuple[str, int, Frame, bool]]) -> None:
    """Frames of which many come next, through `extend` where it takes them, against `step` alone."""
    quick, plain = AttemptHarness(Sampling(max_tokens=64)), AttemptHarness(Sampling(max_tokens=64))
    for each in (quick, plain):
        each.run_on("d1")
    for worker, generation, any_frame, is_next in arrived:
        now_next = replace(any_frame, attempt=plain.machine.attempt, index=len(plain.machine.output.tokens))
        shown = now_next if is_next else any_frame
        expected = plain.step(ev.FrameArrived(worker, generation, shown))
        tokens = quick.machine.extend(quick.now_s, worker, generation, shown)
        if tokens is None:
            actions = quick.step(ev.FrameArrived(worker, generation, shown))
        else:
            actions = [ev.Deliver(tokens, shown.logprobs, quick.machine.output.is_ended)]
        assert repr(actions) == repr(expected)
        assert state_of(quick) == state_of(plain)
        quick.now_s += 1.0
        plain.now_s += 1.0


def state_of(harness: AttemptHarness) -> dict[str, str]:
    """Return the machine's state, but for its search, which is the same where actions and deadlines are."""
    state = vars(harness.machine) | vars(harness.machine.output)
    return {name: repr(value) for name, value in state.items() if name not in ("_search", "output")}


def test_a_frame_in_the_middle_needs_no_event() -> None:
    harness = AttemptHarness(Sampling(max_tokens=64))
    harness.run_on("d1")
    assert harness.machine.extend(0.0, "d1", 1, frame(0, 0, [5])) is None, "the first tokens change the phase"
    harness.frame(0, [5])
    assert harness.machine.extend(0.0, "d1", 1, frame(0, 1, [6, 7])) == [6, 7]
    assert harness.machine.output.tokens == [5, 6, 7]


# ---------------------------------------------------------------- outlets


class Client:
    """A client whose socket may be full; it gets what passes the outlet, and what its reader takes."""

    def __init__(self) -> None:
        self.takes = True
        self.got: list[str] = []
        self.outlet = Outlet(100, pass_on=self.pass_on)
        self.write_texts = text_writer(self.outlet, (b"", b""), self.write)

    def pass_on(self, _choice: int, piece: Piece) -> bool:
        if self.takes:
            self.got.append(piece.text)
        return self.takes

    def write(self, *parts: bytes) -> bool:
        if self.takes:
            self.got += [part.decode() for part in parts]
        return self.takes

    async def read(self) -> None:
        while True:
            for _, item in await self.outlet.take():
                if isinstance(item, Ending):
                    return
                await asyncio.sleep(0)
                self.got.append(item.text)


@given(steps=st.lists(st.sampled_from(["put", "put", "texts", "texts", "full", "free", "turn"]), max_size=40))
async def test_pieces_keep_their_order_past_a_full_socket(steps: list[str]) -> None:
    client, sent = Client(), list[str]()
    reader = asyncio.create_task(client.read())
    for step in steps:
        match step:
            case "put":
                sent.append(f"{len(sent)}")
                assert client.outlet.put(0, Piece(sent[-1], 1))
            case "texts":
                texts = [f"{len(sent)}", f"{len(sent) + 1}"]
                sent += texts
                if not client.write_texts([text.encode() for text in texts]):
                    assert all(client.outlet.put(0, Piece(text, 1)) for text in texts)
            case "turn":
                await asyncio.sleep(0)
            case _:
                client.takes = step == "free"
    client.outlet.put(0, Ending(Outcome(FinishReason.STOP, len(sent), 0)))
    await reader
    assert client.got == sent


async def test_a_waiting_reader_is_not_woken_for_what_passes() -> None:
    client = Client()
    reader = asyncio.create_task(client.read())
    await asyncio.sleep(0)
    client.outlet.put(0, Piece("a", 1))
    assert client.got == ["a"], "written without a turn of the loop"
    reader.cancel()


async def test_texts_do_not_overtake_what_is_unread() -> None:
    client = Client()
    assert not client.write_texts([b"a"]), "the reader does not wait yet"
    reader = asyncio.create_task(client.read())
    await asyncio.sleep(0)
    assert client.write_texts([b"a"])
    client.takes = False
    assert not client.write_texts([b"b"])
    client.outlet.put(0, Piece("b", 1))
    client.takes = True
    assert not client.write_texts([b"c"])
    assert client.got == ["a"]
    reader.cancel()


# ---------------------------------------------------------------- turns of the event loop


@dataclass
class Wire:
    """The part of a transport that a writer uses."""

    closing: bool = False
    written: list[bytes] = field(default_factory=list[bytes])

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True


class Turns:
    """Connections of one writer."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        self._writer = TurnWriter()

    def connect(self, wire: Wire) -> TurnTransport:
        return TurnTransport(cast("asyncio.Transport", wire), self._writer, self.calls.append)


def test_data_of_one_turn_is_one_write_for_each_connection() -> None:
    turns, one, two = Turns(), Wire(), Wire()
    first, second = turns.connect(one), turns.connect(two)
    for transport, data in ((first, b"head"), (second, b"b"), (first, b"body")):
        transport.write(data)
    (end_turn,) = turns.calls
    assert not one.written, "nothing leaves before the end of the turn"
    end_turn()
    assert (one.written, two.written) == ([b"headbody"], [b"b"])
    first.write(b"d")
    assert len(turns.calls) == 2, "each turn is flushed"


def test_a_lot_of_data_does_not_wait_for_the_end_of_the_turn() -> None:
    wire = Wire()
    transport = Turns().connect(wire)
    transport.write(b"a")
    transport.write(b"b" * HELD_BYTES_MAX)
    assert wire.written == [b"a" + b"b" * HELD_BYTES_MAX]


def test_a_connection_that_closes_sends_its_data_first() -> None:
    wire = Wire()
    transport = Turns().connect(wire)
    transport.write(b"a")
    transport.close()
    assert (wire.written, wire.closing) == ([b"a"], True)


def test_a_connection_that_was_cut_costs_the_others_nothing() -> None:
    turns, cut, other = Turns(), Wire(), Wire()
    for wire in (cut, other):
        turns.connect(wire).write(b"a")
    cut.closing = True
    turns.calls[0]()
    assert (cut.written, other.written) == ([], [b"a"])


class BrokenWire(Wire):
    def write(self, data: bytes) -> None:
        raise RuntimeError("broken")

    def abort(self) -> None:
        self.closing = True


def test_a_connection_that_cannot_be_written_to_is_cut_and_costs_the_others_nothing() -> None:
    turns, broken, other = Turns(), BrokenWire(), Wire()
    for wire in (broken, other):
        turns.connect(wire).write(b"a")
    turns.calls[0]()
    assert (broken.closing, other.written) == (True, [b"a"])


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        (dict[str, object](), True),
        ({"disconnected": True}, False),
        ({"response_complete": True}, False),
        ({"chunked_encoding": None}, False),
        ({"flow": SimpleNamespace(write_paused=True)}, False),
    ],
    ids=["open", "disconnected", "complete", "not begun", "full"],
)
def test_a_response_takes_parts_only_while_it_is_open(changed: dict[str, object], taken: bool) -> None:
    wire = Wire()
    usual = {"disconnected": False, "response_complete": False, "chunked_encoding": True, "transport": wire}
    cycle = SimpleNamespace(**{"flow": SimpleNamespace(write_paused=False), **usual, **changed})
    assert write_parts(cast("RequestResponseCycle", cycle), b"a" * 16) == taken
    assert wire.written == ([b"10\r\n" + b"a" * 16 + b"\r\n"] if taken else [])
    assert write_parts(cast("RequestResponseCycle", cycle), b"b", b"c") == taken
    assert wire.written[1:] == ([b"1\r\nb\r\n", b"1\r\nc\r\n"] if taken else [])
