"""`python -m tests.faults`: random faults on a running `baton up` while clients stream.

Every process except the gateway is a victim: NATS, Redis, the index, the scheduler and every worker are killed, or
stopped for a while. The simulated engines derive the next token from the KV bytes, so an answer equal to the
undisturbed one shows that no wrong, stale or missing block was used. Workers have KV pools with files and lend to each
other; after each fault, the index has to agree with all workers about all tiers in time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import httpx

from baton.cli.asking import NATS_URL_FILE
from tests.faults.fingerprints import Fingerprints, watched
from tests.faults.record import Fault, Stream, report, summary
from tests.faults.streams import SILENCE_S, make_prompts, record_undisturbed, stream_until
from tests.faults.strikes import plan, plan_each, strike_all, victim_names
from tests.harness.launcher import Launcher, launched
from tests.harness.limits import HANG_S

PROGRESS_S = 10.0
END_S = 90.0
"""Time for the answers that are still running after the last fault."""
BLOCK_BYTES = 32 * 512
ENGINE = {
    "speed": 1.0,
    "step_fixed_s": 0.015,
    # Few enough that caches change all the time, yet enough for all clients on one worker.
    "blocks": 400,
    "eos_probability": 0.0,
    "seed": 1,
}
TIERS = ("--kv-pool-bytes", str(300 * BLOCK_BYTES), "--kv-file-bytes", str(600 * (BLOCK_BYTES + 4096)))


def main() -> int:
    parsed = parse(sys.argv[1:])
    folder = parsed.folder or Path(tempfile.mkdtemp(prefix="baton-faults-"))
    # Pairs only: faults are to hit the hand-off of KV.
    workers = ("--prefill", str(parsed.prefill), "--decode", str(parsed.decode), "--disaggregation", "always")
    print(f"seed {parsed.seed}; logs are in {folder}", flush=True)
    with launched(folder, *workers, *TIERS, "--engine-options", json.dumps(ENGINE)) as launcher:
        nats_url = (folder / ".run" / str(launcher.port) / NATS_URL_FILE).read_text().strip()
        records, faults, fingerprints = asyncio.run(run(parsed, launcher, nats_url))
        launcher.process.send_signal(signal.SIGINT)
        ended = launcher.process.wait(HANG_S)
    for line in (*report(records, faults), fingerprints.summary()):
        print(line)
    good = ended == 0 and fingerprints.good and not any(record.error or record.wrong for record in records)
    print("good" if good else f"NOT good; `baton up` ended with {ended}")
    return 0 if good else 1


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description="Kill and stop random processes of a `baton up` with simulated engines while clients stream, and "
        "compare every answer with an undisturbed run. Ends with 1 where a request failed, a byte is wrong, or the "
        "index and a worker differed for too long.",
    )
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="how long faults fall; default: %(default)g")
    add("--each", action="store_true", help="kill and stop every process once, one after the other")
    add("--every-s", type=float, default=4.0, help="time between two faults; default: %(default)g")
    add("--stop-s", type=float, default=3.0, help="longest stop; default: %(default)g")
    add("--equal-s", type=float, default=5.0, help="time for index and workers to agree again; default: %(default)g")
    add("--seed", type=int, default=time.time_ns() % 1_000_000, help="decides victims and prompts; default: the clock")
    add("--clients", type=int, default=8, help="streams at the same time; default: %(default)d")
    add("--prompts", type=int, default=32, help="different prompts; default: %(default)d")
    add("--prefill", type=int, default=3, help="prefill workers; default: %(default)d")
    add("--decode", type=int, default=3, help="decode workers; default: %(default)d")
    add("--folder", type=Path, default=None, help="where logs and data go; default: a new one under /tmp")
    return parser.parse_args(arguments)


async def run(
    parsed: argparse.Namespace, launcher: Launcher, nats_url: str
) -> tuple[list[Stream], list[Fault], Fingerprints]:
    """Stream under faults; return the record of every request, every fault, and when the index agreed again."""
    random = Random(parsed.seed)
    prompts = make_prompts(parsed.prompts, random)
    records: list[Stream] = []
    faults: list[Fault] = []
    stopped = asyncio.Event()
    limits = httpx.Limits(max_connections=None)
    names = victim_names(parsed.prefill, parsed.decode)
    async with (
        watched(nats_url, names[-parsed.prefill - parsed.decode :], parsed.equal_s) as fingerprints,
        httpx.AsyncClient(base_url=launcher.url, timeout=httpx.Timeout(SILENCE_S), limits=limits) as client,
    ):
        answers = await record_undisturbed(client, prompts)
        print(f"{len(answers)} prompts were answered undisturbed; faults begin", flush=True)
        began_s = time.monotonic()

        def now_s() -> float:
            return time.monotonic() - began_s

        if parsed.each:
            planned = plan_each(names, random, stop_s=parsed.stop_s)
        else:
            planned = plan(names, random, every_s=parsed.every_s, until_s=parsed.seconds, stop_s_max=parsed.stop_s)
        clients = [
            stream_until(
                stopped,
                client,
                answers,
                records,
                name=f"faults-{number}",
                random=Random(f"{parsed.seed} {number}"),
                now_s=now_s,
            )
            for number in range(parsed.clients)
        ]
        async with asyncio.TaskGroup() as tasks:
            streaming = [tasks.create_task(client) for client in clients]
            telling = tasks.create_task(tell_progress(records, faults, now_s))
            judge, pid = fingerprints.await_equal, launcher.process.pid
            await strike_all(planned, pid, faults, now_s, judge, is_patient=parsed.each)
            if not parsed.each:
                await asyncio.sleep(max(0.0, parsed.seconds - now_s()))
            stopped.set()
            _, late = await asyncio.wait(streaming, timeout=END_S)
            for task in (*late, telling):
                task.cancel()
    return records, faults, fingerprints


async def tell_progress(records: list[Stream], faults: list[Fault], now_s: Callable[[], float]) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        print(f"{now_s():5.0f} s: {summary(records, faults)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
