"""Report of an index for `baton index`."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Final

from msgspec import structs

from baton.messages.index import IndexedModel, IndexedPrefix, IndexQuery, IndexReport, WorkerReport
from baton.node.ports import Threads
from baton_kvindex.cold import ColdIndex
from baton_kvindex.counters import Counters
from baton_kvindex.index import Tier
from baton_kvindex.reconciler import LocalMatch, Reconciler

WORKERS_MAX: Final = 2000
"""Most workers in a report: about 400 kB, which fits into one message on any bus."""
PREFIXES_MAX: Final = 100


async def make_report(
    reconciler: Reconciler, threads: Threads, query: IndexQuery, found: LocalMatch, *, instance: str, writes: bool
) -> IndexReport:
    """Answer a query, for whose blocks `found` is the match; the trees are surveyed on a thread."""
    known_workers = reconciler.workers()
    workers = tuple(
        WorkerReport(
            worker=worker,
            generation=known.generation,
            model_digest=known.model_digest,
            sequence=known.sequence,
            held=reconciler.fingerprint(worker),
            pooled=reconciler.fingerprint(worker, Tier.POOL),
            filed=reconciler.fingerprint(worker, Tier.FILE),
            agreed_sequence=known.agreed_sequence,
            state=known.state,
            resync_reason=known.reason or "",
            drifts=known.drifts,
            predicted_tokens=known.audit.predicted_tokens,
            cached_tokens=known.audit.cached_tokens,
        )
        for worker, known in islice(sorted(known_workers.items()), WORKERS_MAX)
    )
    report = IndexReport(
        instance=instance,
        writes=writes,
        stream_sequence=reconciler.stream_sequence,
        speculative_blocks=reconciler.speculative_blocks,
        counters=_flat(reconciler.counters),
        workers=workers,
        left_out=max(0, len(known_workers) - WORKERS_MAX),
        held=found.held,
        pooled=found.pooled,
        filed=found.filed,
        speculative=reconciler.speculative(query.model_digest, query.blocks, found.held),
    )
    trees = {digest: tree for digest, tree in reconciler.models().items() if isinstance(tree, ColdIndex)}
    top = max(0, min(query.prefixes_max, PREFIXES_MAX))
    models = [await _describe(threads, digest, tree, top) for digest, tree in sorted(trees.items())]
    return structs.replace(report, models=tuple(models))


def _flat(counters: Counters) -> dict[str, int]:
    counts = asdict(counters)
    return counts | {f"resyncs_{reason}": count for reason, count in counts.pop("resyncs").items()}


async def _describe(threads: Threads, model_digest: str, tree: ColdIndex, prefixes_max: int) -> IndexedModel:
    survey = await threads.run(partial(tree.survey, prefixes_max))
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
