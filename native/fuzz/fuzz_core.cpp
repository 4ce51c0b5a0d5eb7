// A peer that has proven itself and then says anything, at any time: to a source that holds leases, to a sink that
// pulls.
#include <map>

#include "fuzz/input.h"
#include "fuzz/meeting.h"

using namespace baton::fuzz;

namespace {

constexpr std::uint32_t kBlocks = 16;

Key key_of(std::uint8_t number) {
  return Key{number};
}

Blob frame_of(Input& input, bool to_source) {
  if (input.byte() % 4 == 0) return input.blob(input.byte());  // Any bytes.
  if (to_source) {
    return any_frame<frames::Ask, frames::Request, frames::Request, frames::Fetched, frames::CreditSlot,
                     frames::KeepAlive, frames::Release>(input);
  }
  return any_frame<frames::Opened, frames::Ready, frames::Revoked, frames::Ended, frames::ChunkEnd, frames::Grant,
                   frames::KeepAliveAnswer>(input);
}

class Agent {
 public:
  Agent(Core& core, ConnectionId connection) : core_(core), connection_(connection) {}
  double now_s = 1;

  void command(const Event& event) {
    try {
      step(event);
    } catch (const std::invalid_argument&) {
    }
  }
  void step(const Event& event) {
    for (const Action& action : core_.step(now_s, {&event, 1})) on(action);
  }
  // Does the oldest thing that was asked for, a read or a write, as a data path would.
  void work(std::uint8_t how) {
    if (asked_.empty()) return;
    const Event event = asked_.front();
    asked_.erase(asked_.begin());
    if (const auto* served = std::get_if<Served>(&event); served != nullptr && how % 3 == 0) {
      return step(Granted{served->connection, served->pull, served->sequence, how, Blob(4)});
    }
    step(event);
  }

 private:
  void on(const Action& action) {
    if (const auto* serve = std::get_if<Serve>(&action)) {
      require(!serve->blocks.empty() && serve->layer < kMeetingLayers);
      for (const std::uint32_t block : serve->blocks) require(block < 8);  // All that the leases hold.
      asked_.push_back(Served{connection_, serve->pull, serve->sequence, -1, 7});
    } else if (const auto* place = std::get_if<Place>(&action)) {
      require(!place->blocks.empty() && place->layer < kMeetingLayers);
      for (const std::uint32_t block : place->blocks) require(block >= 8 && block < kBlocks);  // All that pulls hold.
      asked_.push_back(Placed{connection_, place->pull, place->sequence, place->slot, 7});
    } else if (const auto* stop = std::get_if<StopPlacing>(&action)) {
      asked_.push_back(PlacingStopped{stop->pull});
    }
    require(asked_.size() < 1000);
  }

  Core& core_;
  ConnectionId connection_;
  std::vector<Event> asked_;
};

void hold_leases(Agent& agent) {
  for (std::uint8_t number = 1; number <= 3; ++number) {
    agent.command(OpenLease{key_of(number)});
    agent.command(ExtendLease{key_of(number), 1, {number * 2u, number * 2u + 1}});
    agent.command(PostReady{key_of(number), 1, number == 2 ? 0 : -1, number == 3 ? 6u : 8u});
  }
}

void start_pulls(Agent& agent, const std::string& endpoint) {
  agent.command(StartPull{key_of(1), endpoint, 0, 16, {8, 9, 10, 11}, 30});
  agent.command(StartPull{key_of(2), endpoint, 4, 10, {12, 13}, 30});
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const bool to_source = input.byte() % 2 == 0;
  static const char* const kBackends[] = {"direct", "shm", "tcp"};
  Meeting meeting(kBackends[input.byte() % 3]);
  const ConnectionId connection = to_source ? meeting.at_source : meeting.at_sink;
  Core& core = to_source ? meeting.source : meeting.sink;
  Agent agent(core, connection);
  to_source ? hold_leases(agent) : start_pulls(agent, meeting.endpoint);
  for (int steps = 0; steps < 400 && !input.empty(); ++steps) {
    switch (input.byte() % 8) {
      case 0:
        agent.step(DataArrived{connection, input.byte(), input.byte(), input.byte() * 16u});
        break;
      case 1:
        agent.now_s += input.byte() / 64.0;
        agent.step(SetFaults{});
        break;
      case 2:
      case 3:
        agent.work(input.byte());
        break;
      case 4:
        if (to_source) agent.command(RevokeLease{key_of(input.byte() % 5), false});
        if (!to_source) agent.command(CancelPull{key_of(input.byte() % 5)});
        break;
      default:
        agent.step(FrameArrived{connection, frame_of(input, to_source)});
    }
  }
  agent.step(Closed{connection, "over"});
  for (int i = 0; i < 2000; ++i) agent.work(1);
  for (int i = 0; i < 40; ++i) {  // Everything ends by time alone.
    agent.now_s += 5;
    agent.step(SetFaults{});
    for (int j = 0; j < 10; ++j) agent.work(1);
  }
  const Stats stats = core.stats();
  require(stats.leases == 0 && stats.leased_blocks == 0 && stats.pulls == 0 && stats.readers == 0);
  return 0;
}
