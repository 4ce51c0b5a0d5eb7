// The sink's connections to sources: one per endpoint, made when a pull or a release needs it, tried again for
// `connect_timeout_s` when it is lost, closed when nothing has needed it for a while.
#include <stdexcept>

#include "transfer/endpoint.h"
#include "transfer/handshake.h"
#include "transfer/pull.h"

namespace baton::transfer {

Sink::Peer& Sink::peer_of(double now_s, const std::string& endpoint) {
  const auto parsed = parse_endpoint(endpoint);
  if (!parsed) throw std::invalid_argument("'" + endpoint + "' is not an endpoint of an agent");
  if (const auto found = peers_.find(endpoint); found != peers_.end()) return found->second;
  if (peers_.size() >= options_.limits.peers) throw std::invalid_argument("too many sources are in use");
  Peer& peer = peers_[endpoint];
  peer.endpoint = endpoint;
  peer.address = parsed->address;
  peer.incarnation = parsed->incarnation;
  peer.give_up_s = now_s + options_.connect_timeout_s;
  peer.lost_detail = "no answer from the source";
  connect(peer);
  out_.wake_at(peer.give_up_s);
  return peer;
}

void Sink::connect(Peer& peer) {
  peer.connection = next_connection_;
  next_connection_ += 2;
  peer.ready = false;
  endpoints_[peer.connection] = peer.endpoint;
  out_.put(Connect{peer.connection, peer.address});
}

Sink::Peer* Sink::peer_on(ConnectionId connection) {
  const auto found = endpoints_.find(connection);
  return found == endpoints_.end() ? nullptr : &peers_.at(found->second);
}

std::uint64_t Sink::expected_incarnation(ConnectionId connection) const {
  const auto found = endpoints_.find(connection);
  return found == endpoints_.end() ? 0 : peers_.at(found->second).incarnation;
}

void Sink::on_agreed(double now_s, ConnectionId connection, const Handshake& handshake) {
  Peer* peer = peer_on(connection);
  if (peer == nullptr) return;
  peer->ready = true;
  peer->lingering = false;
  peer->backend = handshake.backend();
  peer->checksum = handshake.checksum();
  peer->declined = handshake.declined();
  peer->lease_ttl_s = handshake.lease_ttl_s();
  peer->idle_since_s = now_s;
  for (const frames::Release& release : std::exchange(peer->releases, {})) out_.send(connection, release);
  for (auto& [id, pull] : pulls_) {
    if (pull.endpoint == peer->endpoint && pull.state != State::fencing) ask(now_s, pull, connection);
  }
  out_.wake_at(now_s + options_.limits.idle_s);
}

void Sink::on_refused(ConnectionId connection, Cause cause, const std::string& detail) {
  Peer* peer = peer_on(connection);
  if (peer == nullptr) return;
  endpoints_.erase(connection);
  const std::string endpoint = peer->endpoint;
  peer->releases.clear();
  fail_all(endpoint, cause, detail);
  peers_.erase(endpoint);
}

void Sink::on_closed(double now_s, ConnectionId connection, const std::string& detail) {
  Peer* peer = peer_on(connection);
  if (peer == nullptr) return;
  endpoints_.erase(connection);
  if (peer->ready) peer->give_up_s = now_s + options_.connect_timeout_s;
  peer->ready = false;
  peer->connection = 0;
  peer->lost_detail = detail;
  peer->retry_s = now_s + options_.limits.reconnect_s;
  out_.wake_at(std::min(peer->retry_s, peer->give_up_s));
  for (auto& [id, pull] : pulls_) {
    if (pull.endpoint != peer->endpoint) continue;
    account(now_s, pull);
    pull.lost = detail;
    // Nothing of that connection is written any more, so its chunks can be asked for anew.
    for (const auto& [sequence, chunk] : pull.in_flight) pull.again.push_back(chunk.run);
    pull.in_flight.clear();
    if (pull.state == State::verifying) pull.state = State::pulling;
  }
}

void Sink::fail_all(const std::string& endpoint, Cause cause, const std::string& detail) {
  for (auto& [id, pull] : pulls_) {
    if (pull.endpoint == endpoint) fail(pull, cause, detail);
  }
}

void Sink::send_release(Peer& peer, const Key& key, Cause cause) {
  if (peer.ready) {
    out_.send(peer.connection, frames::Release{key, cause});
  } else if (peer.releases.size() < options_.limits.pulls) {
    peer.releases.push_back({key, cause});
  }
}

void Sink::tick_peers(double now_s) {
  for (auto at = peers_.begin(); at != peers_.end();) {
    Peer& peer = at->second;
    const bool wanted = peer.pulls > 0 || !peer.releases.empty();
    bool forget = false;
    if (peer.ready) {
      forget = !wanted && now_s >= peer.idle_since_s + options_.limits.idle_s;
      if (!wanted && !forget) out_.wake_at(peer.idle_since_s + options_.limits.idle_s);
    } else if (!wanted) {
      forget = true;
    } else if (now_s >= peer.give_up_s) {
      // The source may still hold leases for this side: it is told for as long as they would live anyway.
      forget = peer.lingering;
      peer.lingering = true;
      peer.give_up_s = now_s + (peer.lease_ttl_s > 0 ? peer.lease_ttl_s : options_.lease_ttl_s);
      out_.wake_at(peer.give_up_s);
      fail_all(peer.endpoint, Cause::unreachable, "cannot reach " + peer.address + ": " + peer.lost_detail);
    } else {
      out_.wake_at(peer.give_up_s);
      if (peer.connection == 0 && now_s >= peer.retry_s) connect(peer);
      if (peer.connection == 0) out_.wake_at(peer.retry_s);
    }
    if (!forget) {
      ++at;
      continue;
    }
    if (peer.connection != 0) {
      endpoints_.erase(peer.connection);
      out_.put(Close{peer.connection, "not needed any more"});
    }
    at = peers_.erase(at);
  }
}

}  // namespace baton::transfer
