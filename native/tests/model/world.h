// Agents, the network between them, and what may happen to both: one run of one seed.
//
// Each operation draws its choices from its own random numbers, so leaving one out changes no other's choices: a
// failing run can be shrunk to the few operations that matter.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/model/node.h"

namespace baton::model {

// Counts of what a run has seen, by name.
using Seen = std::map<std::string, std::uint64_t>;

class World {
 public:
  World(std::uint64_t seed, Seen& seen, std::function<void(const std::string&)> trace);

  void operate(std::uint64_t operation);
  // Lets everything come to its end with nothing but time passing, then checks that nothing is left and all works.
  void finish();

  [[nodiscard]] std::uint64_t digest() const { return digest_; }

  // Services of the world to its nodes.
  double now_s = 1000;
  void connect(Node& node, const Connect& action, Random& random);
  void note(const Report& report);
  void note(const Close& close) { ++seen_["closed: " + close.detail]; }
  std::uint32_t begin_life(const Key& key);
  [[nodiscard]] const Key& key_of_life(std::uint32_t life) const { return lives_.at(life); }
  // Whether one of the two has lied to the other, so that its bytes prove nothing.
  [[nodiscard]] bool distrusts(std::uint32_t a, std::uint32_t b) const {
    return distrusted_.contains(std::minmax(a, b));
  }
  void lie_about_chunk(End& end);
  [[nodiscard]] bool corrupts() const { return corrupts_; }
  [[nodiscard]] bool works(const std::string& backend) const { return backend == works_ || backend == "tcp"; }

 private:
  // One attempt: its lease at one incarnation of an agent, and the length of its prompt.
  struct Request {
    Key key{};
    std::uint32_t source = 0;
    std::string endpoint;
    std::uint32_t tokens = 0;
  };
  struct Operation;
  static const std::vector<Operation>& operations();

  [[nodiscard]] std::unique_ptr<Node> make_node(std::uint32_t number);
  [[nodiscard]] Request make_request(Random& random);
  bool move(Random& random);
  void drain(Random& random);
  void pass(double duration_s);
  void pass_to_next_alarm();
  [[nodiscard]] double next_alarm_s() const;
  void check_that_it_works(Random& random);
  [[nodiscard]] Node& any_node(Random& random) { return *nodes_[random.below(nodes_.size())]; }
  // Null where the source that the request was made for is gone.
  [[nodiscard]] Node* source_of(const Request& request);
  [[nodiscard]] bool is_over(const Request& request);
  [[nodiscard]] LeaseBook* open_lease(const Request& request);
  [[nodiscard]] std::shared_ptr<End> any_end(Random& random);

  // Operations; what they find impossible they leave.
  void open(Random& random);
  void extend(Random& random);
  void compute(Random& random);
  void complete(Random& random);
  void revoke(Random& random);
  void revoke_finally(Random& random);
  void pull(Random& random);
  void cancel(Random& random);
  void release(Random& random);
  void renew(Random& random);
  void misbehave(Random& random);
  void stale_command(Random& random);
  void wait_a_moment(Random& random);
  void wait_for_an_alarm(Random& random);
  void wait_long(Random& random);
  void cut(Random& random);
  void overtake(Random& random);
  void stall(Random& random);
  void separate(Random& random);
  void silence(Random& random);
  void kill(Random& random);
  void shut_down(Random& random);
  void lie(Random& random);
  void say_anything(const std::shared_ptr<End>& end, Random& random);

  Seen& seen_;
  std::function<void(const std::string&)> trace_;
  const std::uint64_t seed_;
  std::string works_;  // The backend that works, beside the connection itself.
  bool corrupts_ = false;
  bool disturbs_ = false;
  bool lies_ = false;
  bool checksum_ = true;
  bool stripes_ = false;  // Pulls use two connections to their source.
  bool reachable_ = true;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<Request> requests_;
  std::uint64_t keys_ = 0;
  std::uint64_t lifetimes_ = 0;  // Incarnations of agents so far.
  std::vector<Key> lives_{1};    // Lives of leases; the first belongs to none.
  std::set<std::pair<std::uint32_t, std::uint32_t>> distrusted_;
  std::uint64_t digest_ = 0;
};

}  // namespace baton::model
