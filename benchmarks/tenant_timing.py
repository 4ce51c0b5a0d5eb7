"""Whether one tenant can tell by time what another has asked: `make bench-tenant-timing`.

In each pair one tenant (the victim) asks a prompt that nobody has asked before; then the other (the prober) times the
first token of the same prompt and of a fresh one of the same form, in random order. If caches told, the first would be
faster. Reported is the AUC: the probability that such a hit is faster than a miss, 0.5 if the times tell nothing. For
comparison the same with the prober's own earlier prompts, which are cached for it and must be told apart.

Fails if the AUC for the victim's prompts is above 0.55, or the one for its own below 0.9. Writes
`benchmarks/results/tenant_timing.json`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from benchmarks.deployment import deployment
from benchmarks.report import Row, report

AUC_MAX: Final = 0.55
CONTROL_MIN: Final = 0.9
WORDS: Final = 150
KEYS: Final = {"victim": "the-key-of-the-victim", "prober": "the-key-of-the-prober"}
PATIENCE: Final = {"ACCEPT_S": "20", "PLACE_RESEND_S": "5", "LOST_AFTER_S": "20"}
"""Settings with which the gateway sends each request once on a busy machine, too: a second attempt would find what the
first has computed."""
PLACES: Final = {"aggregated": "never", "separated": "always"}


class Prober:
    """Asks prompts as one tenant or the other, over one connection each."""

    def __init__(self, port: int, random: Random, mode: str) -> None:
        self._connections = {name: http.client.HTTPConnection("127.0.0.1", port, timeout=60) for name in KEYS}
        self._random = random
        self._mode = mode

    def prompt(self) -> str:
        return " ".join(f"{self._random.getrandbits(40):x}" for _ in range(WORDS))

    def ask(self, tenant: str, prompt: str) -> tuple[float, int]:
        """Return the time to the first token, and how many tokens of the prompt were cached."""
        connection = self._connections[tenant]
        body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        headers = {"authorization": f"Bearer {KEYS[tenant]}", "x-baton-disaggregation": self._mode}
        began_s = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        first = answer.readline()
        first_s = time.perf_counter() - began_s
        rest = answer.read().decode()
        assert answer.status == 200, first
        events = [line.removeprefix("data: ") for line in rest.splitlines() if line.startswith("data: {")]
        usage = json.loads(events[-1])["usage"]
        return first_s, int(usage["prompt_tokens_details"]["cached_tokens"])

    def pair(self, owner: str) -> tuple[float, float, int]:
        """Have `owner` ask a prompt; return the prober's times for it and a fresh one, and the cached tokens of it."""
        known, fresh = self.prompt(), self.prompt()
        self.ask(owner, known)
        found = {prompt: self.ask("prober", prompt) for prompt in self._random.sample((known, fresh), 2)}
        (hit_s, cached), (miss_s, cached_of_fresh) = found[known], found[fresh]
        assert not cached_of_fresh, "the request was sent twice, and found its own prompt"
        return hit_s, miss_s, cached


def auc(hits_s: Sequence[float], misses_s: Sequence[float]) -> float:
    """Return the probability that a hit is faster than a miss; ties count half."""
    won = sum((hit < miss) + (hit == miss) / 2 for hit in hits_s for miss in misses_s)
    return won / (len(hits_s) * len(misses_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--pairs", type=int, default=200, help="default: %(default)s")
    add("--engine", default="simulated", choices=("simulated", "vllm"), help="default: %(default)s")
    add("--vllm-python", default=".venv-vllm/bin/python", metavar="PATH", help="default: %(default)s")
    add("--seed", type=int, default=1, help="default: %(default)s")
    parsed = parser.parse_args()
    rows: list[Row] = []
    failed: list[str] = []
    settings = {"API_KEY": ",".join(KEYS.values())}
    settings |= {f"BATON_GATEWAY_{name}": value for name, value in PATIENCE.items()}
    flags = ["--engine", parsed.engine, "--vllm-python", parsed.vllm_python]
    with (
        tempfile.TemporaryDirectory() as folder,
        deployment(Path(folder), flags, settings) as ports,
    ):
        for place, mode in PLACES.items():
            prober = Prober(ports.http, Random(f"{parsed.seed} {place}"), mode)
            for _ in range(5):  # What is compiled and connected at first.
                prober.pair("victim")
            # In turn, so that both meet the same noise.
            pairs: dict[str, list[tuple[float, float, int]]] = {owner: [] for owner in KEYS}
            for _ in range(parsed.pairs):
                for owner, found in pairs.items():
                    found.append(prober.pair(owner))
            figures = {
                owner: auc([hit_s for hit_s, _, _ in found], [miss_s for _, miss_s, _ in found])
                for owner, found in pairs.items()
            }
            cached = max(tokens for _, _, tokens in pairs["victim"])
            rows.append(Row.against(f"AUC, {place}", "", figures["victim"], own_prompts=figures["prober"]))
            rows.append(Row(name=f"cached_tokens of the victim's prompts, most, {place}", unit="tokens", ours=cached))
            if figures["victim"] > AUC_MAX or cached:
                failed.append(f"{place}: the times tell the victim's prompts")
            if figures["prober"] < CONTROL_MIN:
                failed.append(f"{place}: the times do not tell even the prober's own prompts, so nothing is shown")
    report("tenant_timing", rows, notes=f"{parsed.pairs} pairs, {WORDS} random words each, engine {parsed.engine}")
    if failed:
        sys.exit("; ".join(failed))


if __name__ == "__main__":
    main()
