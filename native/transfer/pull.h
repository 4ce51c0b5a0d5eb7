// The sink: pulls and their sources. See baton/transfer.py for the contract.
//
//   WANTED ──opened──▶ PULLING ──all bytes placed──▶ VERIFYING ──all trailers good──▶ done
//     ▲  ╰─────────────┬──╯ ╰──────────┬──────────────────╯
//     ╰── revoked, once nothing writes ╯         any failure ──▶ FENCING ──nothing writes──▶ failed
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>

#include "transfer/endpoint.h"
#include "transfer/geometry.h"
#include "transfer/lane.h"
#include "transfer/outbox.h"

namespace baton::transfer {

class Handshake;

class Sink {
 public:
  Sink(const Options& options, const Geometry& geometry, Outbox& out, Stats& stats);

  // Commands of the owner. They throw std::invalid_argument before anything changes.
  void pull(double now_s, const StartPull& command);
  void cancel(const CancelPull& command);
  void release(double now_s, const ReleaseLease& command);
  void shut_down();

  // Connections to sources.
  [[nodiscard]] std::uint64_t expected_incarnation(ConnectionId connection) const;
  // False: the source contradicts what it said on another connection.
  [[nodiscard]] bool on_agreed(double now_s, ConnectionId connection, const Handshake& handshake);
  void on_refused(double now_s, ConnectionId connection, Cause cause, const std::string& detail);
  void on_closed(double now_s, ConnectionId connection, const std::string& detail, bool refused);

  // Called before every frame of a source, as proof that its connection works.
  void hear(double now_s, ConnectionId connection);
  // Frames of sources. False: the peer broke the protocol.
  [[nodiscard]] bool on_opened(double now_s, ConnectionId connection, const frames::Opened& frame);
  [[nodiscard]] bool on_ready(double now_s, ConnectionId connection, const frames::Ready& frame);
  void on_revoked(ConnectionId connection, const frames::Revoked& frame);
  void on_ended(ConnectionId connection, const frames::Ended& frame);
  void on_keep_alive_answer(double now_s, ConnectionId connection, const frames::KeepAliveAnswer& frame);
  [[nodiscard]] bool on_chunk_end(double now_s, ConnectionId connection, const frames::ChunkEnd& frame);
  [[nodiscard]] bool on_grant(double now_s, ConnectionId connection, const frames::Grant& frame);
  [[nodiscard]] bool on_data(double now_s, const DataArrived& data);

  void on_placed(double now_s, const Placed& placed);
  void on_converted(double now_s, const Converted& converted);
  void on_placing_stopped(double now_s, const PlacingStopped& stopped);
  void tick(double now_s);

  [[nodiscard]] std::uint64_t pulls() const { return pulls_.size(); }
  [[nodiscard]] std::vector<RailShare> rails() const;
  [[nodiscard]] std::uint64_t peers() const { return peers_.size(); }

 private:
  enum class State : std::uint8_t { wanted, pulling, verifying, fencing };

  struct Run {
    std::uint32_t layer = 0;  // Counts tensors, see Geometry.
    std::uint32_t first = 0;  // Counted from the pull's first block.
    std::uint32_t blocks = 0;
  };
  struct Chunk {
    Run run;
    ConnectionId connection = 0;  // The connection of its request.
    std::int32_t slot = -1;
    std::uint32_t staged = 0;  // The slot in the lane's staging, if the lane has one.
    bool granted = false;
    bool placing = false;
    bool placed = false;
    bool ended = false;
    std::uint32_t placed_crc = 0;
    std::uint32_t trailer_crc = 0;
    std::uint64_t trailer_generation = 0;
  };
  struct SourceRail : Rail {
    double retry_s = 0;          // Instant before which it is not tried while others work.
    std::uint32_t refusals = 0;  // Connections in a row that nothing listened for.
  };
  // A pull's use of a lane.
  struct Share {
    std::uint32_t in_flight = 0;
    std::uint64_t in_flight_bytes = 0;
    std::uint64_t asked_bytes = 0;
  };
  struct Peer {
    std::string endpoint;
    std::vector<SourceRail> rails;  // The nearest first.
    std::uint64_t incarnation = 0;
    Geometry pool;  // The source's; without layers until a handshake succeeds.
    std::map<ConnectionId, Lane> lanes;
    ConnectionId control = 0;  // The lane for pull requests and their answers; 0: none is ready.
    std::size_t lanes_wanted = 1;
    double lease_ttl_s = 0;
    bool lingering = false;       // Kept only to deliver releases.
    double give_up_s = 0;         // Deadline while no lane is ready.
    double led_s = 0;             // Instant at which a lane was ready last, after none was.
    bool delivered = false;       // Whether a chunk was verified since then.
    std::uint32_t fruitless = 0;  // Times in a row that all lanes were lost soon, before anything was delivered.
    double retry_s = 0;           // Meanwhile: when one more rail is tried.
    double idle_since_s = 0;
    std::string lost_detail;
    std::size_t pulls = 0;                 // Number of pulls, without fencing ones.
    std::deque<frames::Release> releases;  // Sent once connected.
  };
  struct Pull {
    PullId id = 0;
    Key key{};
    std::string endpoint;
    std::uint32_t first_token = 0;
    std::uint32_t tokens = 0;
    std::vector<std::uint32_t> blocks;  // Blocks of this side's pool, from the first token's block on.
    // The request in blocks of the source's pool, as are all blocks below; known once that pool is known.
    Geometry pool;
    std::uint32_t first_block = 0;
    std::uint32_t pool_blocks = 0;
    State state = State::wanted;
    bool stopping = false;  // `PlacingStopped` is awaited.
    bool reopened = false;  // `Opened` arrived while stopping.
    bool revoked = false;   // The source revoked a generation and has not opened the next.
    bool ever_opened = false;
    std::uint64_t generation = 0;
    std::vector<std::uint32_t> ready_tokens;  // Per layer, as the source posts.
    std::vector<std::uint32_t> requested;     // Per tensor, blocks from the first on.
    std::vector<std::uint32_t> verified;      // Per tensor, a count of blocks.
    std::vector<Run> again;                   // Lost with a connection; requested first.
    std::map<ConnectionId, Share> shares;     // The lanes on which the source knows this pull.
    std::map<std::string, RailShare> rails;
    std::map<std::uint32_t, Chunk> in_flight;   // Chunks by sequence number.
    std::map<std::uint32_t, Chunk> converting;  // Verified, not yet in this pool's blocks.
    std::uint32_t next_sequence = 0;
    std::uint32_t layers_reported = 0;
    std::uint64_t blocks_verified = 0;
    double started_s = 0;
    double deadline_s = 0;
    double progress_s = 0;
    double keep_alive_s = 0;
    double accounted_s = 0;
    double waiting_s = 0;
    double moving_s = 0;
    std::uint32_t restarts = 0;
    std::uint64_t rereads = 0;
    std::string backend;
    std::string declined;
    bool fallback = false;
    std::string lost;  // Reason of the last lost connection, if any.
    Cause cause = Cause::none;
    std::string detail;
  };

  Peer& peer_of(double now_s, const std::string& endpoint);
  Peer* peer_on(ConnectionId connection);
  Pull* pull_on(ConnectionId connection, PullId id);
  void measure(Pull& pull, const Geometry& pool);
  Chunk* chunk_on(ConnectionId connection, Pull* pull, std::uint32_t sequence);
  void ask(double now_s, Pull& pull, ConnectionId connection, bool data_only);
  void connect(double now_s, Peer& peer, std::size_t rail);
  void reach(double now_s, Peer& peer);
  void lead(double now_s, Peer& peer, ConnectionId connection);
  void follow(double now_s, Peer& peer, const std::string& detail);
  void end_attempts(double now_s, Peer& peer);
  void forget(Peer& peer);
  [[nodiscard]] std::size_t lanes_on(const Peer& peer, std::size_t rail) const;
  void widen(double now_s, Peer& peer);
  [[nodiscard]] Lane* next_lane(double now_s, Peer& peer, const Pull& pull);
  void check_lanes(double now_s, Peer& peer);
  void note_lost(double now_s, Peer& peer, const Lane& lane);
  [[nodiscard]] RailShare& of_rail(std::map<std::string, RailShare>& rails, const std::string& name) const;
  [[nodiscard]] static std::uint32_t ready_blocks(const Pull& pull, std::uint32_t layer);
  void request_more(double now_s, Pull& pull);
  void request_more(double now_s, const std::string& endpoint);
  [[nodiscard]] std::optional<Run> next_run(Pull& pull) const;
  void request(double now_s, Pull& pull, Lane& lane, const Run& run);
  void place(Pull& pull, std::uint32_t sequence, Chunk& chunk, Blob where = {});
  [[nodiscard]] std::vector<std::uint32_t> staged_blocks(const Pull& pull, const Chunk& chunk) const;
  void judge(double now_s, Pull& pull, std::uint32_t sequence);
  void convert(Pull& pull, std::uint32_t sequence, const Chunk& chunk);
  void count(double now_s, Pull& pull, const Chunk& chunk);
  void report_progress(Pull& pull);
  void finish(double now_s, Pull& pull);
  void restart(Pull& pull);
  void forget_progress(Pull& pull);
  void forget_requests(Pull& pull);
  // `held`: whether, to this side's knowledge, the source still holds the lease for this pull.
  void fail(Pull& pull, Cause cause, std::string detail, bool held = true);
  void fail_all(const std::string& endpoint, Cause cause, const std::string& detail);
  void send_release(Peer& peer, const Key& key, Cause cause);
  void account(double now_s, Pull& pull);
  [[nodiscard]] Report report_of(const Pull& pull, ReportKind kind) const;
  void erase(PullId id);
  void tick_pull(double now_s, Pull& pull);
  void tick_peers(double now_s);
  [[nodiscard]] double keep_alive_interval_s(const Peer& peer) const;

  const Options& options_;
  const Geometry& geometry_;
  Outbox& out_;
  Stats& stats_;
  std::map<PullId, Pull> pulls_;
  std::unordered_map<Key, PullId, KeyHash> by_key_;
  std::map<std::string, Peer> peers_;
  std::unordered_map<ConnectionId, std::string> endpoints_;
  std::map<std::string, RailShare> rails_;
  PullId next_pull_ = 1;
  ConnectionId next_connection_ = 2;
};

}  // namespace baton::transfer
