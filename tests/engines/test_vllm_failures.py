"""Failures between prefill and decode end with a typed error, leave nothing behind and never give a wrong token."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from engine_pair import LEASE_TTL_S, Pair, prompt
from engine_process import Answer, EngineError, until

from baton.transfer import AgentOptions, NativeAgent


def test_corrupted_bytes_are_discarded(pair: Pair) -> None:
    ids = prompt(300, seed=30)
    pair.prefill.ask("faults", faults={"corrupt_every": 1})
    with pytest.raises(EngineError) as failure:
        pair.disaggregated(ids, 8)
    assert failure.value.code == "transfer_failed"
    assert "checksum" in failure.value.detail
    assert pair.decode.ask("stats")["checksum_failures"] >= 1
    pair.prefill.ask("faults", faults={})
    pair.settled()
    output, last = pair.disaggregated(ids, 8)
    assert last["cached_tokens"] == 0, "blocks of the failed pull must not be cached"
    assert output == pair.aggregated(ids, 8)


def test_prefill_preempted_in_the_middle_of_a_pull(pair: Pair) -> None:
    ids = prompt(1500, seed=31)
    name = pair.name()
    revoked = pair.prefill.ask("stats")["leases_revoked"]
    pair.hold(layer=1, passes=1)
    prefill = pair.send_prefill(name, ids)
    decode = pair.send_decode(name, ids, 8)
    pair.held()
    # The first chunk has moved and the second is computed: vLLM takes all blocks back after this step.
    until(lambda: pair.decode.ask("stats")["pulled_bytes"] > 0)
    preempted = pair.prefill.send("preempt")
    pair.let_go()
    preempted.wait()
    output = decode.tokens()
    prefill.wait()
    assert output == pair.aggregated(ids, 8)
    assert pair.prefill.ask("stats")["leases_revoked"] > revoked


def test_lease_that_expires_under_a_read(pair: Pair) -> None:
    ids = prompt(600, seed=32)
    name = pair.name()
    expired_before = pair.prefill.ask("stats")["leases_expired"]
    pair.prefill.ask("faults", faults={"delay_s": 6.0})
    (sink,) = pair.decode.worker_pids()
    prefill = pair.send_prefill(name, ids)
    decode = pair.send_decode(name, ids, 8)
    prefill.wait()
    until(lambda: pair.decode.ask("stats")["pulls"] == 1)
    time.sleep(0.5)
    # A stalled sink sends no keep-alives; the source gives its blocks to others.
    os.kill(sink, signal.SIGSTOP)
    try:
        pair.prefill.settled()
    finally:
        os.kill(sink, signal.SIGCONT)
    with pytest.raises(EngineError) as failure:
        decode.wait()
    assert failure.value.code == "transfer_failed"
    assert pair.prefill.ask("stats")["leases_expired"] == expired_before + 1
    pair.prefill.ask("faults", faults={})
    output, _ = pair.disaggregated(ids, 8)
    assert output == pair.aggregated(ids, 8)


def test_lease_that_expires_between_the_bytes(pair: Pair) -> None:
    ids = prompt(1500, seed=42)
    name = pair.name()
    expired_before = pair.prefill.ask("stats")["leases_expired"]
    (sink,) = pair.decode.worker_pids()
    pair.hold(layer=2, passes=1)
    prefill = pair.send_prefill(name, ids)
    decode = pair.send_decode(name, ids, 8)
    pair.held()
    # All of the first chunk is here, and of the second the layers 0 and 1: what is missing cannot come yet.
    until(lambda: pair.decode.ask("stats")["pulled_bytes"] > 0)
    os.kill(sink, signal.SIGSTOP)
    try:
        time.sleep(LEASE_TTL_S + 1.0)
        pair.let_go()
        prefill.wait()
        assert pair.prefill.ask("stats")["leases_expired"] == expired_before + 1
    finally:
        os.kill(sink, signal.SIGCONT)
    with pytest.raises(EngineError) as failure:
        decode.wait()
    assert failure.value.code == "transfer_failed"
    pair.settled()
    output, last = pair.disaggregated(ids, 8)
    assert last["cached_tokens"] == 0, "what had arrived of the failed pull must not be cached"
    assert output == pair.aggregated(ids, 8)


def test_source_without_a_listener(pair: Pair) -> None:
    gone = NativeAgent(AgentOptions(secret="tests"))
    gone.close()
    with pytest.raises(EngineError) as failure:
        pair.send_decode(pair.name(), prompt(100, seed=33), 8, agents=[gone.endpoint]).wait()
    assert failure.value.code == "peer_unreachable"


@pytest.mark.parametrize("agents", [["no endpoint at all"], ["127.0.0.1:1"]])
def test_source_that_is_no_agent(pair: Pair, agents: list[str]) -> None:
    with pytest.raises(EngineError) as failure:
        pair.send_decode(pair.name(), prompt(100, seed=34), 8, agents=agents).wait()
    assert failure.value.code == "transfer_failed"


def test_decode_preempted_while_it_generates_does_not_pull_again(pair: Pair) -> None:
    name, ids = pair.name(), prompt(300, seed=40)
    prefill = pair.send_prefill(name, ids)
    decode = pair.send_decode(name, ids, 60)
    prefill.wait()
    assert decode.next_delta() is not None
    pulls = pair.decode.ask("stats")["pulls_done"]
    pair.decode.ask("preempt")
    assert decode.tokens() == pair.aggregated(ids, 60)
    assert pair.decode.ask("load")["preemptions"] > 0
    assert pair.decode.ask("stats")["pulls_done"] == pulls


def test_client_that_leaves_in_any_state_frees_both(pair: Pair) -> None:
    for state, ids in enumerate(prompt(900, seed=41 + state) for state in range(3)):
        name = pair.name()
        pair.prefill.ask("faults", faults={"delay_s": 0.5 if state == 1 else 0.0})
        decode = pair.send_decode(name, ids, 2000)
        if state > 0:
            pair.send_prefill(name, ids).wait()
        if state > 1:
            assert decode.next_delta() is not None
        pair.decode.ask("stop", command=decode.number)
        with pytest.raises(EngineError, match="stopped"):
            decode.wait()
        pair.prefill.ask("faults", faults={})
        pair.settled()


def test_random_cancels_leave_nothing(pair: Pair) -> None:
    chance = random.Random(7)
    answers: list[Answer] = []
    for number in range(30):
        name, ids = pair.name(), prompt(chance.choice((20, 60, 150, 400, 700)), seed=50 + number)
        answers.append(pair.send_prefill(name, ids))
        answers.append(pair.send_decode(name, ids, chance.choice((1, 5, 40))))
        if chance.random() < 0.5:
            time.sleep(chance.random() * 0.2)
            victim = chance.choice((pair.prefill, pair.decode))
            victim.ask("abort", request=name)
    ends = [_end(answer) for answer in answers]
    assert ends.count("length") >= 30
    assert set(ends) <= {"length", "cancelled", "transfer_failed"}
    pair.settled()


def _end(answer: Answer) -> str:
    try:
        answer.wait()
    except EngineError as error:
        return error.code
    return answer.last["finish"]


def test_lease_that_never_opens(pair: Pair) -> None:
    with pytest.raises(EngineError) as failure:
        pair.send_decode(pair.name(), prompt(100, seed=34), 8, budget_s=1.5).wait()
    assert failure.value.code in ("transfer_failed", "deadline_exceeded")


def test_abort_of_decode_before_the_lease_exists(pair: Pair) -> None:
    name = pair.name()
    decode = pair.send_decode(name, prompt(100, seed=35), 8)
    until(lambda: pair.prefill.ask("stats")["parked"] == 1)
    pair.decode.ask("abort", request=name)
    decode.wait()
    assert decode.last["finish"] == "cancelled"
    pair.settled()


def test_abort_of_decode_while_it_pulls_frees_both(pair: Pair) -> None:
    name, ids = pair.name(), prompt(700, seed=36)
    pair.prefill.ask("faults", faults={"delay_s": 3.0})
    prefill = pair.send_prefill(name, ids)
    decode = pair.send_decode(name, ids, 8)
    prefill.wait()
    until(lambda: pair.decode.ask("stats")["pulls"] == 1)
    pair.decode.ask("abort", request=name)
    decode.wait()
    assert decode.last["finish"] == "cancelled"
    # The cancelled pull tells its source: no time limit has to pass.
    pair.settled()


def test_abort_of_decode_while_it_generates(pair: Pair) -> None:
    name, ids = pair.name(), prompt(200, seed=37)
    prefill = pair.send_prefill(name, ids)
    decode = pair.send_decode(name, ids, 3000)
    prefill.wait()
    assert decode.next_delta() is not None
    pair.decode.ask("abort", request=name)
    decode.wait()
    assert decode.last["finish"] == "cancelled"
    pair.settled()


def test_abort_of_prefill_while_it_computes(pair: Pair) -> None:
    name, ids = pair.name(), prompt(1500, seed=38)
    pair.hold(layer=1, passes=1)
    prefill = pair.send_prefill(name, ids)
    decode = pair.send_decode(name, ids, 8)
    pair.held()
    aborted = pair.prefill.send("abort", request=name)
    time.sleep(0.2)
    pair.let_go()
    aborted.wait()
    prefill.wait()
    assert prefill.last["finish"] == "cancelled"
    with pytest.raises(EngineError) as failure:
        decode.wait()
    assert failure.value.code == "transfer_failed"
    pair.settled()


def test_abort_of_a_held_lease(pair: Pair) -> None:
    name, ids = pair.name(), prompt(300, seed=39)
    pair.send_prefill(name, ids).wait()
    until(lambda: pair.prefill.ask("load")["leased_blocks"] == 10)
    assert pair.prefill.ask("load")["leased"] == [[name, 0]]
    assert pair.prefill.ask("load")["kv_usage"] > 0
    pair.prefill.ask("abort", request=name)
    pair.prefill.settled()


def test_abort_of_an_unknown_request(pair: Pair) -> None:
    pair.prefill.ask("abort", request="never heard of")
    pair.decode.ask("abort", request="never heard of")
