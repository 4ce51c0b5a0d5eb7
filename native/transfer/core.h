// The transfer agent as a state machine: events in, actions out. No I/O, no clock, no threads, no randomness of its
// own: the same options and events give the same actions. Its owner carries the actions out (agent.h, or a test).
#pragma once

#include <map>
#include <span>

#include "transfer/handshake.h"
#include "transfer/lease.h"
#include "transfer/pull.h"

namespace baton::transfer {

class Core {
 public:
  explicit Core(Options options);
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // Called once, before leases and pulls. Both throw std::invalid_argument.
  void check_geometry(const Geometry& geometry) const;
  void set_geometry(Geometry geometry);

  // `now_s` never falls. A command with bad arguments throws std::invalid_argument; it must stand alone in its step.
  [[nodiscard]] std::vector<Action> step(double now_s, std::span<const Event> events);

  // The time at which `step` must be called even without an event; infinity: never.
  [[nodiscard]] double wake_s() const { return out_.wake_s(); }

  // Generation of a lease; 0 if the key is unknown.
  [[nodiscard]] std::uint64_t generation(const Key& key) const { return source_.generation(key); }
  [[nodiscard]] Stats stats() const;
  [[nodiscard]] const Geometry& geometry() const { return geometry_; }
  [[nodiscard]] const Options& options() const { return options_; }

 private:
  struct Connection {
    Handshake handshake;
    double opened_s = 0;
  };

  void on(double now_s, const Event& event);
  void on_frame(double now_s, const FrameArrived& arrived);
  [[nodiscard]] bool on_source_frame(double now_s, ConnectionId connection, FrameType type, Bytes body);
  [[nodiscard]] bool on_sink_frame(double now_s, ConnectionId connection, FrameType type, Bytes body);
  void on_closed(double now_s, const Closed& closed);
  void settle(double now_s, ConnectionId connection, Handshake::Outcome outcome);
  void drop(ConnectionId connection, std::string why);  // The reason is a copy: it may lie in what is dropped.
  void drop_broken(ConnectionId connection);
  void tick(double now_s);
  void open_connection(double now_s, ConnectionId connection, Handshake::Side side);
  [[nodiscard]] Digest make_nonce();

  Options options_;  // Constant but for the faults.
  Geometry geometry_;
  Outbox out_;
  Stats stats_;
  Source source_;
  Sink sink_;
  std::map<ConnectionId, Connection> connections_;
  std::uint64_t nonces_ = 0;
};

}  // namespace baton::transfer
