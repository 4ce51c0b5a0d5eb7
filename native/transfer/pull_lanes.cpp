// Distribution of a pull's chunks over the lanes to its source: which lanes there are, which one gets the next chunk,
// and which is given up.
#include <algorithm>
#include <tuple>

#include "transfer/pull.h"

namespace baton::transfer {
namespace {

// Speeds measured on one thread are rough: lanes that differ by less than this share evenly, as their windows allow.
constexpr double kClearlySlower = 4;
constexpr double kAboutEqual = 1.5;
constexpr double kLagS = 0.02;       // A lane that was silent for longer holds no other back.
constexpr double kSuspicionS = 0.1;  // Time to read what had arrived while this side was slow.

}  // namespace

std::size_t Sink::lanes_on(const Peer& peer, std::size_t rail) const {
  const auto on_it = [&](const auto& entry) { return entry.second.rail == rail; };
  return static_cast<std::size_t>(std::count_if(peer.lanes.begin(), peer.lanes.end(), on_it));
}

// Opens the lanes that are wanted and not there, on the nearest rails that work: first one on each, then the next.
void Sink::widen(double now_s, Peer& peer) {
  if (peer.control == 0) return;
  const auto& striped = options_.striped;
  if (std::find(striped.begin(), striped.end(), peer.lanes.at(peer.control).backend) == striped.end()) return;
  const std::size_t wanted = std::min(peer.lanes_wanted, options_.limits.lanes);
  std::uint32_t nearest = ~0u;
  for (const SourceRail& rail : peer.rails) {
    if (rail.retry_s <= now_s) nearest = std::min(nearest, rail.distance);
  }
  for (std::uint32_t stream = 0; stream < options_.streams; ++stream) {
    for (std::size_t at = 0; at < peer.rails.size() && peer.lanes.size() < wanted; ++at) {
      const SourceRail& rail = peer.rails[at];
      if (rail.retry_s > now_s) {
        out_.wake_at(rail.retry_s);
      } else if (rail.distance == nearest && lanes_on(peer, at) <= stream) {
        connect(now_s, peer, at);
      }
    }
  }
}

// The lane for a pull's next chunk, among the nearest: of those that would be done with it soon, the one that was
// asked for the least, so that equal lanes carry equal bytes. Null: all have enough to do.
Lane* Sink::next_lane(double now_s, Peer& peer, const Pull& pull) {
  std::size_t nearest = peer.rails.size();
  double fastest = 0;
  for (const auto& [connection, lane] : peer.lanes) {
    if (!lane.ready()) continue;
    nearest = std::min(nearest, lane.rail);
    fastest = std::max(fastest, lane.bytes_per_s);
  }
  if (nearest == peer.rails.size()) return nullptr;
  const auto usable = [&](const Lane& lane) {
    return lane.ready() && peer.rails[lane.rail].distance == peer.rails[nearest].distance;
  };
  const auto bytes = chunk_blocks(pull.pool, options_.limits) * pull.pool.block_bytes;
  const auto done_in_s = [&](const Lane& lane) {
    const double speed = lane.speed(now_s);
    return static_cast<double>(lane.in_flight_bytes + bytes) / (speed > 0 ? speed : std::max(fastest, 1.0));
  };
  double soonest_s = Lane::kNever;
  for (const auto& [connection, lane] : peer.lanes) {
    if (usable(lane)) soonest_s = std::min(soonest_s, done_in_s(lane));
  }
  // Lanes that are being opened count: their part of the pull is left for them.
  const bool shared = peer.lanes.size() > 1;
  const auto full = [&](const Lane& lane, const Share& share) {
    return (lane.staging && !lane.staging->has_room(pull.id, peer.pulls)) ||
           share.in_flight >= options_.limits.chunks_in_flight ||
           (shared && share.in_flight >= 2 && share.in_flight_bytes >= options_.limits.lane_window_bytes);
  };
  const auto less = [](const Share& a, const Lane& of_a, const Share& b, const Lane& of_b) {
    return std::tie(a.asked_bytes, of_a.asked_bytes) < std::tie(b.asked_bytes, of_b.asked_bytes);
  };
  Lane* best = nullptr;
  Share least;
  for (auto& [connection, lane] : peer.lanes) {
    if (!usable(lane) || done_in_s(lane) > kClearlySlower * soonest_s) continue;
    const auto known = pull.shares.find(connection);
    const Share share = known == pull.shares.end() ? Share{} : known->second;
    if (full(lane, share) || (best != nullptr && !less(share, lane, least, *best))) continue;
    best = &lane;
    least = share;
  }
  if (best == nullptr) return nullptr;
  // A lane waits for its equals here; else the one that happens to be read first would finish and be asked first.
  for (const auto& [connection, lane] : peer.lanes) {
    const auto known = pull.shares.find(connection);
    const double speed = lane.speed(now_s);
    const bool equal = usable(lane) && (speed == 0 || best->bytes_per_s <= kAboutEqual * speed);
    const bool gets_on = lane.in_flight > 0 && now_s < lane.owed_since_s + kLagS;
    const std::uint64_t asked_bytes = known == pull.shares.end() ? 0 : known->second.asked_bytes;
    if (equal && gets_on && least.asked_bytes >= asked_bytes + 2 * bytes) {
      out_.wake_at(now_s + kLagS);
      return nullptr;
    }
  }
  return best;
}

std::uint32_t Sink::ready_blocks(const Pull& pull, std::uint32_t layer) {
  const std::uint32_t tokens = pull.ready_tokens[layer];
  if (tokens >= pull.tokens) return pull.pool_blocks;
  const std::uint32_t whole = tokens / pull.pool.block_tokens;
  return whole <= pull.first_block ? 0 : std::min(whole - pull.first_block, pull.pool_blocks);
}

void Sink::request_more(double now_s, Pull& pull) {
  if (pull.stopping || pull.revoked || pull.generation == 0 || pull.state == State::fencing) return;
  Peer& peer = peers_.at(pull.endpoint);
  if (peer.control == 0) return;
  account(now_s, pull);
  while (Lane* lane = next_lane(now_s, peer, pull)) {
    const auto run = next_run(pull);
    if (!run) return;
    request(now_s, pull, *lane, *run);
  }
}

// A lane is there, or has room again: any of the source's pulls may have waited for it.
void Sink::request_more(double now_s, const std::string& endpoint) {
  for (auto& [id, pull] : pulls_) {
    if (pull.endpoint == endpoint) request_more(now_s, pull);
  }
}

std::optional<Sink::Run> Sink::next_run(Pull& pull) const {
  if (!pull.again.empty()) {
    const Run run = pull.again.back();
    pull.again.pop_back();
    return run;
  }
  // Lower layers first: the engine that waits reads them first.
  for (std::uint32_t tensor = 0; tensor < pull.pool.tensors(); ++tensor) {
    const std::uint32_t ready = ready_blocks(pull, tensor / pull.pool.tensors_per_layer());
    std::uint32_t& next = pull.requested[tensor];
    if (next >= ready) continue;
    const Run run{tensor, next, std::min(chunk_blocks(pull.pool, options_.limits), ready - next)};
    next += run.blocks;
    return run;
  }
  return std::nullopt;
}

void Sink::request(double now_s, Pull& pull, Lane& lane, const Run& run) {
  if (!pull.shares.contains(lane.connection)) ask(now_s, pull, lane.connection, true);
  Share& share = pull.shares.at(lane.connection);
  const std::uint64_t bytes = run.blocks * pull.pool.block_bytes;
  ++share.in_flight;
  share.in_flight_bytes += bytes;
  share.asked_bytes += bytes;
  lane.ask_for(now_s, bytes);
  const std::uint32_t sequence =
      pull.next_sequence++;  // Used once, so that old answers cannot be mistaken for new ones.
  Chunk& chunk = pull.in_flight[sequence] = Chunk{.run = run, .connection = lane.connection};
  if (lane.staging) chunk.staged = lane.staging->take(pull.id);
  out_.send(lane.connection, frames::Request{.pull = pull.id,
                                             .generation = pull.generation,
                                             .sequence = sequence,
                                             .layer = run.layer,
                                             .first_block = pull.first_block + run.first,
                                             .blocks = run.blocks});
}

void Sink::hear(double now_s, ConnectionId connection) {
  Peer* peer = peer_on(connection);
  if (peer == nullptr) return;
  if (const auto lane = peer->lanes.find(connection); lane != peer->lanes.end()) lane->second.hear(now_s);
}

// A lane that owes an answer while another got one is given up. Its chunks are requested again once it is closed, so
// that nothing of it can be written over theirs. A source that is silent on all lanes is not the lanes' fault.
void Sink::check_lanes(double now_s, Peer& peer) {
  if (peer.lanes.size() == 1) return;
  const double patience_s = std::max(options_.stall_timeout_s / 5, 2 * keep_alive_interval_s(peer));
  for (auto& [connection, lane] : peer.lanes) {
    if (lane.closing) continue;
    if (!lane.agreed) {
      const double give_up_s = lane.heard_s + options_.connect_timeout_s;
      if (now_s < give_up_s) {
        out_.wake_at(give_up_s);
      } else {
        lane.closing = true;
        out_.put(Close{connection, "no answer"});
      }
      continue;
    }
    if (lane.owed_since_s == Lane::kNever) continue;
    const double due_s = lane.owed_since_s + patience_s;
    const auto answered = [&](const auto& entry) { return entry.second.ready() && entry.second.heard_s >= due_s; };
    if (now_s < due_s) {
      out_.wake_at(due_s);
    } else if (std::none_of(peer.lanes.begin(), peer.lanes.end(), answered)) {
      out_.wake_at(now_s + patience_s);
    } else if (lane.suspected_s == Lane::kNever || now_s < lane.suspected_s + kSuspicionS) {
      lane.suspected_s = std::min(lane.suspected_s, now_s);
      out_.wake_at(lane.suspected_s + kSuspicionS);
    } else {
      lane.closing = true;
      out_.put(Close{connection, "nothing came on it while others got on"});
      if (peer.control == connection) follow(now_s, peer, "the connection hung");
    }
  }
}

void Sink::note_lost(double now_s, Peer& peer, const Lane& lane) {
  SourceRail& rail = peer.rails[lane.rail];
  if (rail.retry_s != Lane::kNever) rail.retry_s = now_s + options_.limits.rail_retry_s;
  if (!lane.agreed) return;
  ++stats_.lanes_retired;
  ++of_rail(rails_, rail.name()).retired;
  for (auto& [id, pull] : pulls_) {
    if (pull.shares.contains(lane.connection)) ++of_rail(pull.rails, rail.name()).retired;
  }
}

// ---------------------------------------------------------------- statistics

RailShare& Sink::of_rail(std::map<std::string, RailShare>& rails, const std::string& name) const {
  // Sources come and go; beyond a bound the newcomers are counted together.
  const bool full = rails.size() >= options_.limits.rails && !rails.contains(name);
  const std::string& kept = full ? "others" : name;
  return rails.try_emplace(kept, RailShare{.rail = kept}).first->second;
}

std::vector<RailShare> Sink::rails() const {
  std::vector<RailShare> all;
  for (const auto& [name, rail] : rails_) all.push_back(rail);
  return all;
}

}  // namespace baton::transfer
