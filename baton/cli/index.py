"""`baton index`: the content of every index, asked over the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast
from uuid import uuid4

import msgspec

from baton import subjects
from baton.blocks import hash_blocks, root_key
from baton.bus import Bus, NatsBus
from baton.cli.asking import CONNECT_TIMEOUT_S, ask_all, hear_workers, table
from baton.errors import InvalidRequest, MalformedMessage, Unavailable
from baton.messages.base import pack_tokens
from baton.messages.index import IndexQuery, IndexReport, WorkerReport
from baton.messages.workers import Heartbeat

MODEL_CHARS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A query: with `prompt` or `tokens`, which workers hold it; with neither, only the index's state."""

    prompt: str = ""
    tokens: Sequence[int] = ()
    model: str = ""
    salt: str = ""
    prefixes_max: int = 10


def index(question: Question, *, nats_url: str, as_json: bool) -> str:
    """Return all indexes' content, as text or as JSON. Raises BatonError with one sentence."""
    reports, blocks = asyncio.run(_index(question, nats_url))
    if not as_json:
        return "\n".join(line for report in reports for line in draw(report, blocks))
    return msgspec.json.format(msgspec.json.encode(reports), indent=2).decode()


def parse_tokens(text: str) -> list[int]:
    """Return the token ids in a comma-separated list. Raises InvalidRequest."""
    try:
        tokens = [int(part) for part in text.split(",")] if text else []
        pack_tokens(tokens)
    except (ValueError, MalformedMessage) as error:
        raise InvalidRequest(f"{text[:80]!r} is no list of token ids like 1,2,3") from error
    return tokens


async def _index(question: Question, nats_url: str) -> tuple[list[IndexReport], int]:
    bus = await NatsBus.connect(nats_url, name="baton-index", timeout_s=CONNECT_TIMEOUT_S)
    try:
        asker, model_digest, blocks = uuid4().hex, "", b""
        if question.prompt or question.tokens:
            worker = await _find_model(bus, question.model)
            tokens = question.tokens or _encode(worker.model_path, question.prompt)
            model_digest = worker.model_digest
            blocks = hash_blocks(root_key(model_digest, salt=question.salt), pack_tokens(tokens), worker.block_tokens)
            if not blocks:
                raise InvalidRequest(f"{len(tokens)} tokens are less than a block of {worker.block_tokens}")
        query = IndexQuery(asker=asker, prefixes_max=question.prefixes_max, model_digest=model_digest, blocks=blocks)
        answer_to = subjects.index_answers(asker)
        reports = await ask_all(bus, subjects.INDEX_QUERIES, query, answer_to, IndexReport)
    finally:
        await bus.close()
    if not reports:
        raise Unavailable("no index answered: does Baton run on this message bus?")
    return sorted(reports, key=lambda report: (not report.writes, report.instance)), len(blocks) // 16


async def _find_model(bus: Bus, name: str) -> Heartbeat:
    """Return a heartbeat of a worker that serves the model. Raises InvalidRequest."""
    beats = {heartbeat.model: heartbeat for heartbeat in await hear_workers(bus)}
    if name in beats or (not name and len(beats) == 1):
        return beats[name or next(iter(beats))]
    raise InvalidRequest(f"name one of the models that are served with --model: {', '.join(sorted(beats))}")


def _encode(model_path: str, prompt: str) -> list[int]:
    """Return the prompt's token ids. Raises InvalidRequest if the tokenizer is not on this machine."""
    file = Path(model_path) / "tokenizer.json"
    if not file.is_file():
        raise InvalidRequest(f"there is no {file} here to cut the prompt into tokens: give them with --tokens")
    # Imported here, since only this needs it.
    from tokenizers import Tokenizer

    tokenizer = cast("Any", Tokenizer).from_file(str(file))
    tokenizer.no_truncation()
    return tokenizer.encode(prompt).ids


# ---------------------------------------------------------------- as text


def draw(report: IndexReport, asked_blocks: int) -> Iterator[str]:
    """Yield one index's report line by line, the holders of a prompt of `asked_blocks` included."""
    role = "writes to Redis" if report.writes else "does not write"
    yield f"index {report.instance}: {role}; event {report.stream_sequence} of the stream was the last"
    for model in report.models:
        yield (
            f"  model {model.model_digest[:MODEL_CHARS]}: {model.blocks} blocks in memory, {model.cold_blocks} cold; "
            f"held {model.holdings} times; {model.nodes} nodes, {model.depth} blocks deep, {model.bytes / 1e6:.1f} MB"
        )
        yield from table(
            ("shared by workers", "blocks", "last block"),
            [(str(each.workers), str(each.blocks), each.last.hex()) for each in model.prefixes],
        )
    header = ("worker", "generation", "blocks", "pooled", "filed", "event", "state", "predicted hits", "found")
    yield from table(header, [_row(worker) for worker in report.workers])
    if report.left_out:
        yield f"    and {report.left_out} workers more"
    counted = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in report.counters.items() if count)
    yield f"  counted since it started: {counted or 'nothing'}; {report.speculative_blocks} blocks are speculative"
    if asked_blocks:
        yield f"  of the prompt's {asked_blocks} blocks"
        holds = report.held
        will_hold = holds | report.speculative
        with_pool = holds | report.pooled
        with_file = with_pool | report.filed
        rows = [
            (worker, *(str(each.get(worker, 0)) for each in (holds, with_pool, with_file, will_hold)))
            for worker in sorted(with_file | will_hold)
        ]
        yield from table(("worker", "holds", "with its pool", "with its file", "will hold"), rows)


def _row(worker: WorkerReport) -> tuple[str, ...]:
    if worker.state != "synced":
        state = f"resync {worker.state}: {worker.resync_reason}"
    elif worker.drifts:
        state = f"differed {worker.drifts} times"
    elif worker.agreed_sequence < 0:
        state = "not compared yet"
    else:
        state = f"the same at event {worker.agreed_sequence}"
    return (
        worker.worker,
        str(worker.generation),
        str(worker.held.blocks),
        str(worker.pooled.blocks),
        str(worker.filed.blocks),
        str(worker.sequence),
        state,
        str(worker.predicted_tokens),
        str(worker.cached_tokens),
    )
