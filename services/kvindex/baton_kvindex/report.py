"""What an index tells of itself, for `baton index`."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from itertools import islice
from typing import Final

from msgspec import structs

from baton.messages import IndexedModel, IndexedPrefix, IndexedWorker, IndexQuery, IndexReport
from baton_kvindex.cold import ColdIndex
from baton_kvindex.follower import Follower

WORKERS_MAX: Final = 2000
"""About 400 kB: what one message carries everywhere."""
PREFIXES_MAX: Final = 100


async def make_report(
    follower: Follower, query: IndexQuery, held: dict[str, int], *, instance: str, writes: bool
) -> IndexReport:
    """Answer a query, of whose blocks this is held; the trees are looked at on a thread."""
    coming = follower.coming(query.model_digest, query.blocks)
    lives = follower.lives()
    workers = tuple(
        IndexedWorker(
            worker=worker,
            generation=known.generation,
            model_digest=known.model_digest,
            sequence=known.sequence,
            held=follower.fingerprint(worker),
            agreed_sequence=known.agreed_sequence,
            resync=known.resync,
            drifts=known.drifts,
            predicted_tokens=known.audit.predicted_tokens,
            cached_tokens=known.audit.cached_tokens,
        )
        for worker, known in islice(sorted(lives.items()), WORKERS_MAX)
    )
    report = IndexReport(
        instance=instance,
        writes=writes,
        stream_sequence=follower.stream_sequence,
        expected_blocks=follower.expected_blocks,
        counters=asdict(follower.counters),
        workers=workers,
        left_out=max(0, len(lives) - WORKERS_MAX),
        held=held,
        coming={worker: count for worker, count in coming.items() if count > held.get(worker, 0)},
    )
    trees = {digest: tree for digest, tree in follower.models().items() if isinstance(tree, ColdIndex)}
    top = max(0, min(query.prefixes_max, PREFIXES_MAX))
    models = [await _describe(digest, tree, top) for digest, tree in sorted(trees.items())]
    return structs.replace(report, models=tuple(models))


async def _describe(model_digest: str, tree: ColdIndex, prefixes_max: int) -> IndexedModel:
    survey = await asyncio.to_thread(tree.survey, prefixes_max)
    footprint = tree.footprint()
    return IndexedModel(
        model_digest=model_digest,
        blocks=footprint.blocks,
        cold_blocks=tree.cold_blocks,
        holdings=tree.size().holdings,
        bytes=footprint.bytes,
        nodes=footprint.nodes,
        depth=survey.depth,
        prefixes=tuple(
            IndexedPrefix(last=last, blocks=blocks, workers=workers) for last, blocks, workers in survey.prefixes
        ),
    )
