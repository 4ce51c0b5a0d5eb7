// The chunks of pulls, from what the source sends of one on. How its bytes come is the backend's: inline on the
// connection, by a grant to read them, or in a slot of a ring, which the trailer names.
//
//   asked for ──data, or a grant──▶ placing ──▶ placed ──trailer──▶ judged ──▶ counted
//       ╰──trailer that names a slot──▶ placing ──▶ placed ───────────╯ ╰──▶ converted ──▶ counted
#include <algorithm>

#include "transfer/pull.h"

namespace baton::transfer {

Sink::Chunk* Sink::chunk_on(ConnectionId connection, Pull* pull, std::uint32_t sequence) {
  if (pull == nullptr) return nullptr;
  const auto chunk = pull->in_flight.find(sequence);
  return chunk == pull->in_flight.end() || chunk->second.connection != connection ? nullptr : &chunk->second;
}

bool Sink::on_data(double now_s, const DataArrived& data) {
  Pull* pull = pull_on(data.connection, data.pull);
  Chunk* chunk = chunk_on(data.connection, pull, data.sequence);
  if (chunk == nullptr) {
    out_.put(Discard{data.connection});  // It crossed a cancellation or a restart.
    const Peer* peer = peer_on(data.connection);
    return peer == nullptr || data.bytes <= chunk_blocks(peer->pool, options_.limits) * peer->pool.block_bytes;
  }
  if (chunk->run.blocks * pull->pool.block_bytes != data.bytes) return false;
  pull->progress_s = now_s;
  place(*pull, data.sequence, *chunk);
  return true;
}

bool Sink::on_grant(double now_s, ConnectionId connection, const frames::Grant& frame) {
  Pull* pull = pull_on(connection, frame.pull);
  Chunk* chunk = chunk_on(connection, pull, frame.sequence);
  if (chunk == nullptr) return true;
  if (chunk->placing) return false;
  chunk->granted = true;
  pull->progress_s = now_s;
  place(*pull, frame.sequence, *chunk, frame.where);
  return true;
}

bool Sink::on_chunk_end(double now_s, ConnectionId connection, const frames::ChunkEnd& frame) {
  Pull* pull = pull_on(connection, frame.pull);
  Chunk* chunk = chunk_on(connection, pull, frame.sequence);
  if (chunk == nullptr) {
    if (frame.slot >= 0) out_.send(connection, frames::CreditSlot{frame.slot});
    return true;
  }
  if (chunk->ended || (frame.slot < 0 && !chunk->placed) || (frame.slot >= 0 && chunk->placing)) return false;
  chunk->ended = true;
  chunk->slot = frame.slot;
  chunk->trailer_crc = frame.crc;
  chunk->trailer_generation = frame.generation;
  pull->progress_s = now_s;
  if (frame.slot >= 0) {
    place(*pull, frame.sequence, *chunk);
  } else {
    judge(now_s, *pull, frame.sequence);
  }
  return true;
}

void Sink::place(Pull& pull, std::uint32_t sequence, Chunk& chunk, Blob where) {
  chunk.placing = true;
  std::vector<std::uint32_t> blocks;
  if (peers_.at(pull.endpoint).lanes.at(chunk.connection).staging) {
    blocks = staged_blocks(pull, chunk);
  } else {
    const auto first = pull.blocks.begin() + chunk.run.first;
    blocks.assign(first, first + chunk.run.blocks);
  }
  out_.put(Place{.connection = chunk.connection,
                 .pull = pull.id,
                 .sequence = sequence,
                 .slot = chunk.slot,
                 .layer = chunk.run.layer,
                 .blocks = std::move(blocks),
                 .where = std::move(where)});
}

void Sink::on_placed(double now_s, const Placed& placed) {
  const auto found = pulls_.find(placed.pull);
  if (found == pulls_.end()) return;
  Pull& pull = found->second;
  const auto chunk = pull.in_flight.find(placed.sequence);
  if (chunk == pull.in_flight.end() || pull.stopping) return;
  chunk->second.placed = true;
  chunk->second.placed_crc = placed.crc;
  pull.progress_s = now_s;
  if (chunk->second.granted) out_.send(placed.connection, frames::Fetched{placed.pull, placed.sequence});
  if (chunk->second.ended) judge(now_s, pull, placed.sequence);
}

// A chunk counts once its bytes lie in place and its trailer says that they were good when they were read.
void Sink::judge(double now_s, Pull& pull, std::uint32_t sequence) {
  account(now_s, pull);
  Peer& peer = peers_.at(pull.endpoint);
  const Chunk chunk = pull.in_flight.at(sequence);
  Lane& lane = peer.lanes.at(chunk.connection);
  const std::uint64_t bytes = chunk.run.blocks * pull.pool.block_bytes;
  pull.in_flight.erase(sequence);
  Share& share = pull.shares.at(chunk.connection);
  --share.in_flight;
  share.in_flight_bytes -= bytes;
  lane.finish(now_s, bytes);
  if (chunk.trailer_generation != pull.generation) return restart(pull);
  if (lane.checksum && chunk.placed_crc != chunk.trailer_crc) {
    // The source may have gone on within the block that the pull ends in, between its sum and the read: once for each
    // token and layer at most.
    const bool ends_within = pull.tokens % pull.pool.block_tokens != 0;
    if (ends_within && chunk.run.first + chunk.run.blocks == pull.pool_blocks &&
        pull.rereads < std::uint64_t{pull.pool.tensors()} * pull.pool.block_tokens) {
      ++pull.rereads;
      pull.again.push_back(chunk.run);
      if (lane.staging) lane.staging->release(chunk.staged);
      return request_more(now_s, pull);
    }
    ++stats_.checksum_failures;
    return fail(pull, Cause::checksum,
                "layer " + std::to_string(chunk.run.layer) + " arrived with another checksum than it was sent with");
  }
  if (!lane.staging) return count(now_s, pull, chunk);
  convert(pull, sequence, chunk);
  request_more(now_s, pull);
}

// It lies in the blocks of this pool.
void Sink::count(double now_s, Pull& pull, const Chunk& chunk) {
  Peer& peer = peers_.at(pull.endpoint);
  peer.delivered = true;
  const Lane& lane = peer.lanes.at(chunk.connection);
  const std::uint64_t bytes = chunk.run.blocks * pull.pool.block_bytes;
  pull.verified[chunk.run.layer] += chunk.run.blocks;
  pull.blocks_verified += chunk.run.blocks;
  stats_.pulled_blocks += chunk.run.blocks;
  stats_.pulled_bytes += bytes;
  const std::string& rail = peer.rails[lane.rail].name();
  for (RailShare* carried : {&of_rail(pull.rails, rail), &of_rail(rails_, rail)}) {
    carried->bytes += bytes;
    ++carried->chunks;
    carried->bytes_per_s = lane.bytes_per_s;
  }
  report_progress(pull);
  if (pull.blocks_verified == std::uint64_t{pull.pool_blocks} * pull.pool.tensors()) return finish(now_s, pull);
  request_more(now_s, pull);
  const auto unplaced = [](const auto& entry) { return !entry.second.placed; };
  const bool all_placed = std::none_of(pull.in_flight.begin(), pull.in_flight.end(), unplaced);
  pull.state = all_placed && !pull.in_flight.empty() ? State::verifying : State::pulling;
}

}  // namespace baton::transfer
