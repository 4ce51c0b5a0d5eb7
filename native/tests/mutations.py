"""Faults that the C++ tests must find: each is planted in a copy of the sources, built, and looked for.

`python native/tests/mutations.py [--jobs N] [NAME…]` prints what found each, and fails where one is not found, or where
its text no longer occurs exactly once in the file it names, so the list cannot rot.
"""

# The texts are lines as they stand in the sources, and this is a program that prints.
# ruff: noqa: E501, T201
from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

NATIVE = Path(__file__).resolve().parent.parent
OPERATIONS = 200_000
LIMIT_S = 300
"""Of one run: a fault may well make a test hang, which also is noticed."""


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    text: str
    replacement: str
    test: str = "model"
    """What must fail: the model, or the C++ tests whose names contain this."""


MUTATIONS = [
    # Leases.
    Mutation(
        "the generation is not read again after the bytes",
        "transfer/lease.cpp",
        "    trailer.generation = leases_.at(reader.ask.key).generation;\n  }\n  out_.send(id.first, trailer);",
        "    trailer.generation = leases_.at(reader.ask.key).generation;\n  }\n"
        "  if (trailer.generation == 0) trailer.generation = 1;\n  out_.send(id.first, trailer);",
    ),
    Mutation(
        "a revocation forgets the chunks that are being read",
        "transfer/lease.cpp",
        "  reader.held.clear();\n  reader.in_flight.clear();\n",
        "  reader.held.clear();\n",
    ),
    Mutation(
        "a revocation forgets the chunks that are held back",
        "transfer/lease.cpp",
        "  reader.held.clear();\n  reader.in_flight.clear();\n",
        "  reader.in_flight.clear();\n",
    ),
    Mutation(
        "a revocation does not raise the generation",
        "transfer/lease.cpp",
        "  ++lease.generation;\n  lease.open = false;",
        "  lease.open = false;",
    ),
    Mutation(
        "a revocation keeps the blocks",
        "transfer/lease.cpp",
        "  lease.blocks.clear();\n  lease.ready_tokens.assign(geometry_.layers, 0);",
        "  lease.ready_tokens.assign(geometry_.layers, 0);",
    ),
    Mutation(
        "a revocation keeps the watermarks",
        "transfer/lease.cpp",
        "  lease.blocks.clear();\n  lease.ready_tokens.assign(geometry_.layers, 0);",
        "  lease.blocks.clear();",
    ),
    Mutation(
        "a revocation is not told to the sinks",
        "transfer/lease.cpp",
        "    if (!readers_.at(id).ask.data_only) out_.send(id.first, frames::Revoked{id.second, lease.generation});\n",
        "",
    ),
    Mutation(
        "chunks are served beyond the watermark",
        "transfer/lease.cpp",
        "  if (lease->ready_tokens[request.layer / geometry_.tensors_per_layer()] < needed_tokens) return false;\n",
        "",
    ),
    Mutation(
        "the watermark is compared with whole blocks rounded down",
        "transfer/lease.cpp",
        "std::min<std::uint64_t>(last * geometry_.block_tokens, reader.ask.tokens)",
        "std::min<std::uint64_t>((last - 1) * geometry_.block_tokens, reader.ask.tokens)",
    ),
    Mutation(
        "chunks are served after a revocation",
        "transfer/lease.cpp",
        "  Lease* lease = current(reader.ask.key, request.generation);\n"
        "  if (lease == nullptr) return true;  // It crossed a revocation.",
        "  const auto any = leases_.find(reader.ask.key);\n"
        "  if (any == leases_.end()) return true;\n  Lease* lease = &any->second;",
    ),
    Mutation(
        "a chunk may lie outside what was asked for",
        "transfer/lease.cpp",
        "request.first_block < reader.ask.first_block ||\n      last > asked_last || last > lease->blocks.size() ||",
        "last > lease->blocks.size() ||",
    ),
    Mutation(
        "a chunk may have any size",
        "transfer/lease.cpp",
        "      request.blocks > chunk_blocks(geometry_, options_.limits) || request.first_block",
        "      request.first_block",
    ),
    Mutation(
        "a sink may ask for any number of chunks",
        "transfer/lease.cpp",
        " ||\n      reader.in_flight.size() + reader.held.size() >= options_.limits.chunks_served) {",
        ") {",
    ),
    Mutation(
        "any number of asks is parked",
        "transfer/lease.cpp",
        " || (parks && parked_.size() >= options_.limits.parked)) {",
        ") {",
    ),
    Mutation(
        "any number of sinks reads a lease",
        "transfer/lease.cpp",
        "  if (beside >= options_.limits.readers_per_lease || (",
        "  if ((",
    ),
    Mutation(
        "readers are kept after their connection closed",
        "transfer/lease.cpp",
        "    ++reader;\n    detach(id);\n",
        "    ++reader;\n",
    ),
    Mutation(
        "parked asks are kept after their connection closed",
        "transfer/lease.cpp",
        "  } else {\n    unpark(id, key);\n  }\n  readers_.erase(id);",
        "  }\n  readers_.erase(id);",
    ),
    Mutation(
        "parked asks never expire",
        "transfer/lease.cpp",
        "      if (now_s >= forget_s) {\n        detach(ReaderId(id));\n      } else {\n        out_.wake_at(forget_s);\n      }\n",
        "",
    ),
    Mutation(
        "leases never expire",
        "transfer/lease.cpp",
        "    if (now_s >= lease->second.expires_s) {",
        "    if (false) {",
    ),
    Mutation(
        "the source sets no alarm for a lease",
        "transfer/lease.cpp",
        "    } else {\n      out_.wake_at(lease->second.expires_s);\n    }\n    lease = next;",
        "    }\n    lease = next;",
    ),
    Mutation(
        "keep-alives do not keep a lease",
        "transfer/lease.cpp",
        "  if (const auto lease = leases_.find(reader->second.ask.key); lease != leases_.end()) claim(now_s, lease->second);\n",
        "",
    ),
    Mutation(
        "an end is not told to the sinks",
        "transfer/lease.cpp",
        "    out_.send(id.first, frames::Ended{id.second, cause == Cause::none ? Cause::expired : cause, detail});\n"
        "    readers_.erase(id);",
        "    readers_.erase(id);",
    ),
    Mutation(
        "an end is not reported",
        "transfer/lease.cpp",
        "  out_.put(Report{.kind = kind, .key = key, .cause = cause, .detail = detail});\n",
        "  if (!by_sink) out_.put(Report{.kind = kind, .key = key, .cause = cause, .detail = detail});\n",
    ),
    Mutation(
        "a release before the lease is forgotten",
        "transfer/lease.cpp",
        "    if (before.by_sink) return end(now_s, found, before.cause, before.detail, true);\n",
        "",
    ),
    Mutation(
        "commands of an older generation count",
        "transfer/lease.cpp",
        "  if (found == leases_.end() || found->second.generation != generation || !found->second.open) return nullptr;\n",
        "  if (found == leases_.end() || !found->second.open) return nullptr;\n",
    ),
    Mutation(
        "a sink that wants more than there is waits",
        "transfer/lease.cpp",
        "  if (!lease.complete_tokens || wanted <= *lease.complete_tokens) return false;\n",
        "  return false;\n",
    ),
    # Pulls.
    Mutation(
        "the trailer's generation is not compared",
        "transfer/pull.cpp",
        "  if (chunk.trailer_generation != pull.generation) return restart(pull);\n",
        "",
    ),
    Mutation(
        "the checksum is ignored",
        "transfer/pull.cpp",
        "  if (lane.checksum && chunk.placed_crc != chunk.trailer_crc) {",
        "  if (false) {",
    ),
    Mutation(
        "a failed pull is reported without a fence",
        "transfer/pull.cpp",
        "  if (held) send_release(peer, pull.key, cause);\n"
        "  if (!pull.stopping) out_.put(StopPlacing{pull.id});\n  pull.stopping = true;\n",
        "  if (held) send_release(peer, pull.key, cause);\n  ++stats_.pulls_failed;\n"
        "  out_.put(report_of(pull, ReportKind::pull_failed));\n"
        "  by_key_.erase(pull.key);\n  pull.deadline_s = 1e300;\n",
    ),
    Mutation(
        "a restart does not wait for writes",
        "transfer/pull.cpp",
        "  if (!pull.stopping) out_.put(StopPlacing{pull.id});\n  pull.stopping = true;\n}\n\nvoid Sink::fail(",
        "  if (!pull.stopping) out_.put(StopPlacing{pull.id});\n}\n\nvoid Sink::fail(",
    ),
    Mutation(
        "a restart keeps what was verified",
        "transfer/pull.cpp",
        "  pull.verified.assign(pull.pool.tensors(), 0);\n",
        "  pull.verified.resize(pull.pool.tensors());\n",
    ),
    Mutation(
        "a restart keeps the chunks in flight",
        "transfer/pull.cpp",
        "  pull.again.clear();\n  forget_requests(pull);\n",
        "  pull.again.clear();\n",
    ),
    Mutation(
        "a restart keeps the watermarks",
        "transfer/pull.cpp",
        "  pull.ready_tokens.assign(pull.pool.layers, 0);\n",
        "  pull.ready_tokens.resize(pull.pool.layers);\n",
    ),
    Mutation(
        "a pull is done one chunk early",
        "transfer/pull.cpp",
        "  if (pull.blocks_verified == std::uint64_t{pull.pool_blocks} * pull.pool.tensors())",
        "  if (pull.blocks_verified + 1 >= std::uint64_t{pull.pool_blocks} * pull.pool.tensors())",
    ),
    Mutation(
        "a chunk counts before it lies in place",
        "transfer/pull.cpp",
        "  if (chunk->ended || (frame.slot < 0 && !chunk->placed) ||",
        "  if (chunk->ended ||",
    ),
    Mutation(
        "a chunk is placed twice",
        "transfer/pull.cpp",
        "  if (chunk->placing || chunk->run.blocks * pull->pool.block_bytes != data.bytes) return false;\n",
        "  if (chunk->run.blocks * pull->pool.block_bytes != data.bytes) return false;\n",
    ),
    Mutation(
        "an inline payload's length is not checked",
        "transfer/pull.cpp",
        "  if (chunk->placing || chunk->run.blocks * pull->pool.block_bytes != data.bytes) return false;\n",
        "  if (chunk->placing) return false;\n",
    ),
    Mutation(
        "a grant is taken twice",
        "transfer/pull.cpp",
        "  if (chunk->placing) return false;\n  chunk->granted = true;",
        "  chunk->granted = true;",
    ),
    Mutation(
        "a chunk goes to the blocks of another",
        "transfer/pull.cpp",
        "    const auto first = pull.blocks.begin() + chunk.run.first;\n",
        "    const auto first = pull.blocks.begin() + (chunk.run.first > 0 ? chunk.run.first - 1 : 0);\n",
    ),
    Mutation(
        "blocks before the pull's first are asked for",
        "transfer/pull_lanes.cpp",
        ".first_block = pull.first_block + run.first,",
        ".first_block = run.first,",
    ),
    Mutation(
        "what was lost with a connection is not asked for again",
        "transfer/pull_peers.cpp",
        "        pull.again.push_back(chunk->second.run);\n",
        "",
    ),
    Mutation(
        "chunks of a lost connection still count",
        "transfer/pull_peers.cpp",
        "        pull.in_flight.erase(chunk);\n",
        "",
    ),
    Mutation(
        "any connection may speak for a pull",
        "transfer/pull.cpp",
        "peer == nullptr || found->second.endpoint != peer->endpoint) return nullptr;",
        "peer == nullptr) return nullptr;",
    ),
    Mutation(
        "a slot is credited twice",
        "transfer/core.cpp",
        "                     out_.send(e.connection, frames::CreditSlot{e.slot});\n",
        "                     out_.send(e.connection, frames::CreditSlot{e.slot});\n"
        "                     out_.send(e.connection, frames::CreditSlot{e.slot});\n",
    ),
    Mutation(
        "the slot of a chunk nobody wants is not credited",
        "transfer/pull.cpp",
        "    if (frame.slot >= 0) out_.send(connection, frames::CreditSlot{frame.slot});\n",
        "",
    ),
    Mutation(
        "the budget is not watched",
        "transfer/pull.cpp",
        "  if (now_s >= pull.deadline_s) {",
        "  if (false) {",
    ),
    Mutation(
        "a stalled source is waited for",
        "transfer/pull.cpp",
        '    if (now_s >= give_up_s) {\n      return fail(pull, Cause::stalled, "nothing came',
        '    if (false) {\n      return fail(pull, Cause::stalled, "nothing came',
    ),
    Mutation(
        "a done pull does not release its lease",
        "transfer/pull.cpp",
        "  send_release(peers_.at(pull.endpoint), pull.key, Cause::none);\n  out_.put(report_of(pull, ReportKind::pull_done));",
        "  out_.put(report_of(pull, ReportKind::pull_done));",
    ),
    Mutation(
        "no keep-alives are sent",
        "transfer/pull.cpp",
        "      out_.send(connection, frames::KeepAlive{pull.id});\n",
        "",
    ),
    Mutation(
        "idle connections are kept",
        "transfer/pull_peers.cpp",
        "      forgotten = !wanted && now_s >= peer.idle_since_s + options_.limits.idle_s;\n",
        "",
    ),
    Mutation(
        "an unreachable source is tried for ever",
        "transfer/pull_peers.cpp",
        '      fail_all(peer.endpoint, Cause::unreachable, "cannot reach " + address + others + ": " + peer.lost_detail);\n',
        "",
    ),
    # Conversion.
    Mutation(
        "a chunk counts before it is converted",
        "transfer/pull.cpp",
        "  if (!lane.staging) return count(now_s, pull, chunk);\n",
        "  if (lane.staging) convert(pull, sequence, chunk);\n  if (true) return count(now_s, pull, chunk);\n",
        "staging",
    ),
    Mutation(
        "tokens before the pull's first are converted",
        "transfer/pull_staging.cpp",
        "std::max(staged_origin, pull.first_token);",
        "staged_origin;",
        "staging",
    ),
    Mutation(
        "tokens after the pull's last are converted",
        "transfer/pull_staging.cpp",
        "std::min(staged_origin + chunk.run.blocks * pull.pool.block_tokens, pull.tokens);",
        "staged_origin + chunk.run.blocks * pull.pool.block_tokens;",
        "staging",
    ),
    Mutation("two chunks are staged in one slot", "transfer/staging.h", "    *free = pull;\n", "", "staging"),
    Mutation(
        "a stopped pull is still converted",
        "transfer/converter.cpp",
        "  std::erase_if(waiting_, [&](const Convert& chunk) { return chunk.pull == pull; });\n",
        "  (void)pull;\n",
        "staging",
    ),
    Mutation(
        "a conversion of an old generation counts",
        "transfer/pull.cpp",
        "  pull.converting.clear();\n",
        "",
        "staging",
    ),
    Mutation(
        "what waited for its conversion is not asked for again",
        "transfer/pull_peers.cpp",
        "      if (entry.second.connection == connection) pull.again.push_back(entry.second.run);\n",
        "",
        "staging",
    ),
    Mutation(
        "one tensor's conversion writes the other's",
        "layout/convert.cpp",
        "{&kPlanes[tensor % block.tensors], 1});",
        "{kPlanes, 2});",
        "staging",
    ),
    # Handshake and core.
    Mutation(
        "the sink's proof is not compared",
        "transfer/handshake.cpp",
        "  if (!same(identify.proof, proof(Side::sink, identify.identity))) {",
        "  if (false) {",
        "strangers",
    ),
    Mutation(
        "the source's proof is not compared",
        "transfer/handshake.cpp",
        "  if (!same(welcome.proof, proof(Side::source, welcome.identity))) {",
        "  if (false) {",
        "strangers",
    ),
    Mutation(
        "a proof of one side is good for the other",
        "transfer/handshake.cpp",
        '      .add(view(of == Side::sink ? "sink" : "source"))\n',
        '      .add(view(of == Side::sink ? "sink" : "sink"))\n',
        "strangers",
    ),
    Mutation(
        "a proof does not cover the identity",
        "transfer/handshake.cpp",
        "      .add(said)\n",
        "",
        "strangers",
    ),
    Mutation(
        "a proof does not cover the peer's nonce",
        "transfer/handshake.cpp",
        "      .add(own_is_sink ? own_nonce_ : peer_nonce_)\n      .add(own_is_sink ? peer_nonce_ : own_nonce_)\n",
        "",
        "strangers",
    ),
    Mutation(
        "the incarnation is not compared",
        "transfer/handshake.cpp",
        "  if (welcome.identity.incarnation != expected_incarnation_) {",
        "  if (false) {",
        "strangers",
    ),
    Mutation(
        "a source may switch the checksum off",
        "transfer/handshake.cpp",
        "  if (options_.checksum && !agreed.checksum) return Outcome::malformed;\n",
        "",
        "strangers",
    ),
    Mutation(
        "a source may name a backend that the sink does not have",
        "transfer/handshake.cpp",
        "  if (std::find(have.begin(), have.end(), agreed.backend) == have.end()) return Outcome::malformed;\n",
        "",
        "strangers",
    ),
    Mutation(
        "the size of blocks is not compared",
        "transfer/handshake.cpp",
        "  if (sink.block_bytes != source.block_bytes) {",
        "  if (false) {",
        "strangers",
    ),
    Mutation(
        "a layout that is not the pool's is believed",
        "transfer/handshake.cpp",
        "    check(geometry);\n",
        "",
        "strangers",
    ),
    Mutation(
        "a silent stranger stays",
        "transfer/core.cpp",
        "    if (now_s >= give_up_s) {\n      silent.push_back(id);\n    } else {",
        "    if (false) {\n      silent.push_back(id);\n    } else {",
        "strangers",
    ),
    Mutation(
        "any number of strangers is let in",
        "transfer/core.cpp",
        "connections_.size() >= options_.limits.connections)) {",
        "false)) {",
        "strangers",
    ),
    Mutation(
        "frames of pulls are taken before the handshake",
        "transfer/core.cpp",
        "  if (!handshake.agreed()) return settle(",
        "  if (!handshake.agreed() && type <= FrameType::agreed) return settle(",
        "strangers",
    ),
]


def plant(mutation: Mutation, tree: Path) -> bool:
    path = tree / mutation.file
    source = path.read_text()
    if source.count(mutation.text) != 1:
        return False
    path.write_text(source.replace(mutation.text, mutation.replacement))
    return True


def build(tree: Path, target: str) -> str:
    """Build one target; returns what the compiler said if it fails."""
    made = subprocess.run(
        ["cmake", "--build", str(tree / "build"), "--target", target], capture_output=True, text=True, check=False
    )
    return made.stdout[-2000:] if made.returncode else ""


def prepare(tree: Path) -> None:
    """Make a copy of the sources, built once, so that a mutation costs one file and a link."""
    shutil.copytree(NATIVE, tree, ignore=shutil.ignore_patterns("build", "*.so", "__pycache__"))
    flags = ["-DCMAKE_BUILD_TYPE=Debug", "-DBATON_SANITIZE=address,undefined"]
    subprocess.run(
        ["cmake", "-S", str(tree), "-B", str(tree / "build"), "-G", "Ninja", *flags], check=True, capture_output=True
    )
    for target in ("baton_model", "baton_tests"):
        if said := build(tree, target):
            sys.exit(said)


def look_for(mutation: Mutation, tree: Path) -> str:
    """Return what is wrong: the mutation was not found, or could not be looked for."""
    before = (tree / mutation.file).read_text()
    if not plant(mutation, tree):
        return "its text does not occur exactly once"
    program = "baton_model" if mutation.test == "model" else "baton_tests"
    arguments = ["--operations", str(OPERATIONS)] if mutation.test == "model" else [mutation.test]
    try:
        if said := build(tree, program):
            return f"does not compile: {said}"
        run = subprocess.run(
            [str(tree / "build" / program), *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if run.returncode == 0:
            return "NOT FOUND"
        lines = [line for line in run.stdout.splitlines() if line.startswith(("seed", "FAILED", "never"))]
        print(f"found      {mutation.name}: {(lines or run.stderr.splitlines() or ['it fell'])[0][:140]}", flush=True)
    except subprocess.TimeoutExpired:
        print(f"found      {mutation.name}: it hung", flush=True)
    finally:
        (tree / mutation.file).write_text(before)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("names", nargs="*", help="only mutations whose names contain one of these")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.names or any(name in m.name for name in options.names)]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="baton-mutations-") as scratch:
        trees = [Path(scratch) / str(number) for number in range(options.jobs)]
        lots = [chosen[number :: options.jobs] for number in range(options.jobs)]

        def work(tree: Path, lot: list[Mutation]) -> list[str]:
            prepare(tree)
            return [f"{mutation.name}: {wrong}" for mutation in lot if (wrong := look_for(mutation, tree))]

        with ThreadPoolExecutor(options.jobs) as pool:
            problems = [problem for lot in pool.map(work, trees, lots) for problem in lot]
    for problem in problems:
        print(f"PROBLEM    {problem}")
    print(f"{len(chosen) - len(problems)} of {len(chosen)} found in {time.monotonic() - began_s:.0f} s")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
