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
        "  if (lease->ready_tokens[request.layer] < needed_tokens) return false;\n",
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
        " ||\n      reader.in_flight.size() >= options_.limits.chunks_served) {",
        ") {",
    ),
    Mutation(
        "a sequence number may be used again while it is in use",
        "transfer/lease.cpp",
        " || reader.in_flight.contains(request.sequence) ||",
        " ||",
    ),
    Mutation(
        "a sink may say that it has read what it was not granted",
        "transfer/lease.cpp",
        "  if (chunk != nullptr && !chunk->granted) return false;\n",
        "",
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
        "  pull.verified.assign(geometry_.layers, 0);\n",
        "  pull.verified.resize(geometry_.layers);\n",
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
        "  pull.ready_tokens.assign(geometry_.layers, 0);\n",
        "  pull.ready_tokens.resize(geometry_.layers);\n",
    ),
    Mutation(
        "a pull is done one chunk early",
        "transfer/pull.cpp",
        "  if (pull.blocks_verified == std::uint64_t{pull.blocks.size()} * geometry_.layers)",
        "  if (pull.blocks_verified + 1 >= std::uint64_t{pull.blocks.size()} * geometry_.layers)",
    ),
    Mutation(
        "a chunk counts before it lies in place",
        "transfer/pull.cpp",
        "  if (chunk->ended || (frame.slot < 0 && !chunk->placed) ||",
        "  if (chunk->ended ||",
    ),
    Mutation(
        "an inline payload's length is not checked",
        "transfer/pull.cpp",
        "  if (chunk->run.blocks * geometry_.block_bytes != data.bytes) return false;\n",
        "",
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
        "  const auto first = pull.blocks.begin() + chunk.run.first;\n  out_.put(Place{",
        "  const auto first = pull.blocks.begin() + (chunk.run.first > 0 ? chunk.run.first - 1 : 0);\n  out_.put(Place{",
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
    # Connections, data paths, the shell, checksums.
    Mutation(
        "a frame may have any length",
        "transfer/tcp.cpp",
        "    if (length == 0 || length > kFrameBytesMax) return fail(",
        "    if (length == 0) return fail(",
        "streams",
    ),
    Mutation(
        "a frame may be empty",
        "transfer/tcp.cpp",
        "    if (length == 0 || length > kFrameBytesMax) return fail(",
        "    if (length > kFrameBytesMax) return fail(",
        "streams",
    ),
    Mutation(
        "a frame that has not come whole is taken",
        "transfer/tcp.cpp",
        "    if (buffer_end_ - buffer_begin_ < kLengthBytes + length) return true;\n",
        "",
        "streams",
    ),
    Mutation(
        "a payload may have any length",
        "transfer/tcp.cpp",
        " || data->bytes > payload_bytes_max_) {",
        ") {",
        "streams",
    ),
    Mutation(
        "a payload may be empty",
        "transfer/tcp.cpp",
        "    if (!data || data->bytes == 0 ||",
        "    if (!data ||",
        "streams",
    ),
    Mutation(
        "a payload may be placed twice",
        "transfer/tcp.cpp",
        "  if (!arriving_ || arriving_->decided || chunk.slot >= 0) return false;",
        "  if (!arriving_ || chunk.slot >= 0) return false;",
        "streams",
    ),
    Mutation(
        "a stopped payload is written on",
        "transfer/tcp.cpp",
        "  arriving_->pieces.clear();\n  arriving_->rest.clear();\n",
        "",
        "streams",
    ),
    Mutation(
        "a payload is sent within another frame",
        "transfer/tcp.cpp",
        "    for (std::size_t i = 0; !on_the_way && i < control_.size()",
        "    for (std::size_t i = 0; i < control_.size()",
        "streams",
    ),
    Mutation(
        "a payload that is on its way is forgotten",
        "transfer/tcp.cpp",
        " && !payload.on_the_way(); });",
        "; });",
        "streams",
    ),
    Mutation(
        "a payload is served before it was sent",
        "transfer/tcp.cpp",
        "  if (payload.piece < payload.pieces.size()) return;\n",
        "",
        "streams",
    ),
    Mutation(
        "a payload is placed before it came whole",
        "transfer/tcp.cpp",
        "  if (payload.left_bytes > 0) return;\n",
        "",
        "streams",
    ),
    Mutation(
        "bytes behind a payload are taken for it",
        "transfer/tcp.cpp",
        "std::min<std::size_t>(buffer_end_ - buffer_begin_, arriving_->left_bytes);",
        "buffer_end_ - buffer_begin_;",
        "streams",
    ),
    Mutation(
        "a payload's sum is not taken where it arrives",
        "transfer/tcp.cpp",
        "    const std::uint32_t crc = checksum_ ? checksum_of(payload.pieces) : 0;",
        "    const std::uint32_t crc = 0;",
        "streams",
    ),
    Mutation(
        "frames for a peer that does not read are kept without end",
        "transfer/tcp.cpp",
        "  if (control_bytes_ > kControlBytesMax) return fail(\"the peer does not read what it is sent\");\n",
        "",
        "streams",
    ),
    Mutation(
        "a slot may be credited that is free",
        "transfer/shm.cpp",
        " || std::find(free_.begin(), free_.end(), slot) != free_.end()) return false;",
        ") return false;",
        "paths",
    ),
    Mutation(
        "a slot may be credited that does not exist",
        "transfer/shm.cpp",
        "    if (!is_slot(slot) || std::find",
        "    if (std::find",
        "paths",
    ),
    Mutation(
        "a slot may be read that does not exist",
        "transfer/shm.cpp",
        "    if (!is_slot(chunk.slot)) return false;\n",
        "",
        "paths",
    ),
    Mutation(
        "a slot is filled again before it is credited",
        "transfer/shm.cpp",
        "    free_.pop_back();\n",
        "",
        "paths",
    ),
    Mutation(
        "a ring of any name is opened",
        "transfer/shm.cpp",
        "  if (!offer.name.starts_with(kPrefix)) return std::nullopt;\n",
        "",
        "paths",
    ),
    Mutation(
        "a ring's name may lead elsewhere",
        "transfer/shm.cpp",
        "  return plain && rest.size() == 32 ?",
        "  return rest.size() == 32 ?",
        "paths",
    ),
    Mutation(
        "a ring may be smaller than it says",
        "transfer/shm.cpp",
        " && status.st_size == size && segment->map(fd, false);",
        " && segment->map(fd, false);",
        "paths",
    ),
    Mutation(
        "a ring's slots may have another size",
        "transfer/shm.cpp",
        "  if (!offer || offer->slot_bytes != slot_bytes) return nullptr;",
        "  if (!offer) return nullptr;",
        "paths",
    ),
    Mutation(
        "a ring's token is not compared",
        "transfer/shm.cpp",
        "    return proof == segment_->token();",
        "    return true;",
        "paths",
    ),
    Mutation(
        "a ring keeps its name",
        "transfer/shm.cpp",
        "    segment_->unlink();\n    return proof",
        "    return proof",
        "paths",
    ),
    Mutation(
        "an abandoned ring keeps its name",
        "transfer/shm.cpp",
        "  unlink();\n  if (memory_ != nullptr) ::munmap",
        "  if (memory_ != nullptr) ::munmap",
        "paths",
    ),
    Mutation(
        "blocks may lie outside the source's region",
        "transfer/direct.cpp",
        "    if (layer > bytes || site.pool.block_bytes > bytes - layer) return false;\n    return remote->blocks",
        "    return remote->blocks",
        "paths",
    ),
    Mutation(
        "the last blocks may lie outside the source's region",
        "transfer/direct.cpp",
        "    return remote->blocks - 1 <= (bytes - layer - site.pool.block_bytes) / remote->stride_bytes;",
        "    return true;",
        "paths",
    ),
    Mutation(
        "a region's token is not compared",
        "transfer/direct.cpp",
        "override { return proof == site_.pool.region->token(); }",
        "override { return !proof.empty(); }",
        "paths",
    ),
    Mutation(
        "a region may shrink",
        "transfer/region.cpp",
        " && (seals & F_SEAL_SHRINK) != 0 &&",
        " &&",
        "paths",
    ),
    Mutation(
        "a region may be smaller than it says",
        "transfer/region.cpp",
        "::fstat(own_fd, &status) == 0 &&\n                    status.st_size == static_cast<off_t>(kHeaderBytes + bytes);",
        "::fstat(own_fd, &status) == 0;",
        "paths",
    ),
    Mutation(
        "a process's token is not compared",
        "transfer/cma.cpp",
        "override { return std::ranges::equal(proof, token_); }",
        "override { return !proof.empty(); }",
        "paths",
    ),
    Mutation(
        "memory that was read in part counts",
        "transfer/cma.cpp",
        "    if (taken != static_cast<ssize_t>(expected)) return false;\n",
        "    if (taken == 0 && expected != 0) return false;\n",
        "paths",
    ),
    Mutation(
        "sums of one chunk's pieces are not joined",
        "transfer/cma.cpp",
        "crc = checksum_ ? crc32c(crc, piece.iov_base",
        "crc = checksum_ ? crc32c(0, piece.iov_base",
        "paths",
    ),
    Mutation(
        "a grant may name blocks that the source does not have",
        "transfer/one_sided.cpp",
        "    if (theirs >= remote_pool.blocks) return false;\n",
        "",
        "paths",
    ),
    Mutation(
        "a grant may have any size",
        "transfer/one_sided.cpp",
        "  if (chunk.where.size() != chunk.blocks.size() * sizeof(std::uint32_t)) return false;\n",
        "",
        "paths",
    ),
    Mutation(
        "neighbours here count as neighbours there",
        "transfer/one_sided.cpp",
        " == to &&\n          reinterpret_cast<std::uint64_t>(last_remote.iov_base) + last_remote.iov_len == from) {",
        " == to) {",
        "paths",
    ),
    Mutation(
        "neighbours there count as neighbours here",
        "transfer/one_sided.cpp",
        "static_cast<std::uint8_t*>(last.iov_base) + last.iov_len == to &&\n          reinterpret",
        "reinterpret",
        "paths",
    ),
    Mutation(
        "the source's strides are taken for one's own",
        "transfer/one_sided.cpp",
        "  if (remote.stride_bytes < pool.block_bytes) return std::nullopt;",
        "  remote.stride_bytes = pool.stride_bytes;",
        "paths",
    ),
    Mutation(
        "strides may be shorter than blocks",
        "transfer/one_sided.cpp",
        "  if (remote.stride_bytes < pool.block_bytes) return std::nullopt;",
        "  if (remote.stride_bytes == 0) return std::nullopt;",
        "paths",
    ),
    Mutation(
        "a stopped read that is under way is forgotten",
        "transfer/one_sided.cpp",
        "  return std::any_of(reading_.begin(), reading_.end(), [&](const Read& read) { return read.chunk.pull == pull; });",
        "  return pull == 0 && !reading_.empty();",
        "shells",
    ),
    Mutation(
        "stopped reads that wait are begun",
        "transfer/one_sided.cpp",
        "  std::erase_if(waiting_, of_pull);\n",
        "",
        "paths",
    ),
    Mutation(
        "a read counts before all its pieces have ended",
        "transfer/one_sided.cpp",
        "  if (read.ended < read.begun || !(whole || read.stopped)) return;",
        "  if (!(whole || read.stopped)) return;",
        "paths",
    ),
    Mutation(
        "a read counts before all its pieces were begun",
        "transfer/one_sided.cpp",
        "  if (read.ended < read.begun || !(whole || read.stopped)) return;",
        "  if (read.ended < read.begun) return;",
        "paths",
    ),
    Mutation(
        "a copying path copies what was stopped",
        "transfer/backends.cpp",
        "    site_.happened.push_back(Placed{site_.connection, pull, chunk.sequence, chunk.slot, 0});  // Its slot is empty.\n    return true;",
        "    site_.happened.push_back(Placed{site_.connection, pull, chunk.sequence, chunk.slot, 0});  // Its slot is empty.\n    return false;",
        "paths",
    ),
    Mutation(
        "the slot of a stopped chunk is lost",
        "transfer/backends.cpp",
        "    site_.happened.push_back(Placed{site_.connection, pull, chunk.sequence, chunk.slot, 0});  // Its slot is empty.\n",
        "",
        "paths",
    ),
    Mutation(
        "a copying path serves what was stopped",
        "transfer/backends.cpp",
        "  std::erase_if(serving_, [&](const Serve& chunk) { return chunk.pull == pull; });\n",
        "",
        "paths",
    ),
    Mutation(
        "a read that failed counts",
        "transfer/verbs_queue.cpp",
        "      if (ended != nullptr && done[i].status != ibv::kSuccess) {",
        "      if (false) {",
        "queue",
    ),
    Mutation(
        "reads complete without a notice",
        "transfer/verbs_queue.cpp",
        "last ? ibv::kSignaled : 0U;",
        "0U;",
        "queue",
    ),
    Mutation(
        "a notice is asked for once only",
        "transfer/verbs_queue.cpp",
        "    if (device_.context->ops.req_notify_cq(cq_, 0) != 0) {\n      why_",
        "    if (false) {\n      why_",
        "over_verbs",
    ),
    Mutation(
        "notices are not acknowledged",
        "transfer/verbs_queue.cpp",
        "    device_.calls.ack_cq_events(cq_, events);\n",
        "",
        "over_verbs",
    ),
    Mutation(
        "a queue's room is not watched",
        "transfer/verbs.cpp",
        "std::min(read.pieces.local.size() - read.begun, queue_.room());",
        "read.pieces.local.size() - read.begun;",
        "paths",
    ),
    Mutation(
        "a queue's room is not given back",
        "transfer/verbs_queue.cpp",
        "      room_ += under_way_.front().reads;\n",
        "",
        "paths",
    ),
    Mutation(
        "commands do not wake the thread",
        "transfer/shell.cpp",
        "    if (actions_.empty() && core_.wake_s() >= wake_s) return;",
        "    return;",
        "shells_wake",
    ),
    Mutation(
        "alarms that commands set do not wake the thread",
        "transfer/shell.cpp",
        "    if (actions_.empty() && core_.wake_s() >= wake_s) return;",
        "    if (actions_.empty()) return;",
        "shells_wake",
    ),
    Mutation(
        "the thread does not wake for alarms",
        "transfer/shell.cpp",
        "  double wake_s = accept_again_s_ == 0 ? core_.wake_s() :",
        "  double wake_s = accept_again_s_ == 0 ? now_s() + 4000 :",
        "shells_wake",
    ),
    Mutation(
        "reports are not announced",
        "transfer/shell.cpp",
        "  if (!quiet || reports_.empty()) return;\n",
        "  return;\n",
        "traffic_over_tcp",
    ),
    Mutation(
        "a fence is up before an adapter has ended its writes",
        "transfer/shell_connections.cpp",
        "    if (!writing.empty() && now < fence.until_s) return false;\n    for (const ConnectionId id : writing) drop",
        "    if (false) return false;\n    for (const ConnectionId id : {ConnectionId{0}}) drop",
        "shells_tell",
    ),
    Mutation(
        "writes that do not end keep a fence down for ever",
        "transfer/shell_connections.cpp",
        "    if (!writing.empty() && now < fence.until_s) return false;",
        "    if (!writing.empty()) return false;",
        "shells_tell",
    ),
    Mutation(
        "a proof is waited for without end",
        "transfer/shell_connections.cpp",
        "  if (!proof && !broken && now_s() < connection.answer_by_s) return;",
        "  if (!proof && !broken) return;",
        "shells_take",
    ),
    Mutation(
        "a closed agent leaves its pulls without an end",
        "transfer/shell.cpp",
        "    const Event event = Shutdown{};\n    step_locked({&event, 1});\n",
        "",
        "sudden_ends_over_tcp",
    ),
    Mutation(
        "a lane's chunks are not counted",
        "transfer/pull_lanes.cpp",
        "    return share.in_flight >= options_.limits.chunks_in_flight ||",
        "    return",
    ),
    Mutation(
        "a lane that hangs is kept",
        "transfer/pull_lanes.cpp",
        "      lane.closing = true;\n      out_.put(Close{connection, \"nothing came",
        "      out_.wake_at(due_s + 60);\n      if (false) out_.put(Close{connection, \"nothing came",
    ),
    Mutation(
        "a lost lane leads on",
        "transfer/pull_peers.cpp",
        "  if (peer->control == connection || peer->control == 0) follow(now_s, *peer, detail);\n",
        "",
    ),
    Mutation(
        "sequence numbers are used again after a restart",
        "transfer/pull.cpp",
        "  pull.in_flight.clear();\n}",
        "  pull.in_flight.clear();\n  pull.next_sequence = 0;\n}",
    ),
    Mutation(
        "shares of a lost lane are kept",
        "transfer/pull_peers.cpp",
        "  for (auto& [id, pull] : pulls_) pull.shares.erase(connection);\n",
        "",
    ),
    Mutation(
        "lanes are joined without a shift",
        "hash/crc32c.cpp",
        "first = shift(kShift, shift(kShift, first) ^ second) ^ third;",
        "first = shift(kShift, first ^ second) ^ third;",
        "crc32c",
    ),
    Mutation(
        "a lane is left out",
        "hash/crc32c.cpp",
        "shift(kShift, first) ^ second) ^ third;",
        "shift(kShift, first) ^ second);",
        "crc32c",
    ),
    Mutation(
        "the last bytes are not summed",
        "hash/crc32c.cpp",
        "    if constexpr (kSum) rest = _mm_crc32_u8(rest, byte);",
        "    if constexpr (kSum) rest = rest + 0 * byte;",
        "crc32c",
    ),
    Mutation(
        "the last bytes are not copied",
        "hash/crc32c.cpp",
        "    if constexpr (kCopy) to[at] = byte;\n",
        "",
        "copies",
    ),
    Mutation(
        "the tables sum seven bytes of eight",
        "hash/crc32c.cpp",
        "kTables[1][at[6]] ^ kTables[0][at[7]];",
        "kTables[1][at[6]];",
        "crc32c",
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
    # Without sanitizers: what only they would notice is not enough of a test, and this is a third of the time.
    flags = ["-DBATON_TESTS=ON", "-DBATON_PYTHON=OFF", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1"]
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
