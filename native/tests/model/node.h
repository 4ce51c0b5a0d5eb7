// One incarnation of an agent: the core under test, what its shell would do, and what its owner believes.
//
// The shell's two queues exist here, too, of actions to execute and of events to pass on, and commands come in
// between: any interleaving of the two is allowed here. Every step of the core is checked against the owner's books.
#pragma once

#include <map>
#include <set>

#include "tests/model/link.h"
#include "transfer/core.h"
#include "transfer/wire.h"

namespace baton::model {

class World;

inline constexpr const char* kLie = "a lie";

struct LeaseBook {
  Key key{};
  std::uint32_t tokens = 0;  // Tokens of the whole prompt.
  std::uint64_t generation = 0;
  bool live = false;  // Opened and not reported ended.
  bool open = false;  // Opened and not revoked.
  bool completed = false;
  bool released = false;  // Released by its sink, not by time.
  std::uint32_t life = 0;
  std::vector<std::uint32_t> blocks;
  std::array<std::uint32_t, kLayers> ready{};  // Tokens.
};

struct PullBook {
  Key key{};
  std::uint32_t source = 0;
  std::uint32_t first_block = 0;
  std::uint32_t tokens = 0;
  std::vector<std::uint32_t> blocks;
  double deadline_s = 0;
  std::uint32_t layers = 0;  // Reported so far.
  std::size_t written = 0;   // Blocks of layers.
};

class Node {
 public:
  Node(World& world, std::uint32_t number, Options options);

  // The owner. False: the agent refused the command, which then has changed nothing.
  bool command(const Event& event);
  bool open(const Key& key, std::uint32_t tokens, double unclaimed_ttl_s);
  void extend(LeaseBook& lease, std::uint32_t count, Random& random);
  void compute(LeaseBook& lease, Random& random);
  void complete(LeaseBook& lease, std::uint32_t tokens);
  void revoke(LeaseBook& lease);
  bool pull(PullBook book, const std::string& endpoint, double budget_s, Random& random);

  // The shell. Each does one thing, if there is one to do.
  bool take_events(Random& random);
  bool carry_out_one(Random& random);
  bool deliver(Random& random);
  bool read(Random& random);
  bool write(Random& random);
  bool stop_writing(Random& random);
  void tick();
  void drop(const std::shared_ptr<End>& end, const std::string& why, bool farewell);
  void happened(Event event) { happened_.push_back(std::move(event)); }

  std::shared_ptr<End> connect(std::uint32_t peer_node, ConnectionId id);
  [[nodiscard]] ConnectionId next_accepted() { return accepted_ += 2; }
  void check_end(double now_s) const;
  // Checks that nothing can happen any more but by time.
  void check_quiet() const;
  void check_nothing_left() const;

  World& world;
  const std::uint32_t number;
  const Options options;
  std::string endpoint;
  Core core;
  std::shared_ptr<Memory> memory = std::make_shared<Memory>();
  std::map<Key, LeaseBook> leases;
  std::map<Key, PullBook> pulls;  // Pulls that have not ended.
  std::map<ConnectionId, std::shared_ptr<End>> ends;
  PullId latest_pull = 0;  // The latest pull that a source was asked for.

 private:
  void step(std::span<const Event> events);
  void on_report(const Report& report);
  void on_pull_end(const Report& report);
  void check_content(const PullBook& pull) const;
  void check_action(const Action& action);
  void check_serve(const Serve& chunk);
  void check_send(const Send& send);
  void hear(const Event& event);
  void hear_frame(ConnectionId connection, const Blob& frame);
  void forget(ConnectionId connection);
  // Checks that every sink that reads a lease was notified of its end.
  void check_notified(const Key& key, const char* what) const;
  void check_place(const Place& chunk);
  void check_limits() const;
  void place(const std::shared_ptr<End>& end, const Place& chunk);
  bool begin_reading(End& end, Random& random);
  void finish_reading(End& end, std::size_t index);
  void finish_writing(End& end, std::size_t index);
  [[nodiscard]] std::shared_ptr<End> find(ConnectionId id) const;
  // The ends, from a random one on, until one does something.
  template <class Act>
  bool any_end(Random& random, const Act& act);

  std::deque<Action> actions_;
  std::deque<Event> happened_;
  std::set<PullId> stopping_;  // Pulls between `StopPlacing` and its confirmation to the core.
  std::vector<PullId> stops_;  // Stops that were executed and not confirmed.
  std::map<PullId, Key> keys_of_pulls_;

  // Requests to the source and its promises, as read from the frames.
  using ReaderId = std::pair<ConnectionId, PullId>;
  struct Chunk {
    std::uint32_t life = 0;
    std::uint64_t generation = 0;
    bool read = false;
  };
  struct Asked {
    frames::Ask ask;
    double heard_s = 0;
  };
  std::map<ReaderId, Asked> asks_;  // Asks that have not been ended.
  std::map<std::pair<ReaderId, std::uint32_t>, Chunk> served_;
  std::map<Key, double> heard_s_;  // Instant at which a sink last asked for this lease.
  double heard_last_s_ = -1e9;
  std::set<ConnectionId> known_;  // Connections that the core knows.
  std::set<ConnectionId> closing_;
  std::set<ReaderId> notified_;  // Readers that were notified of the last revocation.
  ConnectionId accepted_ = static_cast<ConnectionId>(-1);
};

}  // namespace baton::model
