#include "transfer/pull.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <stdexcept>

namespace baton::transfer {
namespace {

std::string seconds(double duration_s) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", duration_s);
  return text;
}

std::uint32_t blocks_of(std::uint32_t tokens, std::uint32_t block_tokens) {
  return static_cast<std::uint32_t>((std::uint64_t{tokens} + block_tokens - 1) / block_tokens);
}

}  // namespace

Sink::Sink(const Options& options, const Geometry& geometry, Outbox& out, Stats& stats)
    : options_(options), geometry_(geometry), out_(out), stats_(stats) {}

double Sink::keep_alive_interval_s(const Peer& peer) const {
  if (options_.faults.silent) return std::numeric_limits<double>::infinity();
  return std::clamp(peer.lease_ttl_s / 3, 0.02, 1.0);
}

// ---------------------------------------------------------------- the owner's commands

void Sink::pull(double now_s, const StartPull& command) {
  const auto refuse = [](const std::string& why) { throw std::invalid_argument(why); };
  if (geometry_.layers == 0) refuse("a pull needs a pool: call set_pool first");
  const std::uint32_t block_tokens = geometry_.block_tokens;
  if (command.first_token % block_tokens != 0) {
    refuse("first_token " + std::to_string(command.first_token) + " is not a multiple of the block size " +
           std::to_string(block_tokens));
  }
  if (geometry_.layout && command.tokens > layout::kTokensMax) refuse("a pull ends within 2**24 tokens");
  if (command.tokens <= command.first_token) {
    refuse("there is nothing to pull: tokens " + std::to_string(command.tokens) + " is not above first_token " +
           std::to_string(command.first_token));
  }
  const std::uint32_t needed = blocks_of(command.tokens, block_tokens) - command.first_token / block_tokens;
  if (command.blocks.size() != needed) {
    refuse("tokens [" + std::to_string(command.first_token) + ", " + std::to_string(command.tokens) + ") fill " +
           std::to_string(needed) + " blocks, not " + std::to_string(command.blocks.size()));
  }
  for (const std::uint32_t block : command.blocks) {
    if (block >= geometry_.blocks) {
      refuse("block " + std::to_string(block) + " lies outside the pool of " + std::to_string(geometry_.blocks) +
             " blocks");
    }
  }
  if (!(command.budget_s > 0)) refuse("budget_s must be positive");
  if (by_key_.contains(command.key)) refuse("this key is being pulled already");
  if (pulls_.size() >= options_.limits.pulls) refuse("too many pulls are running");
  Peer& peer = peer_of(now_s, command.endpoint);
  if (peer.lingering) {
    peer.lingering = false;
    peer.give_up_s = now_s + options_.connect_timeout_s;
    out_.wake_at(std::min(peer.retry_s, peer.give_up_s));
  }

  Pull pull;
  pull.id = next_pull_++;
  pull.key = command.key;
  pull.endpoint = command.endpoint;
  pull.first_token = command.first_token;
  pull.tokens = command.tokens;
  pull.blocks = command.blocks;
  pull.started_s = pull.accounted_s = pull.progress_s = pull.keep_alive_s = now_s;
  pull.deadline_s = now_s + command.budget_s;
  if (peer.pool.layers != 0) measure(pull, peer.pool);
  ++peer.pulls;
  by_key_[pull.key] = pull.id;
  Pull& kept = pulls_.emplace(pull.id, std::move(pull)).first->second;
  if (peer.control != 0) ask(now_s, kept, peer.control, false);
  tick_pull(now_s, kept);  // Sets its alarms.
}

void Sink::cancel(const CancelPull& command) {
  const auto found = by_key_.find(command.key);
  if (found != by_key_.end()) fail(pulls_.at(found->second), Cause::cancelled, "the pull was cancelled");
}

void Sink::release(double now_s, const ReleaseLease& command) {
  send_release(peer_of(now_s, command.endpoint), command.key, Cause::none);
}

void Sink::shut_down() {
  for (auto& [id, pull] : pulls_) fail(pull, Cause::cancelled, "the agent was closed");
}

// ---------------------------------------------------------------- what sources say

void Sink::ask(double now_s, Pull& pull, ConnectionId connection, bool data_only) {
  const Peer& peer = peers_.at(pull.endpoint);
  pull.shares.try_emplace(connection);
  if (!data_only) {
    const Lane& lane = peer.lanes.at(connection);
    pull.keep_alive_s = pull.progress_s = now_s;
    pull.backend = lane.backend;
    pull.declined = lane.declined;
    pull.fallback = lane.fallback;
  }
  out_.send(connection, frames::Ask{.pull = pull.id,
                                    .key = pull.key,
                                    .first_block = pull.first_block,
                                    .blocks = pull.pool_blocks,
                                    .tokens = pull.tokens,
                                    .data_only = data_only});
  out_.wake_at(now_s + keep_alive_interval_s(peer));
}

void Sink::measure(Pull& pull, const Geometry& pool) {
  pull.pool = pool;
  pull.first_block = pull.first_token / pool.block_tokens;
  pull.pool_blocks = blocks_of(pull.tokens, pool.block_tokens) - pull.first_block;
  forget_progress(pull);
}

// A pull that is fencing or waits for its writes to stop takes nothing from its source.
Sink::Pull* Sink::pull_on(ConnectionId connection, PullId id) {
  const auto found = pulls_.find(id);
  const Peer* peer = peer_on(connection);
  if (found == pulls_.end() || peer == nullptr || found->second.endpoint != peer->endpoint) return nullptr;
  return found->second.state == State::fencing ? nullptr : &found->second;
}

bool Sink::on_opened(double now_s, ConnectionId connection, const frames::Opened& frame) {
  Pull* pull = pull_on(connection, frame.pull);
  if (pull == nullptr) return true;
  if (frame.generation == 0) return false;
  pull->progress_s = now_s;
  if (pull->generation != 0 && frame.generation != pull->generation && !pull->revoked) {
    restart(*pull);  // The lease was revoked and opened again while the connection was lost.
  }
  pull->generation = frame.generation;
  pull->revoked = false;
  pull->ever_opened = true;
  if (pull->stopping) {
    pull->reopened = true;
  } else {
    pull->state = State::pulling;
    Peer& peer = peers_.at(pull->endpoint);
    const std::uint64_t bytes = std::uint64_t{pull->pool_blocks} * pull->pool.tensors() * pull->pool.block_bytes;
    peer.lanes_wanted =
        std::max<std::size_t>(peer.lanes_wanted, bytes / std::max<std::uint64_t>(1, options_.lane_bytes));
    widen(now_s, peer);
    request_more(now_s, *pull);
  }
  return true;
}

bool Sink::on_ready(double now_s, ConnectionId connection, const frames::Ready& frame) {
  Pull* pull = pull_on(connection, frame.pull);
  if (pull == nullptr || frame.generation != pull->generation || pull->revoked) return true;
  if (frame.layer != kAllLayers && frame.layer >= pull->pool.layers) return false;
  for (std::uint32_t layer = 0; layer < pull->pool.layers; ++layer) {
    if (frame.layer != kAllLayers && layer != frame.layer) continue;
    pull->ready_tokens[layer] = std::max(pull->ready_tokens[layer], frame.tokens);
  }
  pull->progress_s = now_s;
  request_more(now_s, *pull);
  return true;
}

void Sink::on_revoked(ConnectionId connection, const frames::Revoked& frame) {
  Pull* pull = pull_on(connection, frame.pull);
  if (pull != nullptr && !pull->revoked) restart(*pull);
}

void Sink::on_ended(ConnectionId connection, const frames::Ended& frame) {
  Pull* pull = pull_on(connection, frame.pull);
  if (pull == nullptr) return;
  fail(*pull, frame.cause == Cause::none ? Cause::expired : frame.cause, frame.detail, frame.held);
}

void Sink::on_keep_alive_answer(double now_s, ConnectionId connection, const frames::KeepAliveAnswer& frame) {
  if (Pull* pull = pull_on(connection, frame.pull)) pull->progress_s = now_s;
}

// ---------------------------------------------------------------- reports to the owner

void Sink::report_progress(Pull& pull) {
  const std::uint32_t per_layer = pull.pool.tensors_per_layer();
  const auto whole = [&](std::uint32_t layer) {
    const auto first = pull.verified.begin() + layer * per_layer;
    return std::all_of(first, first + per_layer, [&](std::uint32_t blocks) { return blocks == pull.pool_blocks; });
  };
  while (pull.layers_reported < pull.pool.layers && whole(pull.layers_reported)) {
    ++pull.layers_reported;
    out_.put(report_of(pull, ReportKind::pull_progress));
  }
}

void Sink::account(double now_s, Pull& pull) {
  (pull.in_flight.empty() && pull.converting.empty() ? pull.waiting_s : pull.moving_s) += now_s - pull.accounted_s;
  pull.accounted_s = now_s;
}

Report Sink::report_of(const Pull& pull, ReportKind kind) const {
  std::vector<RailShare> rails;
  for (const auto& [name, carried] : pull.rails) rails.push_back(carried);
  return {.kind = kind,
          .key = pull.key,
          .cause = pull.cause,
          .detail = pull.detail,
          .layers = pull.layers_reported,
          .bytes = pull.blocks_verified * pull.pool.block_bytes,
          .tokens = pull.tokens,
          .waiting_s = pull.waiting_s,
          .moving_s = pull.moving_s,
          .backend = pull.backend,
          .declined = pull.declined,
          .restarts = pull.restarts,
          .rails = std::move(rails)};
}

// ---------------------------------------------------------------- ends and restarts

void Sink::finish(double now_s, Pull& pull) {
  account(now_s, pull);
  ++stats_.pulls_done;
  if (pull.fallback) ++stats_.fallbacks;
  send_release(peers_.at(pull.endpoint), pull.key, Cause::none);
  out_.put(report_of(pull, ReportKind::pull_done));
  Peer& peer = peers_.at(pull.endpoint);
  --peer.pulls;
  peer.idle_since_s = now_s;
  if (peer.pulls == 0) peer.lanes_wanted = 1;
  erase(pull.id);
}

void Sink::forget_progress(Pull& pull) {
  pull.ready_tokens.assign(pull.pool.layers, 0);
  pull.requested.assign(pull.pool.tensors(), 0);
  pull.verified.assign(pull.pool.tensors(), 0);
  pull.again.clear();
  forget_requests(pull);
  pull.blocks_verified = 0;
}

void Sink::forget_requests(Pull& pull) {
  for (const auto& [connection, share] : pull.shares) {
    auto& staging = peers_.at(pull.endpoint).lanes.at(connection).staging;
    if (staging) staging->forget(pull.id);
  }
  pull.converting.clear();
  for (const auto& [sequence, chunk] : pull.in_flight) {
    Share& share = pull.shares.at(chunk.connection);
    share.in_flight = 0;
    share.in_flight_bytes = 0;
    peers_.at(pull.endpoint).lanes.at(chunk.connection).let_go(chunk.run.blocks * pull.pool.block_bytes);
  }
  pull.in_flight.clear();
}

// The source's blocks changed under the read: everything is discarded and asked for again, once nothing of the old
// generation can be written over the new. Layers already reported are not reported twice.
void Sink::restart(Pull& pull) {
  forget_progress(pull);
  ++pull.restarts;
  pull.state = State::wanted;
  pull.revoked = true;
  pull.reopened = false;
  if (!pull.stopping) out_.put(StopPlacing{pull.id});
  pull.stopping = true;
}

void Sink::fail(Pull& pull, Cause cause, std::string detail, bool held) {
  if (pull.state == State::fencing) return;
  pull.cause = cause;
  pull.detail = std::move(detail);
  pull.state = State::fencing;
  forget_requests(pull);
  Peer& peer = peers_.at(pull.endpoint);
  --peer.pulls;  // A fencing pull needs its source no more; the peer may be forgotten before the fence is up.
  if (held) send_release(peer, pull.key, cause);
  if (!pull.stopping) out_.put(StopPlacing{pull.id});
  pull.stopping = true;
}

void Sink::on_placing_stopped(double now_s, const PlacingStopped& stopped) {
  const auto found = pulls_.find(stopped.pull);
  if (found == pulls_.end() || !found->second.stopping) return;
  Pull& pull = found->second;
  pull.stopping = false;
  account(now_s, pull);
  if (pull.state == State::fencing) {
    ++stats_.pulls_failed;
    out_.put(report_of(pull, ReportKind::pull_failed));
    const std::string endpoint = pull.endpoint;
    erase(pull.id);
    return request_more(now_s, endpoint);
  }
  if (pull.reopened) {
    pull.reopened = false;
    pull.state = State::pulling;
  }
  request_more(now_s, pull.endpoint);
}

void Sink::erase(PullId id) {
  const auto found = pulls_.find(id);
  by_key_.erase(found->second.key);
  pulls_.erase(found);
}

// ---------------------------------------------------------------- time

void Sink::tick_pull(double now_s, Pull& pull) {
  if (pull.state == State::fencing) return;
  Peer& peer = peers_.at(pull.endpoint);
  if (now_s >= pull.deadline_s) {
    const bool revoked = pull.revoked;
    return fail(pull, revoked ? Cause::revoked : Cause::deadline,
                revoked ? "the source gave the lease up and did not open it again within the pull's budget"
                        : "the pull's budget of " + seconds(pull.deadline_s - pull.started_s) + " is spent" +
                              (pull.lost.empty() ? "" : ", after its connection was lost: " + pull.lost));
  }
  out_.wake_at(pull.deadline_s);
  if (!pull.ever_opened) {
    const double give_up_s = pull.started_s + options_.wanted_timeout_s;
    if (now_s >= give_up_s) {
      return fail(pull, Cause::stalled,
                  "the source did not open the lease within " + seconds(options_.wanted_timeout_s));
    }
    out_.wake_at(give_up_s);
  } else if (peer.control != 0) {
    const double give_up_s = pull.progress_s + options_.stall_timeout_s;
    if (now_s >= give_up_s) {
      return fail(pull, Cause::stalled, "nothing came from the source for " + seconds(options_.stall_timeout_s));
    }
    out_.wake_at(give_up_s);
  }
  if (peer.control == 0) return;
  const double interval_s = keep_alive_interval_s(peer);
  if (now_s >= pull.keep_alive_s + interval_s) {
    pull.keep_alive_s = now_s;
    // All its lanes are kept alive, so that one that hangs is noticed before it is needed.
    for (const auto& [connection, share] : pull.shares) {
      out_.send(connection, frames::KeepAlive{pull.id});
      peer.lanes.at(connection).expect_answer(now_s);
    }
  }
  out_.wake_at(pull.keep_alive_s + interval_s);
  request_more(now_s, pull);  // Lanes may have waited for another that is late.
}

void Sink::tick(double now_s) {
  for (auto& [id, pull] : pulls_) tick_pull(now_s, pull);
  tick_peers(now_s);
}

}  // namespace baton::transfer
