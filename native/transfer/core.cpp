#include "transfer/core.h"

#include <stdexcept>

namespace baton::transfer {
namespace {

constexpr double kHandshakeTimeoutS = 10;  // Time for the handshake of a new connection.

template <class... Handlers>
struct Overloaded : Handlers... {
  using Handlers::operator()...;
};

}  // namespace

Core::Core(Options options)
    : options_(std::move(options)),
      source_(options_, geometry_, out_, stats_),
      sink_(options_, geometry_, out_, stats_) {}

void Core::check_geometry(const Geometry& geometry) const {
  if (geometry_.layers != 0) throw std::invalid_argument("the pool was set already");
  check(geometry);
}

void Core::set_geometry(Geometry geometry) {
  check_geometry(geometry);
  geometry_ = std::move(geometry);
}

Digest Core::make_nonce() {
  Blob counter;
  Writer(counter).put(++nonces_);
  return blake3_keyed(options_.entropy, counter);
}

std::vector<Action> Core::step(double now_s, std::span<const Event> events) {
  for (const Event& event : events) on(now_s, event);
  if (now_s >= out_.wake_s()) {
    out_.sleep();
    tick(now_s);
  }
  return out_.take();
}

void Core::on(double now_s, const Event& event) {
  std::visit(Overloaded{
                 [&](const OpenLease& e) { source_.open(now_s, e); },
                 [&](const ExtendLease& e) { source_.extend(e); },
                 [&](const PostReady& e) { source_.post_ready(e); },
                 [&](const CompleteLease& e) { source_.complete(e); },
                 [&](const RevokeLease& e) { source_.revoke(now_s, e); },
                 [&](const StartPull& e) { sink_.pull(now_s, e); },
                 [&](const CancelPull& e) { sink_.cancel(e); },
                 [&](const ReleaseLease& e) { sink_.release(now_s, e); },
                 [&](const SetFaults& e) { options_.faults = e.faults; },
                 [&](const Shutdown&) {
                   source_.shut_down();
                   sink_.shut_down();
                 },
                 [&](const Accepted& e) { open_connection(now_s, e.connection, Handshake::Side::source); },
                 [&](const Connected& e) { open_connection(now_s, e.connection, Handshake::Side::sink); },
                 [&](const Closed& e) { on_closed(now_s, e); },
                 [&](const FrameArrived& e) { on_frame(now_s, e); },
                 [&](const DataArrived& e) {
                   const auto found = connections_.find(e.connection);
                   if (found == connections_.end()) return;
                   const Handshake& handshake = found->second.handshake;
                   const bool expected = handshake.agreed() && handshake.side() == Handshake::Side::sink;
                   sink_.hear(now_s, e.connection);
                   if (!expected || !sink_.on_data(now_s, e)) drop_broken(e.connection);
                 },
                 [&](const Served& e) {
                   if (connections_.contains(e.connection)) source_.on_served(e);
                 },
                 [&](const Granted& e) {
                   if (connections_.contains(e.connection)) source_.on_granted(e);
                 },
                 [&](const Placed& e) {
                   if (e.slot >= 0 && connections_.contains(e.connection)) {
                     out_.send(e.connection, frames::CreditSlot{e.slot});
                   }
                   sink_.on_placed(now_s, e);
                 },
                 [&](const Converted& e) { sink_.on_converted(now_s, e); },
                 [&](const PlacingStopped& e) { sink_.on_placing_stopped(now_s, e); },
                 [&](const BackendOffered& e) {
                   const auto found = connections_.find(e.connection);
                   if (found == connections_.end()) return;
                   settle(now_s, e.connection, found->second.handshake.on_offered(e, out_));
                 },
                 [&](const BackendAccepted& e) {
                   const auto found = connections_.find(e.connection);
                   if (found != connections_.end()) found->second.handshake.on_accepted(e, out_);
                 },
                 [&](const BackendChecked& e) {
                   const auto found = connections_.find(e.connection);
                   if (found == connections_.end()) return;
                   settle(now_s, e.connection, found->second.handshake.on_checked(e.ok, out_));
                 },
             },
             event);
}

void Core::open_connection(double now_s, ConnectionId connection, Handshake::Side side) {
  const bool sink = side == Handshake::Side::sink;
  // A source without a pool or with too many connections drops new ones, so that no peer can keep sinks out.
  if (!sink && (geometry_.layers == 0 || connections_.size() >= options_.limits.connections)) {
    return out_.put(Close{connection, "no pool yet, or too many connections"});
  }
  const auto incarnation = sink ? sink_.expected_incarnation(connection) : 0;
  const auto [at, added] = connections_.try_emplace(
      connection, Connection{Handshake(side, connection, options_, geometry_, make_nonce(), incarnation), now_s});
  if (added && sink) at->second.handshake.start(out_);
  out_.wake_at(now_s + kHandshakeTimeoutS);
}

void Core::on_frame(double now_s, const FrameArrived& arrived) {
  const auto found = connections_.find(arrived.connection);
  if (found == connections_.end()) return;
  if (arrived.frame.empty()) return drop_broken(arrived.connection);
  const auto type = static_cast<FrameType>(arrived.frame[0]);
  const Bytes body = Bytes(arrived.frame).subspan(1);
  Handshake& handshake = found->second.handshake;
  if (!handshake.agreed()) return settle(now_s, arrived.connection, handshake.on_frame(type, body, out_));
  const bool good = handshake.side() == Handshake::Side::source ? on_source_frame(now_s, arrived.connection, type, body)
                                                                : on_sink_frame(now_s, arrived.connection, type, body);
  if (!good) drop_broken(arrived.connection);
}

bool Core::on_source_frame(double now_s, ConnectionId connection, FrameType type, Bytes body) {
  switch (type) {
    case FrameType::ask: {
      const auto frame = decode<frames::Ask>(body);
      return frame && source_.on_ask(now_s, connection, *frame);
    }
    case FrameType::request: {
      const auto frame = decode<frames::Request>(body);
      return frame && source_.on_request(now_s, connection, *frame);
    }
    case FrameType::fetched: {
      const auto frame = decode<frames::Fetched>(body);
      return frame && source_.on_fetched(connection, *frame);
    }
    case FrameType::credit: {
      const auto frame = decode<frames::CreditSlot>(body);
      if (frame) out_.put(Credit{connection, frame->slot});
      return frame.has_value();
    }
    case FrameType::keep_alive: {
      const auto frame = decode<frames::KeepAlive>(body);
      if (frame) source_.on_keep_alive(now_s, connection, *frame);
      return frame.has_value();
    }
    case FrameType::release: {
      const auto frame = decode<frames::Release>(body);
      if (frame) source_.on_release(now_s, *frame);
      return frame.has_value();
    }
    default:
      return false;
  }
}

bool Core::on_sink_frame(double now_s, ConnectionId connection, FrameType type, Bytes body) {
  sink_.hear(now_s, connection);
  switch (type) {
    case FrameType::opened: {
      const auto frame = decode<frames::Opened>(body);
      return frame && sink_.on_opened(now_s, connection, *frame);
    }
    case FrameType::ready: {
      const auto frame = decode<frames::Ready>(body);
      return frame && sink_.on_ready(now_s, connection, *frame);
    }
    case FrameType::revoked: {
      const auto frame = decode<frames::Revoked>(body);
      if (frame) sink_.on_revoked(connection, *frame);
      return frame.has_value();
    }
    case FrameType::ended: {
      const auto frame = decode<frames::Ended>(body);
      if (frame) sink_.on_ended(connection, *frame);
      return frame.has_value();
    }
    case FrameType::keep_alive_answer: {
      const auto frame = decode<frames::KeepAliveAnswer>(body);
      if (frame) sink_.on_keep_alive_answer(now_s, connection, *frame);
      return frame.has_value();
    }
    case FrameType::grant: {
      const auto frame = decode<frames::Grant>(body);
      return frame && sink_.on_grant(now_s, connection, *frame);
    }
    case FrameType::chunk_end: {
      const auto frame = decode<frames::ChunkEnd>(body);
      return frame && sink_.on_chunk_end(now_s, connection, *frame);
    }
    default:
      return false;
  }
}

void Core::settle(double now_s, ConnectionId connection, Handshake::Outcome outcome) {
  const Handshake& handshake = connections_.at(connection).handshake;
  const bool sink = handshake.side() == Handshake::Side::sink;
  switch (outcome) {
    case Handshake::Outcome::going:
      return;
    case Handshake::Outcome::agreed:
      if (sink && !sink_.on_agreed(now_s, connection, handshake)) drop_broken(connection);
      return;
    case Handshake::Outcome::refused:
      if (sink) sink_.on_refused(now_s, connection, handshake.cause(), handshake.detail());
      return drop(connection, handshake.detail());
    case Handshake::Outcome::malformed:
      return drop_broken(connection);
  }
}

void Core::drop_broken(ConnectionId connection) {
  ++stats_.protocol_errors;
  drop(connection, "the peer broke the protocol");
}

// The shell answers with `Closed`; until then frames of this connection are ignored, since it is unknown here.
void Core::drop(ConnectionId connection, std::string why) {
  connections_.erase(connection);
  out_.put(Close{connection, std::move(why)});
}

void Core::on_closed(double now_s, const Closed& closed) {
  connections_.erase(closed.connection);
  source_.on_closed(closed.connection);
  sink_.on_closed(now_s, closed.connection, closed.detail, closed.refused);
}

void Core::tick(double now_s) {
  source_.tick(now_s);
  sink_.tick(now_s);
  std::vector<ConnectionId> silent;
  for (const auto& [id, connection] : connections_) {
    if (connection.handshake.agreed()) continue;
    const double give_up_s = connection.opened_s + kHandshakeTimeoutS;
    if (now_s >= give_up_s) {
      silent.push_back(id);
    } else {
      out_.wake_at(give_up_s);
    }
  }
  for (const ConnectionId id : silent) drop(id, "the handshake took too long");
}

Stats Core::stats() const {
  Stats stats = stats_;
  stats.pulls = sink_.pulls();
  stats.rails = sink_.rails();
  stats.parked = source_.parked();
  stats.readers = source_.readers();
  stats.peers = sink_.peers();
  stats.connections = connections_.size();
  return stats;
}

}  // namespace baton::transfer
