"""Readers of traces: what they make of a file, and their errors."""

from __future__ import annotations

import gzip
from pathlib import Path
from random import Random

import pytest
from baton_simulator.traffic import agents, azure, mooncake, skewed
from baton_simulator.traffic.library import load

from baton.errors import InvalidRequest

MOONCAKE = b'{"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]}\n'
SESSION = (
    b'{"id": "s", "block_size": 256, "tool_tokens": 600, "system_tokens": 9, "requests": ['
    b'{"t": 0.0, "type": "n", "in": 2100, "out": 5, "api_time": 2.0, "hash_runs": [[1, 8]]},'
    b'{"t": 1.0, "type": "subagent", "requests": []},'
    b'{"t": 7.5, "type": "s", "in": 2600, "out": 6, "hash_runs": [[1, 7], [20, 3]]}]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,1100,10\n2023-11-16 18:17:05.0000000,5,1\n"
)


def test_mooncakes_stamps_are_spread_and_partial_blocks_left_out() -> None:
    trace = mooncake.read("trace", [MOONCAKE] * 50, Random(1))
    assert all(request.blocks == (0, 1) for request in trace.requests)
    times = [request.at_s for request in trace.requests]
    assert times == sorted(times)
    assert min(times) >= 3.0
    assert max(times) < 6.0
    assert len(set(times)) == 50


def test_sessions_wait_for_their_answers_and_share_the_tools() -> None:
    random = Random(3)
    trace = agents.read("trace", [SESSION, SESSION.replace(b'"s", "block', b'"z", "block')], random)
    sessions = {name: [each for each in trace.requests if each.session == name] for name in "sz"}
    (first, second), (other, _) = sessions["s"], sessions["z"]
    # 256-token blocks 1 to 8, two to a block: the first block is the tools', of which there are 600 tokens.
    assert len(first.blocks) == 4
    assert first.blocks[0] == other.blocks[0]
    assert set(first.blocks[1:]).isdisjoint(other.blocks)
    # Blocks of the ids 2, 4, 6; then one ends in 20, one in 22.
    assert second.blocks[:3] == first.blocks[:3]
    assert [block - first.blocks[3] for block in second.blocks[3:]] == [20 - 8, 22 - 8]
    assert (first.after, first.gap_s) == (None, 0.0)
    assert second.after == trace.requests.index(first)
    assert second.gap_s == 5.5
    assert second.at_s == first.at_s + 7.5


def test_azures_prompts_share_nothing() -> None:
    trace = azure.read("trace", AZURE.encode().splitlines(keepends=True))
    assert [request.at_s for request in trace.requests] == pytest.approx([0.0, 1.02004])
    assert [len(request.blocks) for request in trace.requests] == [2, 0]


def test_the_skewed_trace_follows_its_law() -> None:
    trace = skewed.generate()
    assert trace == skewed.generate()
    assert trace != skewed.generate(seed=12)
    first = [request.blocks[0] // skewed.PREFIX_BLOCKS[1] for request in trace.requests]
    weights = [(rank + 1) ** -skewed.EXPONENT for rank in range(skewed.PREFIXES)]
    for rank in range(3):
        expected = weights[rank] / sum(weights) * len(first)
        assert abs(first.count(rank) - expected) < 4 * expected**0.5


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut", MOONCAKE + MOONCAKE[:40], "cut, line 2: Input data was truncated"),
        (
            "type",
            MOONCAKE.replace(b"1100", b'"1100"'),
            r"type, line 1: Expected `int`, got `str` - at `\$.input_length`",
        ),
        ("zero", MOONCAKE.replace(b"1100", b"0"), "zero, line 1: Expected `int` >= 1"),
        ("negative", MOONCAKE.replace(b"3000", b"-1"), "negative, line 1: Expected `float` >= 0"),
        ("session", SESSION + SESSION.replace(b'"out": 5', b'"out": -5'), "session, line 2: Expected `int` >= 0"),
        ("csv", AZURE.replace(",10\n", "\n").encode(), "csv, line 2: not enough values to unpack"),
        ("number", AZURE.replace("1100", "many").encode(), "number, line 2: invalid literal for int"),
        ("length", AZURE.replace("1100", "0").encode(), "length, line 2: 0 prompt tokens and 10 output tokens"),
        ("heading", AZURE.replace("Context", "Prompt").encode(), "heading, line 1: the columns are not TIMESTAMP"),
        ("empty", b"", "empty has no requests"),
        ("damaged", gzip.compress(MOONCAKE * 100, mtime=0)[:40], "damaged cannot be read: Compressed file ended"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=message):
        load(str(path), 1)


def test_a_missing_file_is_refused_with_the_names_of_those_that_exist() -> None:
    with pytest.raises(InvalidRequest, match="no trace nowhere: name a file or one of conversation, agents, skewed"):
        load("nowhere", 1)


@pytest.mark.parametrize("name", ["conversation", "skewed"])
def test_packed_traces_can_be_read(name: str) -> None:
    trace = load(name, 1)
    assert len(trace.requests) > 5000
    assert all(one.at_s <= next_one.at_s for one, next_one in zip(trace.requests, trace.requests[1:], strict=False))


def test_a_file_may_be_packed(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.write_bytes(SESSION)
    packed.write_bytes(gzip.compress(SESSION))
    assert load(str(plain), 5).requests == load(str(packed), 5).requests
