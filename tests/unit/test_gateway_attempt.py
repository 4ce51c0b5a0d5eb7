"""The attempt protocol as values: each edge of the hand-off's table."""

from __future__ import annotations

import pytest
from baton_gateway import attempt_events as ev
from baton_gateway.attempt import Phase
from baton_gateway.resumption import resumed
from msgspec.structs import replace

from baton.errors import (
    BatonError,
    ClientGone,
    DeadlineExceeded,
    EngineFailed,
    LayoutMismatch,
    ModelMismatch,
    NotResumable,
    PeerUnreachable,
    TransferFailed,
)
from baton.messages.attempts import AttemptState, Constraint, ConstraintKind, DigestEntry, FinishReason, Frame, Sampling
from tests.harness.gateway.attempt_harness import REQUEST, AttemptHarness, frame, placement


def test_an_undisturbed_attempt() -> None:
    bench = AttemptHarness()
    assert bench.fresh == [ev.SendPlace(0, (), ())]
    assert bench.step(ev.PlaceGranted(0, placement("d1", "p1"))) == [ev.SendTasks(0, placement("d1", "p1"))]
    assert bench.step(ev.TaskAccepted(0, "d1")) == []
    assert bench.step(ev.TaskAccepted(0, "p1")) == []
    bench.step(ev.PromptComputed(0, 96))
    bench.frame(0, [10, 11])
    assert bench.fresh == [ev.Deliver([10, 11], (), False)]
    bench.frame(2, [2], FinishReason.STOP)
    assert bench.fresh == [
        ev.Deliver([2], (), True),
        ev.SendAcknowledge("d1", 0),
        ev.SendAcknowledge("p1", 0),
        ev.Complete(FinishReason.STOP, 96),
    ]
    assert bench.machine.phase is Phase.DONE
    assert bench.step(ev.Tick()) == []


# ---------------------------------------------------------------- frames


def test_a_gap_is_asked_for_again_and_duplicates_are_dropped() -> None:
    bench = AttemptHarness()
    bench.run_on("d1")
    bench.frame(0, [10])
    bench.frame(2, [12])
    assert bench.fresh == [ev.SendResend("d1", 0, 1)]
    bench.frame(3, [13])
    assert bench.fresh == [], "not asked for again at once"
    assert bench.wait(0.25) == [ev.SendResend("d1", 0, 1)]
    bench.frame(1, [11, 12, 13])
    assert bench.did(ev.Deliver) == [ev.Deliver([11, 12, 13], (), False)]
    bench.frame(2, [12, 13, 14])
    assert bench.did(ev.Deliver) == [ev.Deliver([14], (), False)]
    bench.frame(0, [10])
    assert bench.fresh == []
    assert bench.machine.output.tokens == [10, 11, 12, 13, 14]


@pytest.mark.parametrize(("worker", "generation", "attempt"), [("d2", 1, 0), ("d1", 0, 0), ("d1", 2, 0), ("d1", 1, 1)])
def test_foreign_frames_are_fenced(worker: str, generation: int, attempt: int) -> None:
    bench = AttemptHarness()
    bench.run_on("d1")
    assert bench.step(ev.FrameArrived(worker, generation, frame(attempt, 0, [10]))) == []
    assert bench.machine.output.tokens == []


def test_frames_of_an_old_attempt_are_fenced() -> None:
    bench = AttemptHarness()
    bench.run_on("d1")
    bench.frame(0, [10])
    bench.step(ev.WorkerGone("d1", 1, "died"))
    bench.run_on("d1")
    assert bench.step(ev.FrameArrived("d1", 1, frame(0, 1, [99]))) == []
    bench.frame(0, [11])
    assert bench.machine.output.tokens == [10, 11]


def test_workers_have_more_time_to_accept_in_a_burst() -> None:
    bench = AttemptHarness()
    bench.step(ev.PlaceGranted(0, placement("d1"), unanswered=48))
    assert bench.wait(0.39) == []
    bench.wait(0.02)
    assert bench.did(ev.SendPlace), "four times as long, with three times as many as double it"


def test_slow_workers_have_more_time_to_accept_each_further_attempt() -> None:
    bench = AttemptHarness()
    for attempt, accept_s in enumerate([0.1, 0.3, 0.9]):
        bench.step(ev.PlaceGranted(attempt, placement("d1")))
        assert bench.wait(accept_s - 0.01) == []
        bench.wait(0.02)
        assert bench.did(ev.SendPlace)
    bench.step(ev.PlaceGranted(3, placement("d1")))
    bench.wait(2.6)
    assert bench.step(ev.TaskAccepted(3, "d1")) == []
    assert bench.machine.phase is Phase.WAITING


def test_a_frame_implies_acceptance() -> None:
    bench = AttemptHarness()
    bench.step(ev.PlaceGranted(0, placement("d1")))
    bench.frame(0, [10])
    bench.wait(0.2)
    assert bench.machine.phase is Phase.STREAMING
    assert bench.machine.attempt == 0


def test_a_malformed_frame_costs_the_attempt_only() -> None:
    bench = AttemptHarness()
    bench.run_on("d1")
    bench.step(ev.FrameArrived("d1", 1, Frame(request=REQUEST, attempt=0, index=0, tokens=b"abc")))
    assert bench.did(ev.SendPlace)


def test_a_lost_final_frame_is_asked_for() -> None:
    bench = AttemptHarness()
    bench.run_on("d1")
    bench.frame(0, [10, 11])
    entry = DigestEntry(request=REQUEST, attempt=0, emitted=2, state=AttemptState.RETAINED)
    assert bench.step(ev.DigestArrived("d1", 1, entry)) == [ev.SendResend("d1", 0, 2)]
    bench.frame(2, [], FinishReason.LENGTH)
    assert bench.machine.phase is Phase.DONE


def test_a_digest_that_is_ahead_asks_again() -> None:
    bench = AttemptHarness()
    bench.run_on("d1")
    entry = DigestEntry(request=REQUEST, attempt=0, emitted=3, state=AttemptState.RUNNING)
    assert bench.step(ev.DigestArrived("d1", 1, entry)) == [ev.SendResend("d1", 0, 0)]


def test_absent_twice_means_lost() -> None:
    bench = AttemptHarness()
    bench.run_on("d1")
    assert bench.step(ev.DigestArrived("d1", 1, None)) == []
    listed = DigestEntry(request=REQUEST, attempt=0, emitted=0, state=AttemptState.QUEUED)
    bench.step(ev.DigestArrived("d1", 1, listed))
    assert bench.step(ev.DigestArrived("d1", 1, None)) == [], "listed in between: counted from zero"
    bench.step(ev.DigestArrived("d1", 1, None))
    assert bench.did(ev.SendPlace) == [ev.SendPlace(1, ("d1",), ())]


# ---------------------------------------------------------------- losses


def test_a_dead_decode_worker_is_lost_at_once_and_the_rest_resumed() -> None:
    bench = AttemptHarness()
    bench.run_on("d1")
    bench.frame(0, [10, 11])
    bench.step(ev.WorkerGone("d1", 1, "sent no heartbeat"))
    assert bench.did(ev.SendPlace) == [ev.SendPlace(1, ("d1",), ())]
    bench.run_on("d2")
    bench.frame(0, [12], FinishReason.LENGTH)
    assert bench.machine.output.tokens == [10, 11, 12]
    assert bench.machine.phase is Phase.DONE


def test_another_generation_dying_does_not_matter() -> None:
    bench = AttemptHarness()
    bench.run_on("d1")
    assert bench.step(ev.WorkerGone("d1", 0, "old")) == []
    assert bench.step(ev.WorkerGone("d9", 1, "foreign")) == []


def test_prefill_matters_until_the_first_token() -> None:
    bench = AttemptHarness()
    bench.run_on("d1", "p1")
    bench.step(ev.WorkerGone("p1", 1, "died"))
    assert bench.did(ev.SendPlace) == [ev.SendPlace(1, ("p1",), ())]
    bench.run_on("d1", "p2")
    bench.frame(0, [10])
    assert bench.step(ev.WorkerGone("p2", 1, "died")) == []


@pytest.mark.parametrize(
    ("error", "excluded", "pairs"),
    [
        (PeerUnreachable("cut"), (), (("p1", "d1"),)),
        (ModelMismatch("another dtype"), (), (("p1", "d1"),)),
        (LayoutMismatch("no common head"), (), (("p1", "d1"),)),
        (TransferFailed("stalled"), ("p1",), ()),
        (EngineFailed("crashed"), ("d1",), ()),
    ],
)
def test_who_is_excluded(error: BatonError, excluded: tuple[str, ...], pairs: tuple[tuple[str, str], ...]) -> None:
    bench = AttemptHarness()
    bench.run_on("d1", "p1")
    bench.frame(0, [], FinishReason.ERROR, error=error)
    assert bench.did(ev.SendPlace) == [ev.SendPlace(1, excluded, pairs)]


NOT_EXACT = [
    Sampling(max_tokens=8, seed=1),
    Sampling(max_tokens=8, presence_penalty=0.5),
    Sampling(max_tokens=8, frequency_penalty=0.5),
    Sampling(max_tokens=8, repetition_penalty=1.1),
    Sampling(max_tokens=8, extensions={"guided_json": {}}),
]


@pytest.mark.parametrize("sampling", NOT_EXACT)
def test_what_cannot_be_resumed_exactly_fails_once_something_was_shown(sampling: Sampling) -> None:
    bench = AttemptHarness(sampling)
    bench.run_on("d1")
    bench.frame(0, [10])
    bench.step(ev.Shown())
    bench.step(ev.WorkerGone("d1", 1, "died"))
    assert isinstance(bench.error, NotResumable)
    assert bench.did(ev.SendCancel)


@pytest.mark.parametrize("sampling", NOT_EXACT)
def test_an_attempt_that_delivered_nothing_is_rerun_whatever_its_parameters(sampling: Sampling) -> None:
    bench = AttemptHarness(sampling)
    bench.run_on("d1")
    bench.step(ev.WorkerGone("d1", 1, "died"))
    assert bench.did(ev.SendPlace)


@pytest.mark.parametrize("sampling", NOT_EXACT)
def test_what_cannot_be_resumed_exactly_starts_over_while_nothing_was_shown(sampling: Sampling) -> None:
    bench = AttemptHarness(sampling)
    bench.run_on("d1")
    bench.frame(0, [10, 11, 12], cached=3)
    bench.step(ev.WorkerGone("d1", 1, "died"))
    assert bench.fresh[1:] == [ev.SendCancel("d1", 0, "worker_lost"), ev.StartOver(), ev.SendPlace(1, ("d1",), ())]
    assert bench.machine.output.tokens == []
    bench.run_on("d2")
    bench.frame(0, [20, 21], FinishReason.LENGTH)
    assert bench.did(ev.Deliver) == [ev.Deliver([20, 21], (), False)]
    assert bench.did(ev.Complete) == [ev.Complete(FinishReason.LENGTH, 0)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=8, temperature=1.0),
        Sampling(max_tokens=8, temperature=0.0, seed=1),
        Sampling(max_tokens=8, logit_bias={1: 2.0}, top_p=0.5, top_k=3, min_p=0.1, stop_token_ids=(7,)),
        Sampling(max_tokens=8, constraint=Constraint(kind=ConstraintKind.JSON, text="{}")),
    ],
)
def test_plain_sampling_is_resumed(sampling: Sampling) -> None:
    bench = AttemptHarness(sampling)
    bench.run_on("d1")
    bench.frame(0, [10])
    bench.step(ev.WorkerGone("d1", 1, "died"))
    assert bench.did(ev.SendPlace)


def test_the_rest_of_an_output_knows_what_was_delivered() -> None:
    whole = Sampling(max_tokens=8, min_tokens=2, constraint=Constraint(kind=ConstraintKind.REGEX, text="a+"))
    assert resumed(whole, 0) == whole
    assert resumed(whole, 3) == replace(whole, max_tokens=5, min_tokens=0, delivered_tokens=3)


def test_an_output_that_is_whole_is_not_resumed() -> None:
    length = AttemptHarness(Sampling(max_tokens=2, temperature=0.0))
    length.run_on("d1")
    length.frame(0, [10, 11])
    length.step(ev.WorkerGone("d1", 1, "died"))
    assert length.did(ev.Complete) == [ev.Complete(FinishReason.LENGTH, 0)]
    stopped = AttemptHarness()
    stopped.run_on("d1")
    stopped.frame(0, [10, 2])
    stopped.step(ev.WorkerGone("d1", 1, "died"))
    assert stopped.did(ev.Complete) == [ev.Complete(FinishReason.STOP, 0)]


# ---------------------------------------------------------------- ends


def test_the_first_token_and_every_further_one_have_a_deadline() -> None:
    waiting = AttemptHarness()
    waiting.run_on("d1")
    waiting.wait(120.1)
    assert waiting.did(ev.SendPlace)[0].exclude == ("d1",)
    stuck = AttemptHarness()
    stuck.run_on("d1")
    stuck.frame(0, [10])
    stuck.wait(30.1)
    assert stuck.did(ev.SendPlace)[0].exclude == ("d1",)


@pytest.mark.parametrize("stage", ["placing", "queued", "dispatched", "waiting", "streaming"])
def test_the_deadline_until_the_first_token_and_a_client_that_leaves_end_every_phase(stage: str) -> None:
    leaves = ev.Aborted(ClientGone("left"))
    for event in (leaves,) if stage == "streaming" else (ev.Tick(), leaves):
        bench = AttemptHarness(deadline_s=0.05)
        if stage == "queued":
            bench.step(ev.PlaceHeld(0))
        elif stage == "dispatched":
            bench.step(ev.PlaceGranted(0, placement("d1", "p1")))
        elif stage in ("waiting", "streaming"):
            bench.run_on("d1", "p1")
            if stage == "streaming":
                bench.frame(0, [10])
        assert bench.machine.phase == stage
        bench.now_s = 0.05
        bench.step(event)
        expected = DeadlineExceeded if isinstance(event, ev.Tick) else ClientGone
        assert isinstance(bench.error, expected)
        cancelled = {action.worker for action in bench.did(ev.SendCancel)}
        assert cancelled == ({"d1", "p1"} if stage in ("dispatched", "waiting", "streaming") else set())
        assert len(bench.did(ev.SendWithdraw)) == (stage in ("placing", "queued"))


def test_a_stop_string_cancels_the_decode() -> None:
    bench = AttemptHarness()
    bench.run_on("d1", "p1")
    bench.frame(0, [10])
    bench.step(ev.TextStopped())
    assert {action.worker for action in bench.did(ev.SendCancel)} == {"d1", "p1"}
    assert bench.did(ev.Complete) == [ev.Complete(FinishReason.STOP, 0)]
