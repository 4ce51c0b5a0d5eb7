"""How even the work of a minute can be by chance: `python -m benchmarks.imbalance`, beside the replays' max/mean.

Requests are drawn from the part of a trace that is replayed, as many as come in a minute of a committed replay with 64
workers, and dealt out in turn or at random. Their work is what replays count, with an infinite shared cache.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from baton_simulator.capacity import ideal_cached_tokens
from baton_simulator.replay import Fleet
from baton_simulator.steps import MockerSteps
from baton_simulator.traffic import library
from baton_simulator.traffic.overlay import held_out_part

from benchmarks.replay import MODES, SEED
from benchmarks.replay_page import read_results

WORKERS: Final = 64
MINUTES: Final = 200
TRACES: Final = ("conversation", "skewed")
POLICIES: Final = {"aggregated": "baton", "separated": "baton-auto"}


def main() -> None:
    model, random = MockerSteps(), np.random.default_rng(SEED)
    decode_s = model.step_s(1.0, 1, 0) / Fleet().kv_tokens_in_use
    rows = [row for row in read_results() if row["workers"] == WORKERS and row["steps"] == "mocker"]
    for name in TRACES:
        part = held_out_part(library.load(name, SEED))
        cached = ideal_cached_tokens(part)
        prompts_s = [
            model.prompt_s(int(at), each.prompt_tokens) for at, each in zip(cached, part.requests, strict=True)
        ]
        answers_s = [each.output_tokens * each.prompt_tokens * decode_s for each in part.requests]
        for mode in MODES:
            is_aggregated = mode == MODES[0]
            work_s = np.array(prompts_s) + (np.array(answers_s) if is_aggregated else 0.0)
            workers = WORKERS if is_aggregated else WORKERS // 2
            for row in rows:
                if (row["trace"], row["mode"], row["policy"]) != (name, mode, POLICIES[mode]):
                    continue
                count = int(row["requests"] / row["duration_s"] * 60)
                shares: list[float] = []
                for deal in (np.arange(count) % workers, random.integers(0, workers, count)):
                    loads = [np.bincount(deal, random.choice(work_s, count), workers) for _ in range(MINUTES)]
                    shares.append(float(np.mean([load.max() / load.mean() for load in loads])))
                print(
                    f"{name}, {WORKERS} {mode}, {row['load']:.0%}: {count / workers:.0f} requests per worker and "
                    f"minute, work {work_s.mean():.3f} ± {work_s.std():.3f} s; max/mean in turn {shares[0]:.2f}, "
                    f"at random {shares[1]:.2f}, in replay {row['imbalance']:.2f}"
                )


if __name__ == "__main__":
    main()
