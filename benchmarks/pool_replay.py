"""What a KV pool under every worker brings: replays without it, with it and with loans, and its policy beside LRU.

Replays are those of `baton replay`: the scheduler's placement, the pool's directory and its policies are the product's
own code, engines and copies are simulated. Hit rates are of the directory alone, under an engine's cache. Writes
`benchmarks/results/pool_replay.json` and the tables in `docs/kv-pool-replay.md`.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import count, product
from pathlib import Path
from typing import Any, Final

from baton_simulator.capacity import at_load
from baton_simulator.policies import on_fleet
from baton_simulator.pool import WorkerPool
from baton_simulator.replay import Fleet, Replay
from baton_simulator.report import summarise
from baton_simulator.traffic.library import load
from baton_simulator.traffic.trace import Trace

from baton.pool.policy import PolicyName
from benchmarks.replay_page import replace_lines
from benchmarks.report import RESULTS, commit, machine

PAGE: Final = Path(__file__).parents[1] / "docs" / "kv-pool-replay.md"
BEGIN: Final = "<!-- the tables: make bench-pool-replay -->\n"
END: Final = "<!-- end of the tables -->\n"
SEED: Final = 1
LOAD: Final = 0.9
TRACES: Final = ("conversation", "agents")
FLEETS: Final = (Fleet(aggregated=4), Fleet(prefill=2, decode=2))
POOL_BYTES: Final = (256_000_000_000, 512_000_000_000)
POLICIES: Final = (PolicyName.S3_FIFO, PolicyName.LRU)
ENGINE_BLOCKS: Final = 1_000
SLOTS: Final = (3_000, 10_000, 30_000)
SCAN_EVERY: Final = 20
"""Requests between two scans."""
SCAN_BLOCKS: Final = 256
"""Blocks of a prompt that comes once."""


def main() -> int:
    replays = [row for trace in TRACES for fleet in FLEETS for row in compare(trace, fleet)]
    prompts = [request.blocks for request in load("conversation", SEED).requests]
    rates = [
        {
            "slots": slots,
            "scans": scans,
            **{str(each): hit_rate(prompts, slots, each, scans=scans) for each in POLICIES},
        }
        for scans in (False, True)
        for slots in SLOTS
    ]
    content = {"machine": machine(), "commit": commit(), "load": LOAD, "replays": replays, "hit_rates": rates}
    (RESULTS / "pool_replay.json").write_text(json.dumps(content, indent=2) + "\n")
    lines = [*_replay_table(replays), "", *_rate_table(rates)]
    replace_lines(PAGE, BEGIN, END, lines)
    print(*lines, sep="\n")
    return 0


def compare(name: str, fleet: Fleet) -> Iterator[dict[str, Any]]:
    """Replay a trace at the same times without a pool, and with pools of each size and policy, which lend or not."""
    trace = at_load(load(name, SEED), fleet, LOAD)
    yield play(trace, fleet)
    for pool_bytes, policy, loans in product(POOL_BYTES, POLICIES, (False, True)):
        yield play(trace, replace(fleet, kv_pool_bytes=pool_bytes, kv_pool_policy=policy, kv_loans=loans))


def play(trace: Trace, fleet: Fleet) -> dict[str, Any]:
    on, new_router = on_fleet("baton", fleet)
    summary = summarise(Replay(trace, on, new_router, seed=SEED).run(), on)
    pool_bytes, policy = fleet.kv_pool_bytes, fleet.kv_pool_policy
    loans = bool(pool_bytes) and fleet.kv_loans
    told = f"{trace.name}, {fleet}, {pool_bytes / 1e9:.0f} GB, {policy}, loans {'on' if loans else 'off'}"
    print(f"{told}: {summary.goodput:.1%}", file=sys.stderr)
    return {
        "trace": trace.name,
        "fleet": str(fleet),
        "pool_bytes": pool_bytes,
        "policy": str(policy) if pool_bytes else "",
        "loans": loans,
        **asdict(summary),
    }


# ---------------------------------------------------------------- hit rates of the directory


def scanned(prompts: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
    """Yield the prompts with long ones between them whose blocks come once."""
    fresh = count(1 + max(block for prompt in prompts for block in prompt))
    for number, prompt in enumerate(prompts, start=1):
        yield prompt
        if number % SCAN_EVERY == 0:
            yield [next(fresh) for _ in range(SCAN_BLOCKS)]


def hit_rate(prompts: Sequence[Sequence[int]], slots: int, policy: PolicyName, *, scans: bool) -> float:
    """Return the share of the prompts' blocks that are found in the pool, beyond the leading ones that the engine
    holds. Those of the scans are not counted.

    The engine keeps the blocks used last, of a prompt its tail first to leave.
    """
    pool = WorkerPool(slots=slots, policy=policy, block_tokens=1, block_bytes=1, bytes_per_s=1.0)
    engine: OrderedDict[int, None] = OrderedDict()
    found = 0
    for prompt in scanned(prompts) if scans else prompts:
        held = next((at for at, block in enumerate(prompt) if block not in engine), len(prompt))
        reach = pool.match(prompt, held)
        if reach > held:
            pool.promote(prompt, held, reach, 0.0)
            pool.promoted(prompt, held, reach)
        found += reach - held
        for block in reversed(prompt):
            engine[block] = None
            engine.move_to_end(block)
        while len(engine) > ENGINE_BLOCKS:
            engine.popitem(last=False)
        pool.save(prompt)
    return found / sum(map(len, prompts))


# ---------------------------------------------------------------- tables


def _replay_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield (
        "| trace, workers | pool | goodput | cached | promoted | borrowed | TTFT p50 | p90 | p99, s | TPOT p99, ms | "
        "refused |"
    )
    yield "|---" * 11 + "|"
    for row in rows:
        pool = f"{row['pool_bytes'] / 1e9:.0f} GB, {row['policy']}" if row["pool_bytes"] else "none"
        pool += ", loans" if row["loans"] else ""
        yield (
            f"| {row['trace']}, {row['fleet']} | {pool} | {row['goodput']:.1%} | {row['cached_share']:.3f} | "
            f"{row['promoted_share']:.3f} | {row['borrowed_share']:.3f} | {row['ttft_p50_s']:.2f} | "
            f"{row['ttft_p90_s']:.2f} | {row['ttft_p99_s']:.2f} | {row['tpot_p99_ms']:.0f} | {row['refused']} |"
        )


def _rate_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"| slots | scans | {' | '.join(map(str, POLICIES))} |"
    yield "|---" * (2 + len(POLICIES)) + "|"
    for row in rows:
        rates = " | ".join(f"{row[str(policy)]:.3f}" for policy in POLICIES)
        yield f"| {row['slots']:,} | {'yes' if row['scans'] else 'no'} | {rates} |"


if __name__ == "__main__":
    raise SystemExit(main())
