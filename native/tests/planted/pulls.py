"""Faults in the decisions of a sink: pulls, and the lanes over which they come."""

# The texts are lines as they stand in the sources.
# ruff: noqa: E501
from __future__ import annotations

from planted import Mutation

MUTATIONS = [
    Mutation(
        "the trailer's generation is not compared",
        "transfer/pull_chunks.cpp",
        "  if (chunk.trailer_generation != pull.generation) return restart(pull);\n",
        "",
        "another_generation",
    ),
    Mutation(
        "the checksum is ignored",
        "transfer/pull_chunks.cpp",
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
        "transfer/pull_chunks.cpp",
        "  if (pull.blocks_verified == std::uint64_t{pull.pool_blocks} * pull.pool.tensors())",
        "  if (pull.blocks_verified + 1 >= std::uint64_t{pull.pool_blocks} * pull.pool.tensors())",
    ),
    Mutation(
        "a chunk counts before it lies in place",
        "transfer/pull_chunks.cpp",
        "  if (chunk->ended || (frame.slot < 0 && !chunk->placed) ||",
        "  if (chunk->ended ||",
    ),
    Mutation(
        "an inline payload's length is not checked",
        "transfer/pull_chunks.cpp",
        "  if (chunk->run.blocks * pull->pool.block_bytes != data.bytes) return false;\n",
        "",
    ),
    Mutation(
        "a grant is taken twice",
        "transfer/pull_chunks.cpp",
        "  if (chunk->placing) return false;\n  chunk->granted = true;",
        "  chunk->granted = true;",
    ),
    Mutation(
        "a chunk goes to the blocks of another",
        "transfer/pull_chunks.cpp",
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
        "the slot of an unwanted chunk is not credited",
        "transfer/pull_chunks.cpp",
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
    Mutation(
        "a lane's chunks are not counted",
        "transfer/pull_lanes.cpp",
        "           share.in_flight >= options_.limits.chunks_in_flight ||\n",
        "",
    ),
    Mutation(
        "a lane that hangs is kept",
        "transfer/pull_lanes.cpp",
        '      lane.closing = true;\n      out_.put(Close{connection, "nothing came',
        '      out_.wake_at(due_s + 60);\n      if (false) out_.put(Close{connection, "nothing came',
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
        "sequence_number",
    ),
    Mutation(
        "shares of a lost lane are kept",
        "transfer/pull_peers.cpp",
        "  for (auto& [id, pull] : pulls_) pull.shares.erase(connection);\n",
        "",
    ),
    Mutation(
        "what a lane lets go stays under way",
        "transfer/lane.h",
        "    in_flight_bytes -= bytes;\n",
        "",
        "lanes_know",
    ),
    Mutation(
        "a lane with nothing under way owes an answer",
        "transfer/lane.h",
        "    if (--in_flight == 0) owed_since_s = kNever;\n",
        "    --in_flight;\n",
        "lanes_owe",
    ),
    Mutation(
        "a lane's idle time counts",
        "transfer/lane.h",
        "    if (in_flight++ == 0) busy_from_s = now_s;\n",
        "    ++in_flight;\n",
        "lanes_measure",
    ),
    Mutation(
        "a lane that was slow once is never asked again",
        "transfer/lane.h",
        "    return in_flight > 0 || now_s < asked_s + kHoldsS ? bytes_per_s : 0;\n",
        "    return now_s < 0 ? 0 : bytes_per_s;\n",
        "lanes_measure",
    ),
]
