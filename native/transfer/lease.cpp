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
  if (lease.claimed) tell_asked(command.key);
  for (const ReaderId& id : lease.readers) attach(id, lease);
  const auto [first, last] = parked_.equal_range(command.key);
  std::vector<ReaderId> waiting;
  for (auto at = first; at != last; ++at) waiting.push_back(at->second);
  parked_.erase(first, last);
  for (const ReaderId& id : waiting) {
    lease.readers.push_back(id);
    claim(now_s, command.key, lease);
    attach(id, lease);
  }
}

void Source::tell_asked(const Key& key) {
  if (options_.tells_asks) out_.put(Report{.kind = ReportKind::lease_asked, .key = key});
}

void Source::claim(double now_s, const Key& key, Lease& lease) {
  if (!lease.claimed && lease.open) tell_asked(key);
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
    // Prefill may fail before it opens the lease; sinks that wait for it, now or later, must not wait in vain.
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

// ---------------------------------------------------------------- ends

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
