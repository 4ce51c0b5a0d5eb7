"""Placement by what engines take: declared parameters, and workers that refused what a request asks."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
from baton_scheduler.placement import PlacementOptions, choose
from baton_scheduler.policies.predicted import Predicted
from baton_scheduler.prediction import Demand, PrefixMatch
from baton_scheduler.team import Serving
from baton_scheduler.worker_load import WorkerLoad

from baton.errors import InvalidRequest, NoWorkers
from baton.messages.placement import Disaggregation, Placement
from baton.messages.workers import Role
from tests.harness.heartbeats import heartbeat

PLAIN = Demand(model="tiny", prompt_tokens=1000, output_tokens_max=100, disaggregation=Disaggregation.ALWAYS)
PREFILL = WorkerLoad(heartbeat("p1", Role.PREFILL, engine_kind="A"))


def decode(name: str, **changes: Any) -> WorkerLoad:
    return WorkerLoad(heartbeat(name, Role.DECODE, **changes))


def places(*decodes: WorkerLoad, prefills: tuple[WorkerLoad, ...] = (PREFILL,), **asked: Any) -> set[str]:
    """Return the decode workers that chance and load may choose."""
    demand = msgspec.structs.replace(PLAIN, **{name: frozenset(value) for name, value in asked.items()})
    return {place(demand, *prefills, *decodes, seed=seed).decode.worker for seed in range(20)}


def place(demand: Demand, *workers: WorkerLoad, seed: int = 1) -> Placement:
    return choose(demand, Serving(workers), PrefixMatch(), Predicted(), PlacementOptions(), Random(seed), 0.0)


def test_decode_goes_where_all_parameters_are_taken_and_prefill_anywhere() -> None:
    workers = (decode("d1"), decode("d2", parameters=("a",)), decode("d3", parameters=("a", "b")))
    assert places(*workers) == {"d1", "d2", "d3"}
    assert places(*workers, parameters=["a"]) == {"d2", "d3"}
    assert places(*workers, parameters=["a", "b"]) == {"d3"}
    with pytest.raises(NoWorkers, match="takes the parameters a, c"):
        places(*workers, parameters=["a", "c"])


def test_a_refusal_holds_for_all_workers_of_its_kind_and_role() -> None:
    workers = (decode("d1", engine_kind="A"), decode("d2", engine_kind="A"), decode("d3", engine_kind="B"))
    assert places(*workers, refused=["d1"]) == {"d3"}, "p1 is of kind A, but prefill was not asked"
    with pytest.raises(InvalidRequest, match="every live decode worker"):
        places(*workers, refused=["d1", "d3"])


def test_a_worker_of_no_known_kind_refuses_for_itself() -> None:
    assert places(decode("d1"), decode("d2"), refused=["d1"]) == {"d2"}


def test_a_kind_stays_refused_while_the_worker_that_said_so_leaves() -> None:
    leaving = decode("d1", engine_kind="A", draining=True)
    assert places(leaving, decode("d2", engine_kind="A"), decode("d3", engine_kind="B"), refused=["d1"]) == {"d3"}


def test_a_failed_worker_is_no_refusal() -> None:
    workers = (decode("d1", engine_kind="A"), decode("d2", engine_kind="B"))
    with pytest.raises(NoWorkers, match="failed this request before"):
        places(*workers, refused=["d1"], exclude=["d2"])


def test_where_all_prefill_workers_refuse_a_whole_placement_remains() -> None:
    demand = msgspec.structs.replace(PLAIN, refused=frozenset({"p1"}))
    with pytest.raises(InvalidRequest, match="prefill"):
        place(demand, PREFILL, decode("d1"))
    either = msgspec.structs.replace(demand, disaggregation=Disaggregation.AUTO)
    assert place(either, PREFILL, decode("d1")).prefill is None
