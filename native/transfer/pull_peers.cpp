// The sink's sources: one per endpoint, connected when a pull or a release needs it, tried again for
// `connect_timeout_s` when the last connection is lost, closed when nothing has needed it for a while. Where agents
// agree but no chunk ever arrives, because every launch on a GPU is refused for example, that time is not renewed.
#include <algorithm>
#include <stdexcept>

#include "transfer/handshake.h"
#include "transfer/pull.h"

namespace baton::transfer {
namespace {

constexpr std::uint32_t kRefusalsMax = 2;   // On every rail. One may be a firewall's, while its rules are changed.
constexpr std::uint32_t kFruitlessMax = 3;  // Fewer may be a source that restarts.
constexpr double kAttemptS = 10;            // As for a handshake. Where nothing answers, the kernel's tries grow rare.

}  // namespace

Sink::Peer& Sink::peer_of(double now_s, const std::string& endpoint) {
  const auto parsed = parse_endpoint(endpoint);
  if (!parsed) throw std::invalid_argument("'" + endpoint + "' is not an endpoint of an agent");
  if (const auto found = peers_.find(endpoint); found != peers_.end()) return found->second;
  if (peers_.size() >= options_.limits.peers) throw std::invalid_argument("too many sources are in use");
  Peer& peer = peers_[endpoint];
  peer.endpoint = endpoint;
  for (const Rail& rail : parsed->rails) peer.rails.push_back({rail});
  const auto nearer = [](const Rail& a, const Rail& b) { return a.distance < b.distance; };
  std::stable_sort(peer.rails.begin(), peer.rails.end(), nearer);
  peer.incarnation = parsed->incarnation;
  peer.give_up_s = now_s + options_.connect_timeout_s;
  peer.lost_detail = "no answer from the source";
  reach(now_s, peer);
  out_.wake_at(peer.give_up_s);
  return peer;
}

void Sink::connect(double now_s, Peer& peer, std::size_t rail) {
  const ConnectionId connection = next_connection_;
  next_connection_ += 2;
  peer.lanes[connection] = Lane{.connection = connection, .rail = rail, .heard_s = now_s};
  endpoints_[connection] = peer.endpoint;
  out_.put(Connect{connection, peer.rails[rail].address, peer.rails[rail].label});
}

// Tries one more rail while no lane is ready: the nearest of those that were not lost lately, or else any. A rail
// that swallows all frames costs a quarter of the time limit, not all of it.
void Sink::reach(double now_s, Peer& peer) {
  peer.retry_s = now_s + options_.connect_timeout_s / 4;
  out_.wake_at(peer.retry_s);
  const SourceRail* next = nullptr;
  for (const SourceRail& rail : peer.rails) {
    if (rail.retry_s == Lane::kNever || lanes_on(peer, &rail - peer.rails.data()) > 0) continue;
    if (next == nullptr || std::max(rail.retry_s, now_s) < std::max(next->retry_s, now_s)) next = &rail;
  }
  if (next != nullptr) connect(now_s, peer, next - peer.rails.data());
}

Sink::Peer* Sink::peer_on(ConnectionId connection) {
  const auto found = endpoints_.find(connection);
  return found == endpoints_.end() ? nullptr : &peers_.at(found->second);
}

std::uint64_t Sink::expected_incarnation(ConnectionId connection) const {
  const auto found = endpoints_.find(connection);
  return found == endpoints_.end() ? 0 : peers_.at(found->second).incarnation;
}

bool Sink::on_agreed(double now_s, ConnectionId connection, const Handshake& handshake) {
  Peer* peer = peer_on(connection);
  if (peer == nullptr) return true;
  if (peer->pool.layers == 0) {
    peer->pool = handshake.peer();
    for (auto& [id, pull] : pulls_) {
      if (pull.endpoint == peer->endpoint) measure(pull, peer->pool);
    }
  } else if (peer->pool != handshake.peer()) {
    return false;
  }
  Lane& lane = peer->lanes.at(connection);
  lane.agreed = true;
  lane.backend = handshake.backend();
  lane.checksum = handshake.checksum();
  lane.declined = handshake.declined();
  lane.fallback = handshake.fallback();
  if (handshake.converts()) lane.staging.emplace(peer->pool, options_.limits);
  lane.hear(now_s);
  peer->rails[lane.rail].retry_s = 0;
  peer->lease_ttl_s = handshake.lease_ttl_s();
  if (peer->control == 0) {
    peer->led_s = now_s;
    peer->delivered = false;
    lead(now_s, *peer, connection);
    return true;
  }
  request_more(now_s, peer->endpoint);
  return true;
}

// Makes this the lane of requests to the source and of its notices.
void Sink::lead(double now_s, Peer& peer, ConnectionId connection) {
  peer.control = connection;
  peer.lingering = false;
  peer.idle_since_s = now_s;
  for (const frames::Release& release : std::exchange(peer.releases, {})) out_.send(connection, release);
  for (auto& [id, pull] : pulls_) {
    if (pull.endpoint == peer.endpoint && pull.state != State::fencing) ask(now_s, pull, connection, false);
  }
  out_.wake_at(now_s + options_.limits.idle_s);
}

// The lane that led is lost: another leads, or the peer is sought again.
void Sink::follow(double now_s, Peer& peer, const std::string& detail) {
  const bool had_one = std::exchange(peer.control, 0) != 0;
  const Lane* next = nullptr;
  for (const auto& [connection, lane] : peer.lanes) {
    if (lane.ready() && (next == nullptr || lane.rail < next->rail)) next = &lane;
  }
  if (next != nullptr) return lead(now_s, peer, next->connection);
  if (had_one) {
    const bool useful = peer.delivered || now_s >= peer.led_s + options_.connect_timeout_s;
    peer.fruitless = useful ? 0 : peer.fruitless + 1;
    if (peer.fruitless < kFruitlessMax) peer.give_up_s = now_s + options_.connect_timeout_s;
  }
  // An agent listens for as long as it lives, so this one is gone.
  const auto gone = [](const SourceRail& rail) {
    return rail.retry_s == Lane::kNever || rail.refusals >= kRefusalsMax;
  };
  if (std::all_of(peer.rails.begin(), peer.rails.end(), gone)) peer.give_up_s = now_s;
  peer.lost_detail = detail;
  peer.retry_s = now_s + options_.limits.reconnect_s;
  out_.wake_at(std::min(peer.retry_s, peer.give_up_s));
}

void Sink::on_refused(double now_s, ConnectionId connection, Cause cause, const std::string& detail) {
  Peer* peer = peer_on(connection);
  if (peer == nullptr) return;
  const auto refused = peer->lanes.extract(connection);
  endpoints_.erase(connection);
  // The answer on one rail may come from another agent; it counts as the source's only when no rail is left.
  peer->rails[refused.mapped().rail].retry_s = Lane::kNever;
  const auto open = [](const SourceRail& rail) { return rail.retry_s != Lane::kNever; };
  if (peer->control != 0) return;
  if (std::any_of(peer->rails.begin(), peer->rails.end(), open)) return reach(now_s, *peer);
  const std::string endpoint = peer->endpoint;
  peer->releases.clear();
  fail_all(endpoint, cause, detail);
  forget(*peer);
  peers_.erase(endpoint);
}

void Sink::on_closed(double now_s, ConnectionId connection, const std::string& detail, bool refused) {
  Peer* peer = peer_on(connection);
  if (peer == nullptr) return;
  endpoints_.erase(connection);
  for (auto& [id, pull] : pulls_) {
    if (pull.endpoint != peer->endpoint) continue;
    account(now_s, pull);
    pull.lost = detail;
    // Nothing of that connection is written any more, so its chunks can be requested again.
    for (auto chunk = pull.in_flight.begin(); chunk != pull.in_flight.end();) {
      const auto next = std::next(chunk);
      if (chunk->second.connection == connection) {
        pull.again.push_back(chunk->second.run);
        pull.in_flight.erase(chunk);
      }
      chunk = next;
    }
    std::erase_if(pull.converting, [&](const auto& entry) {
      if (entry.second.connection == connection) pull.again.push_back(entry.second.run);
      return entry.second.connection == connection;
    });
    if (pull.state == State::verifying) pull.state = State::pulling;
  }
  const auto lost = peer->lanes.extract(connection);
  note_lost(now_s, *peer, lost.mapped());
  SourceRail& rail = peer->rails[lost.mapped().rail];
  rail.refusals = refused ? rail.refusals + 1 : 0;
  for (auto& [id, pull] : pulls_) pull.shares.erase(connection);
  if (peer->control == connection || peer->control == 0) follow(now_s, *peer, detail);
  request_more(now_s, peer->endpoint);
}

void Sink::fail_all(const std::string& endpoint, Cause cause, const std::string& detail) {
  for (auto& [id, pull] : pulls_) {
    if (pull.endpoint == endpoint) fail(pull, cause, detail);
  }
}

void Sink::send_release(Peer& peer, const Key& key, Cause cause) {
  if (peer.control != 0) {
    out_.send(peer.control, frames::Release{key, cause});
  } else if (peer.releases.size() < options_.limits.pulls) {
    peer.releases.push_back({key, cause});
  }
}

void Sink::forget(Peer& peer) {
  for (const auto& [connection, lane] : peer.lanes) {
    endpoints_.erase(connection);
    out_.put(Close{connection, "not needed any more"});
  }
}

// While no lane is ready, a rail is tried anew only once its last attempt has ended.
void Sink::end_attempts(double now_s, Peer& peer) {
  for (auto& [connection, lane] : peer.lanes) {
    if (lane.closing) continue;
    const double give_up_s = lane.heard_s + kAttemptS;
    lane.closing = now_s >= give_up_s;
    if (lane.closing) {
      out_.put(Close{connection, "no answer"});
    } else {
      out_.wake_at(give_up_s);
    }
  }
}

void Sink::tick_peers(double now_s) {
  for (auto at = peers_.begin(); at != peers_.end();) {
    Peer& peer = at->second;
    const bool wanted = peer.pulls > 0 || !peer.releases.empty();
    bool forgotten = false;
    if (peer.control == 0) end_attempts(now_s, peer);
    if (peer.control != 0) {
      forgotten = !wanted && now_s >= peer.idle_since_s + options_.limits.idle_s;
      if (!wanted && !forgotten) out_.wake_at(peer.idle_since_s + options_.limits.idle_s);
      check_lanes(now_s, peer);
      if (wanted) widen(now_s, peer);
    } else if (!wanted) {
      forgotten = true;
    } else if (now_s >= peer.give_up_s) {
      // The source may still hold leases for this side: releases are sent until those would have expired.
      forgotten = peer.lingering;
      peer.lingering = true;
      peer.give_up_s = now_s + (peer.lease_ttl_s > 0 ? peer.lease_ttl_s : options_.lease_ttl_s);
      out_.wake_at(peer.give_up_s);
      const std::string& address = peer.rails.front().address;
      const std::string others = peer.rails.size() == 1 ? "" : " and its other rails";
      fail_all(peer.endpoint, Cause::unreachable, "cannot reach " + address + others + ": " + peer.lost_detail);
    } else {
      out_.wake_at(peer.give_up_s);
      if (now_s >= peer.retry_s) reach(now_s, peer);
      out_.wake_at(peer.retry_s);
    }
    if (!forgotten) {
      ++at;
      continue;
    }
    forget(peer);
    at = peers_.erase(at);
  }
}

}  // namespace baton::transfer
