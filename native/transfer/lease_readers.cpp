// Frames from sinks to a source: each ask makes a reader of one lease, which is parked until the lease opens, notified
// of ready tokens, served its chunks, and detached when its connection is lost.
#include <algorithm>

#include "transfer/lease.h"

namespace baton::transfer {

// ---------------------------------------------------------------- asks

bool Source::on_ask(double now_s, ConnectionId connection, const frames::Ask& ask) {
  const ReaderId id{connection, ask.pull};
  const std::uint64_t last = std::uint64_t{ask.first_block} + ask.blocks;
  const std::uint64_t needed = (std::uint64_t{ask.tokens} + geometry_.block_tokens - 1) / geometry_.block_tokens;
  if (ask.blocks == 0 || last != needed) return false;
  if (const auto reader = readers_.find(id); reader != readers_.end()) return promote(now_s, id, reader->second, ask);
  if (const auto ended = ended_.find(ask.key); ended != ended_.end()) {
    const EndedLease& lease = ended->second;
    const Cause cause = lease.cause == Cause::none ? Cause::expired : lease.cause;
    out_.send(connection, frames::Ended{ask.pull, cause, lease.detail});
    return true;
  }
  const auto found = leases_.find(ask.key);
  const bool parks = found == leases_.end();
  if (parks && ask.data_only) {
    out_.send(connection, frames::Ended{ask.pull, Cause::expired, "the lease is gone"});
    return true;
  }
  const std::size_t beside = parks ? parked_.count(ask.key) : found->second.readers.size();
  if (beside >= options_.limits.readers_per_lease || (parks && parked_.size() >= options_.limits.parked)) {
    out_.send(connection, frames::Ended{ask.pull, Cause::refused, "the source holds too many asks"});
    return true;
  }
  readers_[id] = Reader{.ask = ask, .keep_alive_s = now_s};
  if (parks) {
    parked_.emplace(ask.key, id);
    out_.wake_at(now_s + options_.lease_ttl_s);
    return true;
  }
  Lease& lease = found->second;
  lease.readers.push_back(id);
  claim(now_s, ask.key, lease);
  if (lease.open) attach(id, lease);
  return true;
}

// The connection that carried notices to the sink has died: they move to this one.
bool Source::promote(double now_s, const ReaderId& id, Reader& reader, const frames::Ask& ask) {
  const auto found = leases_.find(ask.key);
  const bool same = reader.ask.key == ask.key && reader.ask.first_block == ask.first_block &&
                    reader.ask.blocks == ask.blocks && reader.ask.tokens == ask.tokens;
  if (!same || !reader.ask.data_only || ask.data_only || found == leases_.end()) return false;
  reader.ask.data_only = false;
  claim(now_s, ask.key, found->second);
  if (found->second.open) {
    attach(id, found->second);
  } else {
    out_.send(id.first, frames::Revoked{id.second, found->second.generation});
  }
  return true;
}

void Source::attach(const ReaderId& id, Lease& lease) {
  if (refuse_if_short(lease, id) || readers_.at(id).ask.data_only) return;
  out_.send(id.first, frames::Opened{id.second, lease.generation});
  const auto [least, most] = std::minmax_element(lease.ready_tokens.begin(), lease.ready_tokens.end());
  if (*most == 0) return;
  if (*least == *most) return tell_ready(lease, id, kAllLayers, *most);
  for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) {
    const std::uint32_t tokens = lease.ready_tokens[layer];
    if (tokens > 0) tell_ready(lease, id, static_cast<std::uint16_t>(layer), tokens);
  }
}

void Source::tell_ready(const Lease& lease, const ReaderId& id, std::uint16_t layer, std::uint32_t tokens) {
  if (readers_.at(id).ask.data_only) return;
  out_.send(id.first, frames::Ready{id.second, lease.generation, layer, tokens});
}

// A sink that wants more tokens than the whole lease has would wait for ever.
bool Source::refuse_if_short(Lease& lease, const ReaderId& id) {
  const std::uint32_t wanted = readers_.at(id).ask.tokens;
  if (!lease.complete_tokens || wanted <= *lease.complete_tokens) return false;
  out_.send(id.first, frames::Ended{.pull = id.second,
                                    .cause = Cause::refused,
                                    .detail = "the sink wants " + std::to_string(wanted) +
                                              " tokens, the whole lease has " + std::to_string(*lease.complete_tokens),
                                    .held = true});
  stop_serving(id);
  std::erase(lease.readers, id);
  readers_.erase(id);
  return true;
}

// ---------------------------------------------------------------- chunks

bool Source::on_request(double now_s, ConnectionId connection, const frames::Request& request) {
  const ReaderId id{connection, request.pull};
  const auto found = readers_.find(id);
  if (found == readers_.end()) return true;  // It crossed the end of the lease.
  Reader& reader = found->second;
  Lease* lease = current(reader.ask.key, request.generation);
  if (lease == nullptr) return true;  // It crossed a revocation.
  const std::uint64_t last = std::uint64_t{request.first_block} + request.blocks;
  const std::uint64_t asked_last = std::uint64_t{reader.ask.first_block} + reader.ask.blocks;
  if (request.layer >= geometry_.tensors() || request.blocks == 0 ||
      request.blocks > chunk_blocks(geometry_, options_.limits) || request.first_block < reader.ask.first_block ||
      last > asked_last || last > lease->blocks.size() || reader.in_flight.contains(request.sequence) ||
      reader.in_flight.size() >= options_.limits.chunks_served) {
    return false;
  }
  const std::uint64_t needed_tokens = std::min<std::uint64_t>(last * geometry_.block_tokens, reader.ask.tokens);
  if (lease->ready_tokens[request.layer / geometry_.tensors_per_layer()] < needed_tokens) return false;
  claim(now_s, reader.ask.key, *lease);
  reader.in_flight[request.sequence] = {.bytes = request.blocks * geometry_.block_bytes};
  if (reader.serve_after_s < 0) reader.serve_after_s = now_s + options_.faults.delay_s;
  if (now_s < reader.serve_after_s) {
    reader.held.push_back(request);
    out_.wake_at(reader.serve_after_s);
  } else {
    serve(id, *lease, request);
  }
  return true;
}

void Source::serve(const ReaderId& id, const Lease& lease, const frames::Request& request) {
  const auto first = lease.blocks.begin() + request.first_block;
  ++chunks_served_;
  const Faults& faults = options_.faults;
  const bool corrupted = faults.corrupt_every != 0 && chunks_served_ % faults.corrupt_every == 0;
  out_.put(Serve{.connection = id.first,
                 .pull = id.second,
                 .sequence = request.sequence,
                 .layer = request.layer,
                 .blocks = {first, first + request.blocks},
                 .released = lease.released[request.layer / geometry_.tensors_per_layer()],
                 .corruption = corrupted ? faults.corruption : Corruption::none,
                 .before_checksum = faults.before_checksum});
}

Source::Reading* Source::reading(const ReaderId& id, std::uint32_t sequence) {
  const auto reader = readers_.find(id);
  if (reader == readers_.end()) return nullptr;
  const auto chunk = reader->second.in_flight.find(sequence);
  return chunk == reader->second.in_flight.end() ? nullptr : &chunk->second;
}

// The generation is read now, after the bytes: a revocation during the read has taken the chunk out of `in_flight`.
void Source::send_trailer(const ReaderId& id, frames::ChunkEnd trailer) {
  trailer.pull = id.second;
  if (const Reading* chunk = reading(id, trailer.sequence)) {
    Reader& reader = readers_.at(id);
    stats_.served_bytes += chunk->bytes;
    reader.in_flight.erase(trailer.sequence);
    trailer.generation = leases_.at(reader.ask.key).generation;
  }
  out_.send(id.first, trailer);
}

void Source::on_served(const Served& served) {
  send_trailer({served.connection, served.pull}, {.sequence = served.sequence, .slot = served.slot, .crc = served.crc});
}

void Source::on_granted(const Granted& granted) {
  Reading* chunk = reading({granted.connection, granted.pull}, granted.sequence);
  if (chunk == nullptr) return;  // Revoked in the meantime.
  chunk->granted = true;
  chunk->crc = granted.crc;
  out_.send(granted.connection, frames::Grant{granted.pull, granted.sequence, granted.where});
}

bool Source::on_fetched(ConnectionId connection, const frames::Fetched& frame) {
  const ReaderId id{connection, frame.pull};
  const Reading* chunk = reading(id, frame.sequence);  // Null: revoked in the meantime.
  if (chunk != nullptr && !chunk->granted) return false;
  send_trailer(id, {.sequence = frame.sequence, .crc = chunk == nullptr ? 0 : chunk->crc});
  return true;
}

void Source::stop_serving(const ReaderId& id) {
  Reader& reader = readers_.at(id);
  reader.held.clear();
  reader.in_flight.clear();
  out_.put(StopServing{id.first, id.second});
}

// ---------------------------------------------------------------- staying and leaving

void Source::on_keep_alive(double now_s, ConnectionId connection, const frames::KeepAlive& frame) {
  const auto reader = readers_.find({connection, frame.pull});
  if (reader == readers_.end()) return;  // `Ended` is on its way.
  reader->second.keep_alive_s = now_s;
  if (const auto lease = leases_.find(reader->second.ask.key); lease != leases_.end())
    claim(now_s, reader->second.ask.key, lease->second);
  out_.send(connection, frames::KeepAliveAnswer{frame.pull});
}

void Source::on_release(double now_s, const frames::Release& release) {
  const std::string detail = release.cause == Cause::none ? "" : "the sink gave the pull up";
  if (const auto lease = leases_.find(release.key); lease != leases_.end()) {
    return end(now_s, lease, release.cause, detail, true);
  }
  const auto [first, last] = parked_.equal_range(release.key);
  for (auto at = first; at != last; ++at) readers_.erase(at->second);
  parked_.erase(first, last);
  if (ended_.contains(release.key)) return;
  remember(now_s, release.key, {.cause = release.cause, .detail = detail, .by_sink = true});
}

void Source::unpark(const ReaderId& id, const Key& key) {
  const auto [first, last] = parked_.equal_range(key);
  for (auto at = first; at != last; ++at) {
    if (at->second != id) continue;
    parked_.erase(at);
    return;
  }
}

void Source::detach(const ReaderId& id) {
  const Key key = readers_.at(id).ask.key;
  if (const auto lease = leases_.find(key); lease != leases_.end()) {
    std::erase(lease->second.readers, id);
  } else {
    unpark(id, key);
  }
  readers_.erase(id);
}

// The lease stays until its time is up: the sink may come back on a new connection.
void Source::on_closed(ConnectionId connection) {
  auto reader = readers_.lower_bound({connection, 0});
  while (reader != readers_.end() && reader->first.first == connection) {
    const ReaderId id = reader->first;
    ++reader;
    detach(id);
  }
}

}  // namespace baton::transfer
