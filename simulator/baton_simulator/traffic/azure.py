"""Reader of Azure's LLM inference traces (CSV): arrivals and lengths. No prompt shares anything with another."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from datetime import datetime
from itertools import count
from typing import Final

from baton_simulator.traffic.lines import malformed
from baton_simulator.traffic.trace import Request, Trace

BLOCK_TOKENS: Final = 512
COLUMNS: Final = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
MICROSECONDS: Final = 26
"""Length of a time stamp down to microseconds; the files have one more digit."""


def read(name: str, lines: Iterable[bytes]) -> Trace:
    """Return the trace. Raises InvalidRequest with the line's number."""
    rows = csv.reader(line.decode(errors="replace") for line in lines)
    if next(rows, None) != COLUMNS:
        raise malformed(name, 1, f"the columns are not {', '.join(COLUMNS)}")
    ids = count()
    requests: list[Request] = []
    for number, row in enumerate(rows, 2):
        try:
            stamp, prompt_tokens, output_tokens = row
            at_s = datetime.fromisoformat(f"{stamp[:MICROSECONDS]}+00:00").timestamp()
            lengths = int(prompt_tokens), int(output_tokens)
        except ValueError as error:
            raise malformed(name, number, error) from error
        if min(lengths) <= 0:
            raise malformed(name, number, f"{lengths[0]} prompt tokens and {lengths[1]} output tokens")
        blocks = tuple(next(ids) for _ in range(lengths[0] // BLOCK_TOKENS))
        requests.append(Request(at_s, blocks, *lengths))
    requests.sort(key=lambda request: request.at_s)
    start_s = requests[0].at_s if requests else 0.0
    shifted = [Request(each.at_s - start_s, each.blocks, each.prompt_tokens, each.output_tokens) for each in requests]
    return Trace(name, BLOCK_TOKENS, shifted)
