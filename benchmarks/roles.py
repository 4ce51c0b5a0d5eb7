"""Load that shifts from long prompts to long answers and back, with roles that change and with fixed ones.

Requests go over simulated workers on virtual time, as in `baton replay`: the scheduler's placement and supervisor are
the product's own code. The shift comes twice: with more load than the fleet can follow at once, and with one that it
can serve, where nothing has to be refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

from baton_scheduler.supervisor import SupervisorOptions
from baton_simulator.goals import GOAL_TPOT_S, GOAL_TTFT_S
from baton_simulator.replay import Fleet, Outcome, Replay
from baton_simulator.routers.baton import BatonOptions, BatonRouter
from baton_simulator.routers.protocol import WorkerSpec
from baton_simulator.routers.roles import Change, RolesRouter
from baton_simulator.traffic.trace import Request, Trace

from baton.messages.placement import Disaggregation
from benchmarks.report import Row, report

SEED: Final = 11
BLOCK_TOKENS: Final = 512
PHASE_S: Final = 240.0
Phase = tuple[str, float, tuple[int, int], tuple[int, int]]
PHASES: Final[Sequence[Phase]] = (
    ("long prompts", 14.0, (8_000, 14_000), (32, 128)),
    ("long answers", 42.0, (300, 1_000), (400, 1_000)),
    ("long prompts again", 14.0, (8_000, 14_000), (32, 128)),
)
"""Name, requests per second, and bounds of the tokens of prompts and answers."""
SERVED_PER_S: Final = (13.0, 30.0, 13.0)
"""Requests per second of the phases at which nothing has to be refused."""
FLEET: Final = Fleet(prefill=3, decode=3, link_bytes_per_s=50e9)
"""Links of 400 Gb/s: with 80 Gb/s, two decode workers could not take in what four prefill workers compute."""


def shifting(phases: Sequence[Phase] = PHASES, *, phase_s: float = PHASE_S, seed: int = SEED) -> Trace:
    """Return the requests of all phases; no two share a prefix."""
    random = Random(seed)
    requests: list[Request] = []
    next_block = 0
    for number, (_, per_s, prompts, outputs) in enumerate(phases):
        times = sorted(random.uniform(number * phase_s, (number + 1) * phase_s) for _ in range(round(per_s * phase_s)))
        for at_s in times:
            prompt_tokens = random.randint(*prompts)
            blocks = tuple(range(next_block, next_block + prompt_tokens // BLOCK_TOKENS))
            next_block += len(blocks)
            requests.append(Request(at_s, blocks, prompt_tokens, random.randint(*outputs)))
    return Trace("shifting", BLOCK_TOKENS, requests)


def play(
    trace: Trace, fleet: Fleet = FLEET, *, supervisor: SupervisorOptions | None
) -> tuple[list[Outcome], Sequence[Change]]:
    """Return what happened to each request, and the changes of role; without a supervisor there are none."""
    changes: list[Change] = []

    def new_router(workers: Sequence[WorkerSpec], random: Random) -> BatonRouter:
        nonlocal changes
        options = BatonOptions(Disaggregation.ALWAYS)
        if supervisor is None:
            return BatonRouter(workers, options, random)
        router = RolesRouter(workers, options, random, supervisor)
        changes = router.changes
        return router

    return Replay(trace, fleet, new_router, seed=SEED).run(), changes


def is_good(outcome: Outcome) -> bool:
    on_time = outcome.ttft_s is not None and outcome.ttft_s <= GOAL_TTFT_S
    return on_time and (outcome.tpot_s is None or outcome.tpot_s <= GOAL_TPOT_S)


def goodput(outcomes: Sequence[Outcome]) -> float:
    """Return the share of requests within both objectives."""
    return sum(map(is_good, outcomes)) / len(outcomes)


def refused(outcomes: Sequence[Outcome]) -> float:
    """Return the share of requests that found no room in time, in percent."""
    return 100 * sum(bool(outcome.refused) for outcome in outcomes) / len(outcomes)


def main() -> None:
    rows: list[Row] = []
    notes: list[str] = []
    served = [
        (f"served load, {name}", per_s, prompts, outputs)
        for (name, _, prompts, outputs), per_s in zip(PHASES, SERVED_PER_S, strict=True)
    ]
    for phases in (PHASES, served):
        trace = shifting(phases)
        fixed, _ = play(trace, supervisor=None)
        changing, changes = play(trace, supervisor=SupervisorOptions())
        for number, (name, *_) in enumerate(phases):
            ours, theirs = part(changing, number), part(fixed, number)
            rows += [
                Row.against(f"{name}: within both objectives", "%", 100 * goodput(ours), fixed=100 * goodput(theirs)),
                Row.against(f"{name}: refused", "%", refused(ours), fixed=refused(theirs)),
            ]
        notes.append("; ".join(f"{at_s:.0f} s: {worker} to {role}" for at_s, worker, role in changes))
    report("roles", rows, notes=f"Changes: {notes[0]}. At a load that can be served: {notes[1]}.")


def part(outcomes: Sequence[Outcome], phase: int) -> list[Outcome]:
    return [each for each in outcomes if phase * PHASE_S <= each.arrived_s < (phase + 1) * PHASE_S]


if __name__ == "__main__":
    main()
