"""Real engines with KV pools hand off and lend to each other: vLLM and SGLang, each alone and both ways.

All of it is for `make test-nightly`; `test_vllm_pool.py` and `test_sglang_pool.py` have the cases of `make test`.
"""

from __future__ import annotations

import signal

import pytest
from cross_engines import Engines, RealEngineSuite, engines_fixture, named_pair
from struck_handoffs import check_struck_handoff
from struck_lenders import DEADLINE_S, SLACK_S, check_prefill_killed_after_it_lent, struck_delay_s

from baton.engines.engine import Leg
from tests.contract.lending_suite import LendingSuite

SLOT_BYTES = 4 * 32 * 2 * 2 * 64 * 4
"""Four layers of 32 tokens, K and V, two heads of 64 numbers, four bytes each."""
POOL = {"kv_pool_bytes": 512 * SLOT_BYTES}
PAIRS = ("vllm-32-to-vllm-128", "sglang-32-to-sglang-64", "vllm-128-to-sglang-32", "sglang-64-to-vllm-32")

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(700), pytest.mark.nightly]


engines = engines_fixture(vllm=POOL, sglang=POOL)
pair = named_pair


@pytest.mark.parametrize("pair", PAIRS, ids=str, indirect=True, scope="module")
class TestHandoffs(RealEngineSuite):
    pass


@pytest.mark.parametrize("pair", PAIRS, ids=str, indirect=True, scope="module")
class TestLoans(LendingSuite):
    pass


# These come last: engines end.
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("leg", [Leg.PREFILL, Leg.DECODE])
@pytest.mark.parametrize("names", PAIRS)
async def test_a_struck_engine_changes_no_answer(engines: Engines, names: str, leg: Leg, how: signal.Signals) -> None:
    source, sink = names.split("-to-")
    print("the struck attempt", await check_struck_handoff(engines, (source, sink), leg, how))


@pytest.mark.parametrize("how", [None, signal.SIGSTOP, signal.SIGKILL], ids=["evicts", "stopped", "killed"])
@pytest.mark.parametrize("names", PAIRS)
async def test_a_struck_lender_changes_no_answer_and_costs_the_deadline_at_most(
    engines: Engines, names: str, how: signal.Signals | None
) -> None:
    """One that is killed costs less: it is known to be gone."""
    lender, borrower = names.split("-to-")
    delay_s_max = SLACK_S if how is signal.SIGKILL else DEADLINE_S + SLACK_S
    assert await struck_delay_s(engines, (lender, borrower), how) <= delay_s_max


@pytest.mark.parametrize("names", PAIRS)
async def test_decode_goes_on_from_what_a_killed_prefill_had_lent(engines: Engines, names: str) -> None:
    prefill, decode = names.split("-to-")
    await check_prefill_killed_after_it_lent(engines, (prefill, decode))
