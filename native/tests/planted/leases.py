"""Faults in the decisions of a source: leases and the sinks that read them."""

# The texts are lines as they stand in the sources.
# ruff: noqa: E501
from __future__ import annotations

from planted import Mutation

MUTATIONS = [
    Mutation(
        "the generation is not read again after the bytes",
        "transfer/lease_readers.cpp",
        "    trailer.generation = leases_.at(reader.ask.key).generation;\n  }\n  out_.send(id.first, trailer);",
        "    trailer.generation = leases_.at(reader.ask.key).generation;\n  }\n"
        "  if (trailer.generation == 0) trailer.generation = 1;\n  out_.send(id.first, trailer);",
    ),
    Mutation(
        "a revocation forgets the chunks that are being read",
        "transfer/lease_readers.cpp",
        "  reader.held.clear();\n  reader.in_flight.clear();\n",
        "  reader.held.clear();\n",
    ),
    Mutation(
        "a revocation forgets the chunks that are held back",
        "transfer/lease_readers.cpp",
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
        "transfer/lease_readers.cpp",
        "  if (lease->ready_tokens[request.layer / geometry_.tensors_per_layer()] < needed_tokens) return false;\n",
        "",
    ),
    Mutation(
        "the watermark is compared with whole blocks rounded down",
        "transfer/lease_readers.cpp",
        "std::min<std::uint64_t>(last * geometry_.block_tokens, reader.ask.tokens)",
        "std::min<std::uint64_t>((last - 1) * geometry_.block_tokens, reader.ask.tokens)",
    ),
    Mutation(
        "chunks are served after a revocation",
        "transfer/lease_readers.cpp",
        "  Lease* lease = current(reader.ask.key, request.generation);\n"
        "  if (lease == nullptr) return true;  // It crossed a revocation.",
        "  const auto any = leases_.find(reader.ask.key);\n"
        "  if (any == leases_.end()) return true;\n  Lease* lease = &any->second;",
    ),
    Mutation(
        "a chunk may lie outside what was asked for",
        "transfer/lease_readers.cpp",
        "request.first_block < reader.ask.first_block ||\n      last > asked_last || last > lease->blocks.size() ||",
        "last > lease->blocks.size() ||",
    ),
    Mutation(
        "a chunk may have any size",
        "transfer/lease_readers.cpp",
        "      request.blocks > chunk_blocks(geometry_, options_.limits) || request.first_block",
        "      request.first_block",
    ),
    Mutation(
        "a sink may ask for any number of chunks",
        "transfer/lease_readers.cpp",
        " ||\n      reader.in_flight.size() >= options_.limits.chunks_served) {",
        ") {",
    ),
    Mutation(
        "a sequence number may be used again while it is in use",
        "transfer/lease_readers.cpp",
        " || reader.in_flight.contains(request.sequence) ||",
        " ||",
    ),
    Mutation(
        "a sink may say that it has read what it was not granted",
        "transfer/lease_readers.cpp",
        "  if (chunk != nullptr && !chunk->granted) return false;\n",
        "",
    ),
    Mutation(
        "any number of asks is parked",
        "transfer/lease_readers.cpp",
        " || (parks && parked_.size() >= options_.limits.parked)) {",
        ") {",
    ),
    Mutation(
        "any number of sinks reads a lease",
        "transfer/lease_readers.cpp",
        "  if (beside >= options_.limits.readers_per_lease || (",
        "  if ((",
    ),
    Mutation(
        "readers are kept after their connection closed",
        "transfer/lease_readers.cpp",
        "    ++reader;\n    detach(id);\n",
        "    ++reader;\n",
    ),
    Mutation(
        "parked asks are kept after their connection closed",
        "transfer/lease_readers.cpp",
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
        "transfer/lease_readers.cpp",
        "    claim(now_s, reader->second.ask.key, lease->second);\n",
        "    (void)now_s;\n",
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
        "release_may_come",
    ),
    Mutation(
        "commands of an older generation count",
        "transfer/lease.cpp",
        "  if (found == leases_.end() || found->second.generation != generation || !found->second.open) return nullptr;\n",
        "  if (found == leases_.end() || !found->second.open) return nullptr;\n",
    ),
    Mutation(
        "a sink that wants more than there is waits",
        "transfer/lease_readers.cpp",
        "  if (!lease.complete_tokens || wanted <= *lease.complete_tokens) return false;\n",
        "  return false;\n",
    ),
]
