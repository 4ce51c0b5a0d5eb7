"""Every message survives the bus, newer peers are understood, and nothing else passes for a message."""

from __future__ import annotations

import contextlib
import types
from typing import Annotated, Any, cast, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import MalformedMessage
from baton.messages import attempts, base, decisions, index, placement, traces, workers
from baton.messages.base import (
    PARAMETER_CHARACTERS_MAX,
    PARAMETERS_MAX,
    Context,
    Message,
    Part,
    pack_tokens,
    unpack_tokens,
)
from baton.messages.codec import AnyMessage, decode, encode
from baton.messages.placement import Place
from baton.messages.workers import GatewayBeat
from tests.harness.heartbeats import heartbeat

MESSAGES: tuple[type[Message], ...] = get_args(AnyMessage)
PARTS = [
    kind
    for conversation in (attempts, base, decisions, index, placement, traces, workers)
    for kind in vars(conversation).values()
    if isinstance(kind, type) and issubclass(kind, Part | Message) and kind not in (Part, Message)
]

_scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()
# Extensions are `object`: whatever MessagePack can carry and gives back unchanged.
_extension = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=5
)


def _of(kind: object) -> st.SearchStrategy[object]:
    """Build values of an annotated type. Written out, since hypothesis' `builds` leaves defaults at their defaults."""
    origin, args = getattr(kind, "__origin__", None), get_args(kind)
    if kind is object:
        return _extension
    if get_origin(kind) is Annotated:
        inner, bounds = args
        text = st.text(min_size=bounds.min_length or 0, max_size=bounds.max_length)
        return text if inner is str else _of(inner)
    if isinstance(kind, types.UnionType) or (args and type(None) in args):
        return st.one_of([_of(member) for member in args])
    if kind is type(None):
        return st.none()
    if kind is int:
        return st.integers(-(2**63), 2**63 - 1)
    if kind is float:
        return st.floats(allow_nan=False)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(_of(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(_of(arg) for arg in args))
    if origin is dict:
        return st.dictionaries(_of(args[0]), _of(args[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        return st.builds(kind, **{field.name: _of(field.type) for field in fields})
    assert isinstance(kind, type)
    return st.from_type(cast(type[object], kind))


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_survives_the_bus(kind: type[Message]) -> None:
    # Few of each kind, since all kinds have the same types in their fields.
    @settings(max_examples=settings().max_examples // 6)
    @given(_of(kind))
    def survives(message: AnyMessage) -> None:
        again = decode(encode(message))
        assert type(again) is kind
        assert again == message

    survives()


def test_the_union_names_every_message_once() -> None:
    assert set(MESSAGES) == {kind for kind in PARTS if issubclass(kind, Message) and not kind.__subclasses__()}
    tags = [kind.__struct_config__.tag for kind in MESSAGES]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("kind", PARTS, ids=lambda kind: kind.__name__)
def test_messages_cannot_be_changed_and_take_names_only(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen
    assert all(field.name for field in msgspec.structs.fields(kind))
    with pytest.raises(TypeError):
        kind("by position")


@given(st.dictionaries(st.text(min_size=2), _extension, max_size=4))
def test_fields_of_a_newer_version_are_ignored(extra: dict[str, object]) -> None:
    extra.pop("gateway", None)
    payload = msgspec.msgpack.encode({**extra, "t": "gateway_beat", "gateway": "g"})
    assert decode(payload) == GatewayBeat(gateway="g")


@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_malformed(payload: bytes) -> None:
    try:
        decode(payload)
    except MalformedMessage as error:
        assert str(len(payload)) in error.detail


@given(_of(attempts.DecodeTask), st.data())
def test_a_damaged_message_is_a_message_or_malformed(message: AnyMessage, data: st.DataObject) -> None:
    payload = bytearray(encode(message))
    position = data.draw(st.integers(0, len(payload) - 1))
    payload[position] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(payload), bytes(payload[:position])):
        with contextlib.suppress(MalformedMessage):
            decode(damaged)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x80",
        msgspec.msgpack.encode({"t": "no such message"}),
        msgspec.msgpack.encode({"t": "gateway_beat"}),
        msgspec.msgpack.encode({"t": "gateway_beat", "gateway": 3}),
        msgspec.msgpack.encode({"t": ["gateway_beat"], "gateway": "g"}),
        b"\x91" * 100_000,
        b"\x82\xa1t\xacgateway_beat\xa7gateway\xa2\xff\xfe",
        b"\xdf\xff\xff\xff\xff",
    ],
)
def test_what_is_no_message_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(payload)


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_pack_to_little_endian_and_back(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert packed == b"".join(token.to_bytes(4, "little") for token in tokens)
    assert unpack_tokens(packed) == tokens


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["1"], [None], None, 5])
def test_what_is_no_token_id_is_malformed(tokens: list[int]) -> None:
    with pytest.raises(MalformedMessage):
        pack_tokens(tokens)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 4095])
def test_a_torn_token_list_is_malformed(length: int) -> None:
    with pytest.raises(MalformedMessage, match=str(length)):
        unpack_tokens(bytes(length))


@pytest.mark.parametrize(
    "declared",
    [
        ("x" * (PARAMETER_CHARACTERS_MAX + 1),),
        ("x" * 1_000_000,),
        ("",),
        tuple(f"p{number}" for number in range(PARAMETERS_MAX + 1)),
        (1, 2),
        {"p": "q"},
        "parameters",
    ],
    ids=["long", "megabyte", "empty", "many", "numbers", "map", "text"],
)
def test_a_declaration_of_parameters_is_bounded(declared: Any) -> None:
    context = Context(request="r", budget_s=1.0)
    place = Place(context=context, model="m", blocks=b"", prompt_tokens=1, output_tokens_max=1, parameters=declared)
    for message in (heartbeat(parameters=declared), place):
        with pytest.raises(MalformedMessage):
            decode(encode(message))
