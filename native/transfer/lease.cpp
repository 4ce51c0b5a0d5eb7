#include "transfer/lease.h"

#include <algorithm>
#include <stdexcept>

namespace baton::transfer {

Source::Source(const Options& options, const Geometry& geometry, Outbox& out, Stats& stats)
    : options_(options), geometry_(geometry), out_(out), stats_(stats) {}

Source::Lease* Source::current(const Key& key, std::uint64_t generation) {
  const auto found = leases_.find(key);
  if (found == leases_.end() || found->second.generation != generation || !found->second.open) return nullptr;
  return &found->second;
}

std::uint64_t Source::generation(const Key& key) const {
  const auto found = leases_.find(key);
  if (found != leases_.end()) return found->second.generation;
  const auto ended = ended_.find(key);
  return ended == ended_.end() ? 0 : ended->second.generation;
}

// ---------------------------------------------------------------- the owner's commands

void Source::open(double now_s, const OpenLease& command) {
  if (geometry_.layers == 0) throw std::invalid_argument("a lease needs a pool: call set_pool first");
  const double unclaimed_ttl_s = command.unclaimed_ttl_s < 0 ? options_.unclaimed_ttl_s : command.unclaimed_ttl_s;
  auto found = leases_.find(command.key);
  if (found != leases_.end() && found->second.open) throw std::invalid_argument("this lease is open already");
  if (found == leases_.end()) {
    if (leases_.size() >= options_.limits.leases) throw std::invalid_argument("too many leases are open");
    found = leases_.emplace(command.key, Lease{}).first;
    found->second.ready_tokens.assign(geometry_.layers, 0);
    found->second.released.assign(geometry_.layers, 0);
  }
  Lease& lease = found->second;
  lease.open = true;
  lease.unclaimed_ttl_s = unclaimed_ttl_s;
  if (!lease.claimed) lease.expires_s = now_s + unclaimed_ttl_s;
  out_.wake_at(lease.expires_s);
  stats_.leases = leases_.size();

  if (const auto ended = ended_.find(command.key); ended != ended_.end()) {
    const EndedLease before = ended->second;
    ended_.erase(ended);
    lease.generation = before.generation + 1;
    // A sink may be done before its source begins, or begins again: the lease then ends as soon as it is open.
    if (before.by_sink) return end(now_s, found, before.cause, before.detail, true);
  }
  for (const ReaderId& id : lease.readers) attach(id, lease);
  const auto [first, last] = parked_.equal_range(command.key);
  std::vector<ReaderId> waiting;
  for (auto at = first; at != last; ++at) waiting.push_back(at->second);
  parked_.erase(first, last);
  for (const ReaderId& id : waiting) {
    lease.readers.push_back(id);
    claim(now_s, lease);
    attach(id, lease);
  }
}

void Source::claim(double now_s, Lease& lease) {
  lease.claimed = true;
  lease.expires_s = now_s + options_.lease_ttl_s;
  out_.wake_at(lease.expires_s);
}

void Source::extend(const ExtendLease& command) {
  for (const std::uint32_t block : command.blocks) {
    if (block >= geometry_.blocks) {
      throw std::invalid_argument("block " + std::to_string(block) + " lies outside the pool of " +
                                  std::to_string(geometry_.blocks) + " blocks");
    }
  }
  Lease* lease = current(command.key, command.generation);
  if (lease == nullptr) return;
  if (lease->blocks.size() + command.blocks.size() > geometry_.blocks) {
    throw std::invalid_argument("a lease cannot have more blocks than the pool");
  }
  lease->blocks.insert(lease->blocks.end(), command.blocks.begin(), command.blocks.end());
  stats_.leased_blocks += command.blocks.size();
}

void Source::post_ready(const PostReady& command) {
  if (command.layer < -1 || command.layer >= static_cast<std::int64_t>(geometry_.layers)) {
    throw std::invalid_argument("layer " + std::to_string(command.layer) + " is not one of the pool's " +
                                std::to_string(geometry_.layers) + " layers");
  }
  Lease* lease = current(command.key, command.generation);
  if (lease == nullptr) return;
  if (command.tokens > lease->blocks.size() * geometry_.block_tokens) {
    throw std::invalid_argument(std::to_string(command.tokens) + " tokens cannot be ready in the " +
                                std::to_string(lease->blocks.size()) + " blocks of this lease");
  }
  bool grew = false;
  for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) {
    if (command.layer >= 0 && layer != static_cast<std::uint32_t>(command.layer)) continue;
    if (command.tokens <= lease->ready_tokens[layer]) continue;
    lease->ready_tokens[layer] = command.tokens;
    lease->released[layer] = std::max(lease->released[layer], command.released);
    grew = true;
  }
  if (!grew) return;
  const auto layer = command.layer < 0 ? kAllLayers : static_cast<std::uint16_t>(command.layer);
  for (const ReaderId& id : lease->readers) tell_ready(*lease, id, layer, command.tokens);
}

void Source::complete(const CompleteLease& command) {
  Lease* lease = current(command.key, command.generation);
  if (lease == nullptr) return;
  if (command.tokens > lease->blocks.size() * geometry_.block_tokens) {
    throw std::invalid_argument(std::to_string(command.tokens) + " tokens do not fit the " +
                                std::to_string(lease->blocks.size()) + " blocks of this lease");
  }
  lease->complete_tokens = command.tokens;
  const std::vector<ReaderId> readers = lease->readers;
  for (const ReaderId& id : readers) refuse_if_short(*lease, id);
}

void Source::revoke(double now_s, const RevokeLease& command) {
  const auto found = leases_.find(command.key);
  if (command.final_) {
    const std::string detail = "the source gave the lease up for good";
    if (found != leases_.end()) {
      ++stats_.leases_revoked;
      return end(now_s, found, Cause::revoked, detail);
    }
    if (ended_.contains(command.key)) return;
    // Prefill may fail before it opens the lease; whoever waits for it, or comes later, must not wait in vain.
    const auto [first, last] = parked_.equal_range(command.key);
    for (auto at = first; at != last; ++at) {
      out_.send(at->second.first, frames::Ended{at->second.second, Cause::revoked, detail});
      readers_.erase(at->second);
    }
    parked_.erase(first, last);
    return remember(now_s, command.key,
                    {.generation = generation(command.key), .cause = Cause::revoked, .detail = detail});
  }
  if (found == leases_.end() || !found->second.open) return;
  Lease& lease = found->second;
  ++stats_.leases_revoked;
  ++lease.generation;
  lease.open = false;
  stats_.leased_blocks -= lease.blocks.size();
  lease.blocks.clear();
  lease.ready_tokens.assign(geometry_.layers, 0);
  lease.released.assign(geometry_.layers, 0);
  lease.complete_tokens.reset();
  for (const ReaderId& id : lease.readers) {
    stop_serving(id);
    if (!readers_.at(id).ask.data_only) out_.send(id.first, frames::Revoked{id.second, lease.generation});
  }
}

void Source::shut_down() {
  while (!leases_.empty()) end(0, leases_.begin(), Cause::cancelled, "the agent was closed");
  for (const auto& [key, id] : parked_) {
    out_.send(id.first, frames::Ended{id.second, Cause::unreachable, "the source was closed"});
  }
  parked_.clear();
  readers_.clear();
}

// ---------------------------------------------------------------- what sinks say

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
  claim(now_s, lease);
  if (lease.open) attach(id, lease);
  return true;
}

// The connection on which the sink was told has died: it wants to be told here.
bool Source::promote(double now_s, const ReaderId& id, Reader& reader, const frames::Ask& ask) {
  const auto found = leases_.find(ask.key);
  const bool same = reader.ask.key == ask.key && reader.ask.first_block == ask.first_block &&
                    reader.ask.blocks == ask.blocks && reader.ask.tokens == ask.tokens;
  if (!same || !reader.ask.data_only || ask.data_only || found == leases_.end()) return false;
  reader.ask.data_only = false;
  claim(now_s, found->second);
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
  claim(now_s, *lease);
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
  const std::uint32_t every = options_.faults.corrupt_every;
  out_.put(Serve{.connection = id.first,
                 .pull = id.second,
                 .sequence = request.sequence,
                 .layer = request.layer,
                 .blocks = {first, first + request.blocks},
                 .released = lease.released[request.layer / geometry_.tensors_per_layer()],
                 .corrupt = every != 0 && chunks_served_ % every == 0});
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

void Source::on_keep_alive(double now_s, ConnectionId connection, const frames::KeepAlive& frame) {
  const auto reader = readers_.find({connection, frame.pull});
  if (reader == readers_.end()) return;  // `Ended` is on its way.
  reader->second.keep_alive_s = now_s;
  if (const auto lease = leases_.find(reader->second.ask.key); lease != leases_.end()) claim(now_s, lease->second);
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

// ---------------------------------------------------------------- ends

void Source::stop_serving(const ReaderId& id) {
  Reader& reader = readers_.at(id);
  reader.held.clear();
  reader.in_flight.clear();
  out_.put(StopServing{id.first, id.second});
}

void Source::end(double now_s, Leases::iterator found, Cause cause, const std::string& detail, bool by_sink) {
  const Key key = found->first;
  const Lease lease = std::move(found->second);
  leases_.erase(found);
  stats_.leases = leases_.size();
  stats_.leased_blocks -= lease.blocks.size();
  for (const ReaderId& id : lease.readers) {
    stop_serving(id);
    // The sink that released has forgotten its pull and ignores this.
    out_.send(id.first, frames::Ended{id.second, cause == Cause::none ? Cause::expired : cause, detail});
    readers_.erase(id);
  }
  remember(now_s, key, {.generation = lease.generation, .cause = cause, .detail = detail, .by_sink = by_sink});
  const auto kind = cause == Cause::none ? ReportKind::lease_released : ReportKind::lease_ended;
  out_.put(Report{.kind = kind, .key = key, .cause = cause, .detail = detail});
}

void Source::remember(double now_s, const Key& key, EndedLease ended) {
  ended.forget_s = now_s + options_.limits.ended_ttl_s;
  if (ended.detail.empty()) ended.detail = "the lease was released before";
  ended_order_.emplace_back(key, ended.forget_s);
  ended_[key] = std::move(ended);
  while (ended_order_.size() > options_.limits.ended ||
         (!ended_order_.empty() && ended_order_.front().second <= now_s)) {
    const auto& [oldest, forget_s] = ended_order_.front();
    const auto at = ended_.find(oldest);
    if (at != ended_.end() && at->second.forget_s == forget_s) ended_.erase(at);
    ended_order_.pop_front();
  }
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

void Source::tick(double now_s) {
  for (auto lease = leases_.begin(); lease != leases_.end();) {
    const auto next = std::next(lease);
    if (now_s >= lease->second.expires_s) {
      ++stats_.leases_expired;
      const char* why = lease->second.claimed ? "no sink kept the lease alive" : "no sink ever asked for the lease";
      end(now_s, lease, Cause::expired, why);
    } else {
      out_.wake_at(lease->second.expires_s);
    }
    lease = next;
  }
  for (auto reader = readers_.begin(); reader != readers_.end();) {
    const auto& [id, state] = *reader;
    ++reader;
    const auto lease = leases_.find(state.ask.key);
    if (lease == leases_.end()) {
      const double forget_s = state.keep_alive_s + options_.lease_ttl_s;
      if (now_s >= forget_s) {
        detach(ReaderId(id));
      } else {
        out_.wake_at(forget_s);
      }
      continue;
    }
    if (state.held.empty()) continue;
    if (now_s < state.serve_after_s) {
      out_.wake_at(state.serve_after_s);
      continue;
    }
    for (const frames::Request& request : std::exchange(readers_.at(id).held, {})) serve(id, lease->second, request);
  }
}

}  // namespace baton::transfer
