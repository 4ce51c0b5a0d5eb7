"""Random networks and orders of events: an attempt machine's output to its client, against an oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle

from baton_gateway import attempt_events as ev
from baton_gateway.attempt import Phase
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.errors import (
    BatonError,
    BusUnavailable,
    ContextLengthExceeded,
    EngineFailed,
    ModelNotFound,
    NoResponders,
    NotResumable,
    NoWorkers,
    Overloaded,
    WorkerLost,
)
from baton.messages.attempts import AttemptState, DigestEntry, FinishReason, Frame, Sampling
from tests.harness.gateway.attempt_harness import REQUEST, AttemptHarness, frame, placement

WAITS = replace(placement("d1"), wait_s=2.0)
"""A placement that may wait at its worker for room."""
EXACT = {"temperature": 0.0}
SEEDED = {"temperature": 1.0, "seed": 7}


class Watched(AttemptHarness):
    """A machine with its client, which gets what is delivered."""

    view: list[int]
    starts: dict[int, int]
    """Attempt → the number of tokens that were delivered before it."""
    shown = False

    def step(self, event: ev.Event) -> list[ev.Action]:
        ended = self.machine.ended
        actions = super().step(event)
        assert not (ended and actions), "nothing happens after the end"
        for action in actions:
            if isinstance(action, ev.SendTasks):
                self.starts[action.attempt] = len(self.machine.output.tokens)
            elif isinstance(action, ev.Deliver):
                self.view += action.tokens
            elif isinstance(action, ev.StartOver):
                assert not self.shown, "no token is shown twice"
                self.view = []
        assert self.machine.ended or self.machine.wake_at_s < 1e8, "every state has a deadline"
        return actions

    def show(self) -> None:
        if self.view:
            self.shown = True
            self.step(ev.Shown())

    @property
    def ends(self) -> list[ev.Action]:
        return [action for action in self.all if isinstance(action, ev.Complete | ev.Fail)]


def watch(sampling: Sampling) -> Watched:
    bench = Watched(sampling, deadline_s=1e9)
    bench.view, bench.starts = [], {}
    return bench


class Network:
    """Workers that produce tokens 100, 101, … by position, behind a network that hypothesis commands."""

    def __init__(self, bench: Watched, length: int) -> None:
        self.bench = bench
        self.length = length
        self.start = 0
        self.emitted = 0
        self.in_flight: list[tuple[int, str, Frame]] = []

    def place(self, attempt: int) -> None:
        worker = f"d{attempt}"
        self.bench.step(ev.PlaceGranted(attempt, placement(worker)))
        if self.bench.did(ev.SendTasks):
            self.start, self.emitted = len(self.bench.machine.output.tokens), 0
            self.bench.step(ev.TaskAccepted(attempt, worker))

    @property
    def worker(self) -> str:
        return f"d{self.bench.machine.attempt}"

    def frame_from(self, index: int) -> Frame:
        tokens = [100 + self.start + position for position in range(index, self.emitted)]
        last = self.start + self.emitted == self.length
        return frame(self.bench.machine.attempt, index, tokens, FinishReason.LENGTH if last else None)

    def emit(self, tokens: int) -> None:
        index = self.emitted
        self.emitted = min(self.emitted + tokens, self.length - self.start)
        self.in_flight.append((self.bench.machine.attempt, self.worker, self.frame_from(index)))

    def answer_resends(self) -> None:
        for action in self.bench.did(ev.SendResend):
            if action.attempt == self.bench.machine.attempt:
                self.in_flight.append((action.attempt, action.worker, self.frame_from(action.index)))


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["emit", "deliver", "repeat", "lose", "digest", "kill", "leave", "wait", "show"]),
        st.integers(0, 5),
    ),
    min_size=10,
    max_size=60,
)


@given(MOVES, st.integers(1, 12), st.sampled_from([EXACT, SEEDED]))
def test_any_network_yields_each_token_once_and_one_end(
    moves: list[tuple[str, int]], length: int, parameters: dict[str, float]
) -> None:
    bench = watch(Sampling(max_tokens=length, **parameters))  # pyright: ignore[reportArgumentType]
    network = Network(bench, length)
    network.place(0)
    kills = 0
    # After the random part the network heals, so that the answer must become whole.
    for move, number in [*moves, *[("heal", 0)] * 40]:
        if bench.machine.ended:
            break
        if bench.machine.phase is Phase.PLACING:
            network.place(bench.machine.attempt)
        if move == "emit":
            network.emit(number)
        elif move in ("deliver", "repeat", "lose") and network.in_flight:
            position = number % len(network.in_flight)
            attempt, worker, shown = network.in_flight[position]
            if move != "repeat":
                del network.in_flight[position]
            if move != "lose":
                assert shown.attempt == attempt
                bench.step(ev.FrameArrived(worker, 1, shown))
                network.answer_resends()
        elif move == "kill" and kills < 3:
            kills += 1
            bench.step(ev.WorkerGone(network.worker, 1, "died"))
        elif move == "leave":
            # The other place may be found at once, later, or never.
            bench.step(ev.WorkerLeaving(network.worker, 1, 0.0, 10.0))
            if number:
                network.place(bench.machine.attempt + 1)
        elif move == "show":
            bench.show()
        elif move == "wait":
            bench.wait(0.3)
            network.answer_resends()
        elif move in ("digest", "heal"):
            if move == "heal":
                bench.wait(0.3)
                network.answer_resends()
                network.emit(length)
            state = AttemptState.RETAINED if network.start + network.emitted == length else AttemptState.RUNNING
            entry = DigestEntry(request=REQUEST, attempt=bench.machine.attempt, emitted=network.emitted, state=state)
            bench.step(ev.DigestArrived(network.worker, 1, entry))
            network.answer_resends()
            while move == "heal" and network.in_flight:
                _, worker, shown = network.in_flight.pop(0)
                bench.step(ev.FrameArrived(worker, 1, shown))
    (end,) = bench.ends
    whole = list(range(100, 100 + length))
    if isinstance(end, ev.Fail):
        assert isinstance(end.error, NotResumable)
        assert (parameters, bench.shown) == (SEEDED, True)
        assert bench.view == whole[: len(bench.view)]
    else:
        assert bench.view == whole


REFUSALS: list[BatonError] = [
    NoWorkers("all dead"),
    ModelNotFound("a new scheduler"),
    BusUnavailable("gone"),
    Overloaded("full"),
    ContextLengthExceeded("too long"),
]
LOSSES: list[BatonError] = [NoResponders("not there"), BusUnavailable("gone"), WorkerLost("gone"), EngineFailed("bug")]


def possible(bench: Watched, length: int) -> list[Callable[[], object]]:
    """Return what can happen to the machine now, the likelier things more often."""
    machine, attempt = bench.machine, bench.machine.attempt
    happens: list[ev.Event] = []
    if machine.seeks(attempt):
        places = [placement("d1"), placement("d2"), placement("d1", "p1"), WAITS]
        happens += [ev.PlaceGranted(attempt, place) for place in places] * 3
        happens += [ev.PlaceHeld(attempt)] * 5 + [ev.PlaceHandedBack(attempt)]
        happens += [ev.PlaceRefused(attempt, error) for error in REFUSALS]
    else:
        assert machine.placement is not None
        decode, prefill = machine.placement.decode.worker, machine.placement.prefill
        start, end = bench.starts[attempt], len(machine.output.tokens)
        for tokens in (0, 1, 3):
            shown = [100 + position for position in range(end, min(length, end + tokens))]
            finish = FinishReason.LENGTH if end + len(shown) == length else None
            happens.append(ev.FrameArrived(decode, 1, frame(attempt, end - start, shown, finish)))
        for worker in filter(None, (decode, prefill and prefill.worker)):
            happens += [ev.TaskAccepted(attempt, worker)] * 3 + [ev.TaskBusy(attempt, worker, "full")]
            happens += [ev.TaskFailed(attempt, worker, error) for error in LOSSES]
            happens.append(ev.WorkerGone(worker, 1, "died"))
        broken = frame(attempt, end - start, [], FinishReason.ERROR, error=EngineFailed("bug"))
        late = frame(attempt, end - start, [], FinishReason.ERROR, error=Overloaded("no room in time"))
        happens += [ev.FrameArrived(decode, 1, broken), ev.FrameArrived(decode, 1, late)]
        happens.append(ev.DigestArrived(decode, 1, None))
        happens += [ev.WorkerLeaving(decode, 1, 0.0, 10.0), ev.PlaceGranted(attempt + 1, placement("d3"))]
    waits = [partial(bench.wait, duration_s) for duration_s in (0.05, 0.3, 3.0, 40.0)]
    return [*(partial(bench.step, event) for event in happens), bench.show, *waits]


@given(
    st.lists(st.integers(0, 1 << 16), min_size=50, max_size=50),
    st.integers(1, 12),
    st.sampled_from([EXACT, SEEDED]),
)
def test_any_order_of_events_ends_in_time_by_one_cause(
    choices: list[int], length: int, parameters: dict[str, float]
) -> None:
    bench = watch(Sampling(max_tokens=length, **parameters))  # pyright: ignore[reportArgumentType]
    for choice in choices:
        if not bench.machine.ended:
            happens = possible(bench, length)
            happens[choice % len(happens)]()
    # From here on nothing answers: each wait ends by itself, long before the request's own deadline.
    bench.wait(1000.0)
    (end,) = bench.ends
    whole = list(range(100, 100 + length))
    assert bench.view == (whole if isinstance(end, ev.Complete) else whole[: len(bench.view)])


@given(st.lists(st.integers(0, 1 << 16), min_size=1, max_size=20))
def test_a_search_ends_in_time_whatever_it_meets(choices: list[int]) -> None:
    """Refusals and workers that are not reached, in any mixture, do not extend the time for which it may go on."""
    bench = watch(Sampling(max_tokens=8))
    for choice in cycle(choices):
        attempt = bench.machine.attempt
        events: list[ev.Event] = [ev.PlaceRefused(attempt, error) for error in REFUSALS[:4]]
        events += [ev.PlaceHeld(attempt), ev.PlaceHandedBack(attempt)]
        events += [ev.PlaceGranted(attempt, placement("d1")), ev.PlaceGranted(attempt, WAITS)]
        if bench.machine.phase is Phase.WAITING:
            late = frame(attempt, 0, [], FinishReason.ERROR, error=Overloaded("no room in time"))
            events = [ev.FrameArrived("d1", 1, late)]
        elif bench.machine.phase is Phase.DISPATCHED:
            events = [ev.TaskBusy(attempt, "d1", "full"), *(ev.TaskFailed(attempt, "d1", e) for e in LOSSES[:2])]
            if bench.machine.placement == WAITS:
                events.append(ev.TaskAccepted(attempt, "d1"))
        bench.step(events[choice % len(events)])
        bench.wait(0.05)
        if bench.machine.ended:
            break
        assert bench.now_s < 15.0, "the admission wait, and at most a few tries that began in it"
