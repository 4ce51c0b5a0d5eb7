"""`baton replay`: a trace over simulated workers, for one or several policies."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Final

from baton.errors import ConfigurationError, InvalidRequest
from baton.pool.policy import PolicyName
from baton_simulator.capacity import at_load
from baton_simulator.policies import NAMES as POLICIES
from baton_simulator.policies import on_fleet
from baton_simulator.replay import Fleet, Outcome, Replay
from baton_simulator.report import Summary, as_text, refusals, summarise, table
from baton_simulator.steps import STEPS
from baton_simulator.traffic.library import NAMES, load
from baton_simulator.traffic.overlay import held_out_part, overlay, tuning_part
from baton_simulator.traffic.trace import Trace

SUMMARY: Final = "replay a recorded trace over simulated workers and compare policies"
WORKERS_MAX: Final = 10_000
COPIES_MAX: Final = 1_000
LOAD_MAX: Final = 100.0
KV_POOL_BYTES_MAX: Final = 1 << 50
PROGRESS_S: Final = 0.5
PARTS: Final[Mapping[str, Callable[[Trace], Trace]]] = {
    "all": lambda trace: trace,
    "tuning": tuning_part,
    "held-out": held_out_part,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Replay a trace on virtual time: every request is routed by the policy's own code, over workers whose engines, "
        "caches and links are simulated. The same arguments give the same figures."
    )
    parser.epilog = (
        "examples: baton replay conversation --workers 8 --load 0.9 --policy baton,round-robin; "
        "baton replay agents --prefill 4 --decode 8 --policy baton --out results"
    )
    add = parser.add_argument
    add("trace", help=f"{', '.join(NAMES)}, or a file: Mooncake's or the agents' JSON lines, Azure's CSV; also gzipped")
    add("--workers", type=int, metavar="N", help="workers that serve aggregated; default: 8")
    add("--prefill", type=int, metavar="N", help="prefill workers, with --decode and without --workers")
    add("--decode", type=int, metavar="N", help="decode workers")
    add(
        "--policy",
        default="baton",
        metavar="NAME[,NAME]",
        help=f"policies to compare: {', '.join(POLICIES)}, or all; default: %(default)s",
    )
    add(
        "--kv-pool-bytes",
        type=int,
        default=0,
        metavar="N",
        help="host memory of each worker's KV pool; default: 0, no pool",
    )
    add(
        "--kv-pool-policy",
        choices=[name.value for name in PolicyName],
        default=PolicyName.S3_FIFO.value,
        help="which block leaves a full pool first; default: %(default)s",
    )
    add("--no-kv-loans", dest="kv_loans", action="store_false", help="pools do not lend to other workers")
    add(
        "--load",
        type=float,
        metavar="SHARE",
        help="arrival rate as a share of what the workers could do with an infinite shared cache and perfect balance; "
        "default: the trace's own times",
    )
    add("--copies", type=int, default=1, metavar="N", help="copies of the trace side by side, with ids of their own")
    add("--part", choices=PARTS, default="all", help="tuning: half of the sessions, or 15 minutes; held-out: the rest")
    add("--steps", choices=STEPS, default="mocker", help="step times: of Dynamo's mocker, or noisy and uneven ones")
    add("--seed", type=int, default=1, help="seed of all that is left to chance; default: %(default)s")
    add("--out", type=Path, metavar="DIR", help="write replay.json, plots as PNG, and replay.html there")
    add("--json", action="store_true", help="print JSON instead of the table")


def run(parsed: argparse.Namespace) -> int:
    """Replay and print. Raises BatonError with one sentence."""
    fleet, policies = parse_fleet(parsed), parse_policies(parsed.policy)
    _check("--load", parsed.load, 0.0, LOAD_MAX)
    _check("--copies", parsed.copies, 0, COPIES_MAX)
    if parsed.out is not None:
        # Before the replay: it takes a while, and its plots could not be drawn.
        from baton_simulator.plots import require_plots

        require_plots()
    trace = PARTS[parsed.part](load(parsed.trace, parsed.seed))
    if not trace.requests:
        raise InvalidRequest(f"{parsed.trace}: the {parsed.part} part has no requests")
    trace = overlay(trace, parsed.copies, Random(f"{parsed.seed} copies"))
    if parsed.load is not None:
        trace = at_load(trace, fleet, parsed.load, copies=parsed.copies)
    if parsed.out is not None:
        # Before the replay, too: its result would be lost.
        try:
            parsed.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--out {parsed.out}: {error.filename}: {error.strerror}") from error
    outcomes: dict[str, list[Outcome]] = {}
    for policy in policies:
        on, new_router = on_fleet(policy, fleet)
        with Progress(policy, len(trace.requests)) as progress:
            replay = Replay(
                trace,
                on,
                new_router,
                seed=parsed.seed,
                steps_of=STEPS[parsed.steps],
                progress=progress.update,
            )
            outcomes[policy] = replay.run()
    summaries = {policy: summarise(each, fleet) for policy, each in outcomes.items()}
    title = f"{parsed.trace}, {fleet} workers, " + (f"load {parsed.load:g}" if parsed.load else "recorded times")
    result = as_json(title, parsed, summaries)
    if parsed.out is not None:
        from baton_simulator.plots import write

        try:
            write(parsed.out, title, outcomes, summaries, result)
        except OSError as error:
            raise ConfigurationError(f"--out {parsed.out}: {error.filename}: {error.strerror}") from error
    if parsed.json:
        print(result)
        return 0
    print(f"{title}, {len(trace.requests)} requests", as_text(table(summaries)), sep="\n")
    if refused := refusals(summaries):
        print(as_text(refused))
    return 0


def as_json(title: str, parsed: argparse.Namespace, summaries: Mapping[str, Summary]) -> str:
    policies = {policy: asdict(summary) for policy, summary in summaries.items()}
    content = {"title": title, "part": parsed.part, "copies": parsed.copies, "seed": parsed.seed, "policies": policies}
    return json.dumps(content, indent=2)


def parse_fleet(parsed: argparse.Namespace) -> Fleet:
    """Return the workers that the flags ask for. Raises ConfigurationError."""
    workers, prefill, decode = parsed.workers, parsed.prefill, parsed.decode
    for flag, count in (("--workers", workers), ("--prefill", prefill), ("--decode", decode)):
        _check(flag, count, 0, WORKERS_MAX)
    if workers and (prefill or decode):
        raise ConfigurationError("--workers serve aggregated; without them, give --prefill and --decode")
    if bool(prefill) != bool(decode):
        raise ConfigurationError("--prefill and --decode belong together: each needs the other")
    _check("--kv-pool-bytes", parsed.kv_pool_bytes, -1, KV_POOL_BYTES_MAX)
    return Fleet(
        aggregated=0 if prefill else workers or 8,
        prefill=prefill or 0,
        decode=decode or 0,
        kv_pool_bytes=parsed.kv_pool_bytes,
        kv_pool_policy=PolicyName(parsed.kv_pool_policy),
        kv_loans=parsed.kv_loans,
    )


def parse_policies(text: str) -> list[str]:
    """Return the policies' names. Raises ConfigurationError."""
    names = list(POLICIES) if text == "all" else text.split(",")
    for name in names:
        if name not in POLICIES:
            raise ConfigurationError(f"there is no policy {name!r}: name some of {', '.join(POLICIES)}")
    return list(dict.fromkeys(names))


def _check(flag: str, value: float | None, above: float, most: float) -> None:
    if value is not None and not above < value <= most:
        least = above + 1 if isinstance(value, int) else above
        raise ConfigurationError(f"{flag} is {value:g}, which is not between {least:g} and {most:g}")


class Progress:
    """Progress of one replay on stderr, in one line where that is a terminal, else at the end only."""

    def __init__(self, policy: str, requests: int) -> None:
        self._policy = policy
        self._requests = requests
        self._began_s = self._shown_s = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._ended = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_error: object) -> None:
        self._show("\n")

    def update(self, ended: int) -> None:
        self._ended = ended
        if self._is_terminal and time.monotonic() - self._shown_s >= PROGRESS_S:
            self._shown_s = time.monotonic()
            self._show("")

    def _show(self, end: str) -> None:
        start = "\r" if self._is_terminal else ""
        elapsed_s = time.monotonic() - self._began_s
        text = f"{start}{self._policy}: {self._ended} of {self._requests} requests, {elapsed_s:.1f} s"
        print(text, end=end, file=sys.stderr, flush=True)
