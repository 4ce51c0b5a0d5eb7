"""Dynamo's KV router in a process of its own: reads one event per line, answers each with a line.

Runs under an interpreter with `ai-dynamo`. It calls `SelectionService`, the selection that the frontend uses, and tells
it of caches by KV events over ZMQ, as engines do. Settings are the environment's, as of the frontend.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

SETTLE_S = 0.002
SETTLE_S_MAX = 10.0


class Service:
    def __init__(self, block_tokens: int) -> None:
        os.environ.setdefault("DYN_LOG", "error")
        import zmq  # pyright: ignore
        from dynamo._core import SelectionService  # pyright: ignore

        self._service: Any = SelectionService(indexer_threads=1)
        self._zmq: Any = zmq.Context()
        self._publishers: dict[int, Any] = {}
        self._sequence: dict[int, int] = {}
        self._block_tokens = block_tokens

    async def join(self, worker: int) -> None:
        publisher = self._publishers[worker] = self._zmq.socket(1)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        self._sequence[worker] = 0
        entry = {"worker_id": worker, "model_name": "model", "block_size": self._block_tokens}
        endpoints = {"endpoint": f"http://127.0.0.1:{worker}", "kv_events_endpoint": f"tcp://127.0.0.1:{port}"}
        await self._service.upsert_worker(entry | endpoints)

    async def arrive(self, request: str, tokens: list[int]) -> int:
        chosen = await self._service.select_and_reserve(
            {"model_name": "model", "token_ids": tokens, "selection_id": request}
        )
        return chosen["worker_id"]

    async def arrive_at_prefill(self, request: str, tokens: list[int]) -> int:
        """Do what `arrive` does, and count no active blocks: `SelectionService` lacks that setting of the frontend.

        Without any, the blocks that the request would add are the same for every worker.
        """
        chosen = await self._service.select({"model_name": "model", "token_ids": tokens})
        uncached = chosen["effective_prefill_tokens"]
        prompt: dict[str, Any] = {"isl_tokens": len(tokens), "block_hashes": [], "sequence_hashes": []}
        booking = {"selection_id": request, "worker_id": chosen["worker_id"], "effective_prefill_tokens": uncached}
        await self._service.create_reservation({"model_name": "model", **booking, **prompt})
        return chosen["worker_id"]

    async def store(self, worker: int, blocks: list[int], first: int, evicted: list[int], tokens: list[int]) -> None:
        """Publish that the worker holds the prompt's blocks, those from `first` on newly, and wait until it shows."""
        import msgspec

        events: list[dict[str, Any]] = []
        if evicted:
            events.append({"type": "BlockRemoved", "block_hashes": [block + 1 for block in evicted], "medium": "GPU"})
        if new := blocks[first:]:
            span = tokens[first * self._block_tokens : len(blocks) * self._block_tokens]
            stored = {"block_hashes": [block + 1 for block in new], "token_ids": span, "block_size": self._block_tokens}
            parent = {"parent_block_hash": blocks[first - 1] + 1 if first else None, "lora_id": None, "medium": "GPU"}
            events.append({"type": "BlockStored", **stored, **parent})
        until_s = time.monotonic() + SETTLE_S_MAX
        while True:
            held = await self._held(worker, tokens)
            if events and (held != len(blocks) or evicted):
                batch = msgspec.msgpack.encode([time.time(), events, 0])
                number = self._sequence[worker].to_bytes(8, "big")
                self._publishers[worker].send_multipart([b"", number, batch])
                self._sequence[worker] += 1
                events = []
            elif held == len(blocks):
                return
            if time.monotonic() > until_s:
                raise SystemExit(f"worker {worker} shows {held} of {len(blocks)} blocks")
            await asyncio.sleep(SETTLE_S)

    async def _held(self, worker: int, tokens: list[int]) -> int:
        scores = await self._service.overlap_scores({"model_name": "model", "token_ids": tokens})
        return next(each["device_blocks"] for each in scores["workers"] if each["worker_id"] == worker)

    async def first(self, request: str) -> None:
        await self._service.prefill_complete(request)

    async def last(self, request: str) -> None:
        await self._service.free_reservation(request)


async def main() -> None:
    service = Service(int(sys.argv[1]))
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(await getattr(service, name)(*arguments)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
