"""The table of live workers, and how prompts are cut for them."""

from __future__ import annotations

import msgspec
import pytest
from baton_gateway.attempt_messages import cut
from baton_gateway.workers import WorkerTable
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest, ModelNotFound
from baton.messages.base import WorkerAddress
from baton.messages.workers import Heartbeat, Role
from tests.harness.heartbeats import STEPS

BEAT = Heartbeat(
    address=WorkerAddress(worker="d1", generation=1),
    role=Role.DECODE,
    model="m",
    model_path="somewhere",
    model_digest="digest",
    engine="test",
    block_tokens=32,
    context_tokens_max=1000,
    running_max=4,
    kv_blocks_total=10,
    engine_block_tokens=32,
    step_tokens_max=2048,
    steps=STEPS,
    kv_bytes_per_token=1,
)


def beat(worker: str = "d1", generation: int = 1, **fields: object) -> Heartbeat:
    address = WorkerAddress(worker=worker, generation=generation)
    return msgspec.structs.replace(BEAT, address=address, **fields)


def test_a_model_stays_known_for_a_minute_after_its_last_worker() -> None:
    table = WorkerTable(1.5)
    with pytest.raises(ModelNotFound):
        table.model("m")
    table.members.take(beat(), 10.0)
    assert table.model("m").path == "somewhere"
    assert table.counts() == {("decode", "m"): 1}
    table.members.expire(11.51)
    assert table.models() == []
    assert not table.counts()
    table.members.expire(70.0)
    assert table.model("m").path == "somewhere"
    table.members.expire(70.01)
    with pytest.raises(ModelNotFound):
        table.model("m")


def test_parameters_are_refused_where_no_decode_worker_takes_all_of_them() -> None:
    table = WorkerTable(1.5)
    table.members.take(beat("d1", parameters=("a", "b")), 0.0)
    table.members.take(beat("d2", parameters=("c",)), 0.0)
    table.members.take(beat("p1", role=Role.PREFILL, parameters=("p",)), 0.0)
    table.members.take(beat("other", model="other", parameters=("o",)), 0.0)
    for taken in ([], ["a"], ["b", "a"], ["c"]):
        table.check_parameters("m", taken)
    for names, named in ((["p"], "p"), (["o"], "o"), (["a", "b", "x"], "x"), (["x" * 1_000_000], "x" * 64)):
        with pytest.raises(InvalidRequest) as refusal:
            table.check_parameters("m", names)
        assert refusal.value.param == named
    with pytest.raises(InvalidRequest):
        table.check_parameters("m", ["a", "c"])
    with pytest.raises(InvalidRequest, match=r"did you mean `tool_choice`\?$"):
        table.check_parameters("m", ["tool_choise"])
    with pytest.raises(InvalidRequest, match=r"`structured_outputs\.json`$"):
        table.check_parameters("m", ["structured_outputs.json"])


def test_only_decode_workers_that_stay_serve_a_model() -> None:
    table = WorkerTable(1.5)
    table.members.take(beat("p1", role=Role.PREFILL), 0.0)
    table.members.take(beat("d1", draining=True), 0.0)
    assert table.models() == []
    assert table.model("m").context_tokens_max == 1000, "it waits for a worker that stays"
    table.members.take(beat("d2", context_tokens_max=500), 0.0)
    table.members.take(beat("d3", context_tokens_max=800), 0.0)
    assert table.model("m").context_tokens_max == 500
    assert [model.name for model in table.models()] == ["m"]


@given(st.binary(max_size=400).map(lambda raw: raw[: len(raw) // 4 * 4]), st.integers(-5, 100))
def test_prompts_are_cut_below_the_payload_limit(tokens: bytes, room_bytes: int) -> None:
    pieces = cut(tokens, room_bytes)
    assert b"".join(pieces) == tokens
    assert all(len(piece) <= max(4, room_bytes) and len(piece) % 4 == 0 for piece in pieces)
    assert len({len(piece) for piece in pieces[:-1]}) <= 1, "offsets are multiples of the first piece's length"
