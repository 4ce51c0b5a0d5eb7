"""Hit rates of libCacheSim's policies: a program for an environment that has `libcachesim` (`.venv-libcachesim`).

stdin: `{"keys": [1, 2, …], "slots": [1000, …], "small_share": 0.45}`; stdout: `{"s3-fifo": [0.31, …], "lru": […]}`.
"""

# pyright: basic, reportMissingImports=false
# The library is in an environment of its own.

from __future__ import annotations

import json
import sys

import libcachesim


def main() -> None:
    asked = json.load(sys.stdin)
    keys, small_share = asked["keys"], asked["small_share"]
    rates: dict[str, list[float]] = {"s3-fifo": [], "lru": []}
    for slots in asked["slots"]:
        # Baton remembers as many keys that left the small queue as there are slots.
        s3_fifo = libcachesim.S3FIFO(
            slots, small_size_ratio=small_share, ghost_size_ratio=1.0, move_to_main_threshold=1
        )
        rates["s3-fifo"].append(hit_rate(s3_fifo, keys))
        rates["lru"].append(hit_rate(libcachesim.LRU(slots), keys))
    json.dump(rates, sys.stdout)


def hit_rate(cache: libcachesim.CacheBase, keys: list[int]) -> float:
    request = libcachesim.Request()
    request.obj_size = 1
    hits = 0
    for key in keys:
        request.obj_id = key
        hits += cache.get(request)
    return hits / len(keys)


if __name__ == "__main__":
    main()
