// The source: leases, their readers, and asks that wait for a lease. See baton/transfer.py for the contract.
//
//   open ──▶ OPEN(g) ──revoke──▶ REVOKED(g+1) ──open──▶ OPEN(g+1)
//              │                     │
//              ╰──── release, cancel, final revoke, time up: one report, then only the key is remembered
#pragma once

#include <deque>
#include <map>
#include <optional>
#include <unordered_map>

#include "transfer/geometry.h"
#include "transfer/outbox.h"

namespace baton::transfer {

class Source {
 public:
  Source(const Options& options, const Geometry& geometry, Outbox& out, Stats& stats);

  // Commands of the owner. They throw std::invalid_argument before anything changes.
  void open(double now_s, const OpenLease& command);
  void extend(const ExtendLease& command);
  void post_ready(const PostReady& command);
  void complete(const CompleteLease& command);
  void revoke(double now_s, const RevokeLease& command);
  void shut_down();

  // Frames of sinks. False: the peer broke the protocol.
  [[nodiscard]] bool on_ask(double now_s, ConnectionId connection, const frames::Ask& ask);
  [[nodiscard]] bool on_request(double now_s, ConnectionId connection, const frames::Request& request);
  void on_keep_alive(double now_s, ConnectionId connection, const frames::KeepAlive& frame);
  void on_release(double now_s, const frames::Release& release);
  [[nodiscard]] bool on_fetched(ConnectionId connection, const frames::Fetched& frame);

  void on_served(const Served& served);
  void on_granted(const Granted& granted);
  void on_closed(ConnectionId connection);
  void tick(double now_s);

  [[nodiscard]] std::uint64_t generation(const Key& key) const;
  [[nodiscard]] std::uint64_t parked() const { return parked_.size(); }
  [[nodiscard]] std::uint64_t readers() const { return readers_.size(); }

 private:
  using ReaderId = std::pair<ConnectionId, PullId>;

  // A chunk that this side or the sink is reading.
  struct Reading {
    std::uint64_t bytes = 0;
    bool granted = false;
    std::uint32_t crc = 0;  // The checksum of a granted chunk.
  };

  // One sink's pull of one lease, parked while there is no such lease.
  struct Reader {
    frames::Ask ask;
    double keep_alive_s = 0;
    double serve_after_s = -1;                   // Injected delay; negative until the first request.
    std::vector<frames::Request> held;           // Requests in flight, not begun.
    std::map<std::uint32_t, Reading> in_flight;  // Chunks by sequence number.
  };

  struct Lease {
    std::uint64_t generation = 1;
    bool open = true;
    bool claimed = false;
    std::vector<std::uint32_t> blocks;
    std::vector<std::uint32_t> ready_tokens;  // Per layer.
    std::vector<std::uint64_t> released;      // Per layer; see PostReady.
    std::optional<std::uint32_t> complete_tokens;
    double unclaimed_ttl_s = 0;
    double expires_s = 0;
    std::vector<ReaderId> readers;
  };

  struct EndedLease {
    std::uint64_t generation = 0;
    Cause cause = Cause::none;
    std::string detail;
    double forget_s = 0;
    bool by_sink = false;  // The sink has finished with this key, whatever the source does next.
  };

  using Leases = std::unordered_map<Key, Lease, KeyHash>;

  Lease* current(const Key& key, std::uint64_t generation);
  [[nodiscard]] bool promote(double now_s, const ReaderId& id, Reader& reader, const frames::Ask& ask);
  void attach(const ReaderId& id, Lease& lease);
  void tell_ready(const Lease& lease, const ReaderId& id, std::uint16_t layer, std::uint32_t tokens);
  bool refuse_if_short(Lease& lease, const ReaderId& id);
  void serve(const ReaderId& id, const Lease& lease, const frames::Request& request);
  [[nodiscard]] Reading* reading(const ReaderId& id, std::uint32_t sequence);
  void send_trailer(const ReaderId& id, frames::ChunkEnd trailer);
  void stop_serving(const ReaderId& id);
  void end(double now_s, Leases::iterator lease, Cause cause, const std::string& detail, bool by_sink = false);
  void remember(double now_s, const Key& key, EndedLease ended);
  void detach(const ReaderId& id);
  void unpark(const ReaderId& id, const Key& key);
  void claim(double now_s, const Key& key, Lease& lease);
  // Once for each generation that a sink asks for.
  void tell_asked(const Key& key);

  const Options& options_;
  const Geometry& geometry_;
  Outbox& out_;
  Stats& stats_;
  Leases leases_;
  std::map<ReaderId, Reader> readers_;
  std::unordered_multimap<Key, ReaderId, KeyHash> parked_;
  std::unordered_map<Key, EndedLease, KeyHash> ended_;
  std::deque<std::pair<Key, double>> ended_order_;  // Keys with their `forget_s`, which a newer entry changes.
  std::uint64_t chunks_served_ = 0;
};

}  // namespace baton::transfer
