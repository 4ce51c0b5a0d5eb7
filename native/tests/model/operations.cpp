// Operations on the world: by the owners of its agents, on its network, and by agents that lie.
#include <algorithm>

#include "tests/model/world.h"
#include "transfer/wire.h"

namespace baton::model {

struct World::Operation {
  const char* name;
  double weight;
  void (World::*act)(Random&);
  bool World::* only_where = nullptr;
};

const std::vector<World::Operation>& World::operations() {
  static const std::vector<Operation> kAll = {
      {"open", 18, &World::open},
      {"extend", 14, &World::extend},
      {"compute", 50, &World::compute},
      {"complete", 3, &World::complete},
      {"preempt", 8, &World::revoke},
      {"give up", 1, &World::revoke_finally},
      {"pull", 24, &World::pull},
      {"cancel", 2, &World::cancel},
      {"release", 1, &World::release},
      {"renew", 16, &World::renew},
      {"stale command", 2, &World::stale_command},
      {"misbehave", 1, &World::misbehave},
      {"a moment", 8, &World::wait_a_moment},
      {"to the next alarm", 3, &World::wait_for_an_alarm},
      {"long", 0.4, &World::wait_long},
      {"cut", 3, &World::cut, &World::disturbs_},
      {"separate", 1.5, &World::separate, &World::disturbs_},
      {"overtake", 15, &World::overtake},
      {"stall or go on", 8, &World::stall},
      {"silence", 1, &World::silence, &World::disturbs_},
      {"kill and restart", 0.7, &World::kill, &World::disturbs_},
      {"shut down", 0.3, &World::shut_down, &World::disturbs_},
      {"lie", 12, &World::lie, &World::lies_},
  };
  return kAll;
}

void World::operate(std::uint64_t number) {
  // One stream of choices for each operation; see world.h.
  Random random(Random(seed_ * 0x100000001B3 + number).next());
  const auto& all = operations();
  const auto weight = [&](const Operation& operation) {
    return operation.only_where == nullptr || this->*operation.only_where ? operation.weight : 0;
  };
  double total = 0;
  for (const Operation& operation : all) total += weight(operation);
  double left = static_cast<double>(random.next() >> 11) * 0x1p-53 * total;
  const Operation* chosen = all.data();
  while (left >= weight(*chosen)) left -= weight(*chosen++);
  if (trace_) trace_("operation " + std::to_string(number) + ": " + chosen->name);
  (this->*chosen->act)(random);
  ++seen_[std::string("operation ") + chosen->name];
  // Often little happens before the next, sometimes much.
  for (std::uint32_t moves = random.below(random.chance(0.3) ? 250 : 25); moves > 0 && move(random); --moves) continue;
}

Node* World::source_of(const Request& request) {
  Node& node = *nodes_[request.source];
  return node.endpoint == request.endpoint ? &node : nullptr;
}

LeaseBook* World::open_lease(const Request& request) {
  Node* node = source_of(request);
  if (node == nullptr) return nullptr;
  const auto found = node->leases.find(request.key);
  return found == node->leases.end() || !found->second.open ? nullptr : &found->second;
}

bool World::is_over(const Request& request) {
  Node* node = source_of(request);
  if (node == nullptr) return true;
  const auto found = node->leases.find(request.key);
  return found != node->leases.end() && !found->second.live;
}

std::shared_ptr<End> World::any_end(Random& random) {
  const Node& node = any_node(random);
  return node.ends.empty() ? nullptr : std::next(node.ends.begin(), random.below(node.ends.size()))->second;
}

// ---------------------------------------------------------------- prefill

void World::open(Random& random) {
  // First what was revoked and waits to be computed again.
  const auto waits = [&](const Request& request) {
    const Node* node = source_of(request);
    const auto lease = node == nullptr ? decltype(node->leases)::const_iterator{} : node->leases.find(request.key);
    return node != nullptr && lease != node->leases.end() && lease->second.live && !lease->second.open;
  };
  const auto waiting = std::find_if(requests_.begin(), requests_.end(), waits);
  const bool again = waiting != requests_.end() && random.chance(0.7);
  const Request& request = again ? *waiting : random.pick(requests_);
  Node* node = source_of(request);
  if (node == nullptr) return;
  // A key that has ended is hardly ever used again, but it may be.
  const auto before = node->leases.find(request.key);
  if (before != node->leases.end() && !before->second.live && random.chance(0.8)) return;
  if (!node->open(request.key, request.tokens, random.chance(0.5) ? -1 : 2)) return;
  node->extend(node->leases.at(request.key), 1 + random.below((request.tokens + kBlockTokens - 1) / kBlockTokens),
               random);
}

void World::extend(Random& random) {
  const Request& request = random.pick(requests_);
  LeaseBook* lease = open_lease(request);
  if (lease == nullptr || lease->blocks.size() * kBlockTokens >= request.tokens) return;
  const auto missing =
      (request.tokens + kBlockTokens - 1) / kBlockTokens - static_cast<std::uint32_t>(lease->blocks.size());
  source_of(request)->extend(*lease, random.chance(0.5) ? missing : 1 + random.below(missing), random);
}

void World::compute(Random& random) {
  const Request& request = random.pick(requests_);
  LeaseBook* lease = open_lease(request);
  if (lease == nullptr) return;
  for (std::uint32_t chunks = 1 + random.below(6); chunks > 0; --chunks) source_of(request)->compute(*lease, random);
}

void World::complete(Random& random) {
  const Request& request = random.pick(requests_);
  LeaseBook* lease = open_lease(request);
  if (lease == nullptr || lease->blocks.size() * kBlockTokens < request.tokens) return;
  source_of(request)->complete(*lease, request.tokens);
}

void World::revoke(Random& random) {
  const Request& request = random.pick(requests_);
  if (LeaseBook* lease = open_lease(request)) source_of(request)->revoke(*lease);
}

void World::revoke_finally(Random& random) {
  const Request& request = random.pick(requests_);
  if (Node* node = source_of(request)) node->command(RevokeLease{request.key, true});
}

// Commands of an owner that has not noticed a revocation or an end change nothing.
void World::stale_command(Random& random) {
  const Request& request = random.pick(requests_);
  Node* node = source_of(request);
  const auto lease = node == nullptr ? decltype(node->leases)::iterator{} : node->leases.find(request.key);
  if (node == nullptr || lease == node->leases.end()) return;
  const bool current = lease->second.open;
  const std::uint64_t generation = lease->second.generation - (current ? 1 : 0);
  node->command(ExtendLease{request.key, generation, {0, 1, 2}});
  node->command(PostReady{request.key, generation, -1, 2 * kBlockTokens});
  node->command(CompleteLease{request.key, generation, 1});
  if (!current) node->command(RevokeLease{request.key, false});
}

void World::misbehave(Random& random) {
  const double delay_s = random.chance(0.5) ? 0 : 0.2;
  Faults faults{.delay_s = delay_s, .corrupt_every = corrupts_ ? 7u : 0u, .silent = random.chance(0.2)};
  any_node(random).command(SetFaults{faults});
}

// ---------------------------------------------------------------- decode

void World::pull(Random& random) {
  const Request& request = random.pick(requests_);
  Node& sink = any_node(random);
  if (sink.pulls.contains(request.key) || (is_over(request) && random.chance(0.9))) return;
  // Mostly all of it, sometimes less, hardly ever more than there will be.
  const std::uint32_t tokens = random.chance(0.9) ? request.tokens : 1 + random.below(request.tokens + kBlockTokens);
  const std::uint32_t last = (tokens + kBlockTokens - 1) / kBlockTokens;
  PullBook book{.key = request.key, .source = request.source, .tokens = tokens};
  book.first_block = random.chance(0.6) ? 0 : random.below(last);
  static constexpr double kBudgetsS[] = {0.05, 5, 20, 60, 60, 60};
  sink.pull(std::move(book), request.endpoint, random.pick(kBudgetsS), random);
}

void World::cancel(Random& random) {
  any_node(random).command(CancelPull{random.pick(requests_).key});
}

void World::release(Random& random) {
  const Request& request = random.pick(requests_);
  Node& sink = any_node(random);
  if (!sink.pulls.contains(request.key)) sink.command(ReleaseLease{request.key, request.endpoint});
}

// An attempt that is over gives way to another; leases and pulls that are still under way go on without an owner.
void World::renew(Random& random) {
  Request& request = random.pick(requests_);
  const bool pulled =
      std::any_of(nodes_.begin(), nodes_.end(), [&](const auto& node) { return node->pulls.contains(request.key); });
  if (!pulled && (is_over(request) || random.chance(0.05))) request = make_request(random);
}

// ---------------------------------------------------------------- time and network

void World::wait_a_moment(Random& random) {
  static constexpr double kMomentsS[] = {0.001, 0.01, 0.1, 0.5};
  pass(random.pick(kMomentsS));
}

void World::wait_for_an_alarm(Random&) {
  pass_to_next_alarm();
}

void World::wait_long(Random& random) {
  static constexpr double kLongS[] = {2, 4, 9};
  pass(random.pick(kLongS));
}

void World::cut(Random& random) {
  const auto end = any_end(random);
  if (end != nullptr) nodes_[end->node]->drop(end, "cut", random.chance(0.5));
}

// A trailer may overtake earlier frames about its lease, where chunks travel beside them.
void World::overtake(Random& random) {
  const auto type_of = [](const Message& message) {
    const auto* frame = std::get_if<Blob>(&message);
    return frame == nullptr || frame->empty() ? 0 : frame->front();
  };
  for (const auto& node : nodes_) {
    for (const auto& [id, end] : node->ends) {
      for (std::size_t i = 0; i + 1 < end->arriving.size(); ++i) {
        const auto first = static_cast<FrameType>(type_of(end->arriving[i]));
        const auto next = static_cast<FrameType>(type_of(end->arriving[i + 1]));
        if (first != FrameType::revoked && first != FrameType::ended) continue;
        if (next != FrameType::chunk_end || random.chance(0.2)) continue;
        std::swap(end->arriving[i], end->arriving[i + 1]);
        ++seen_["a trailer overtook a revocation"];
      }
    }
  }
}

void World::stall(Random& random) {
  if (const auto end = any_end(random)) end->stalls = !end->stalls;
}

void World::separate(Random& random) {
  reachable_ = !reachable_ || random.chance(0.3);
}

void World::silence(Random& random) {
  const auto end = any_end(random);
  if (end == nullptr || end->link->silent) return;
  end->link->silent = true;
  end->link->silent_since_s = now_s;
}

// The new incarnation has the old one's address, and nothing else of it.
void World::kill(Random& random) {
  Node& node = any_node(random);
  const bool vanishes = random.chance(0.3);
  for (const auto& [id, end] : std::map(node.ends)) {
    if (vanishes && !end->link->silent) {
      end->link->silent = true;
      end->link->silent_since_s = now_s;
    }
    node.drop(end, "killed", random.chance(0.5));
  }
  nodes_[node.number] = make_node(node.number);
}

void World::shut_down(Random& random) {
  any_node(random).command(Shutdown{});
}

// ---------------------------------------------------------------- lies

// Encodes a frame as an end gets it: without its length.
template <class Frame>
static Blob said(Frame frame) {
  const Blob bytes = encode(std::move(frame));
  return Blob(bytes.begin() + kLengthBytes, bytes.end());
}

template <class Frame>
static std::optional<Frame> frame_of(const Message& message) {
  const auto* bytes = std::get_if<Blob>(&message);
  if (bytes == nullptr || bytes->empty() || bytes->front() != static_cast<std::uint8_t>(Frame::type)) return {};
  return decode<Frame>(Bytes(*bytes).subspan(1));
}

void World::lie(Random& random) {
  const auto end = any_end(random);
  if (end == nullptr) return;
  // Lies about chunks are the most telling.
  if (random.chance(0.5)) return void(end->lie = random.next());
  distrusted_.insert(std::minmax(end->node, end->peer_node));
  if (end->arriving.empty() || random.chance(0.4)) return say_anything(end, random);
  Message& message = end->arriving[random.below(end->arriving.size())];
  if (auto* transit = std::get_if<std::shared_ptr<Transit>>(&message)) {
    (*transit)->said_bytes = random.chance(0.5) ? (*transit)->said_bytes + sizeof(Cell) : 1 + random.below(200);
  } else if (auto* frame = std::get_if<Blob>(&message); frame != nullptr && frame->size() > 1) {
    if (random.chance(0.2)) return end->arriving.push_back(Blob(*frame));
    std::uint8_t& byte = (*frame)[1 + random.below(frame->size() - 1)];
    byte = random.chance(0.5) ? static_cast<std::uint8_t>(byte + random.below(5) - 2)
                              : static_cast<std::uint8_t>(random.next());
  }
}

// Puts behind the frame that comes next, if it is about a chunk, one that would have been due later, or elsewhere, or
// only once.
void World::lie_about_chunk(End& end) {
  const Message& next = end.arriving.front();
  Random random(end.lie);
  std::vector<Message> lies;
  if (auto request = frame_of<frames::Request>(next)) {
    const std::uint32_t lie = random.below(6);
    if (lie == 0) request->first_block = random.below(10);
    if (lie == 1) request->first_block = random.below(4);
    if (lie == 1) request->blocks = 4 + random.below(3);
    if (lie == 2) lies.emplace_back(said(frames::Fetched{request->pull, request->sequence}));
    if (const auto sink = end.peer.lock(); lie == 5 && sink != nullptr && !end.link->silent) {
      sink->arriving.push_back(said(frames::ChunkEnd{request->pull, request->sequence, request->generation, -1, 0}));
    }
    for (std::uint32_t times = lie == 3 ? 30 : 1; times > 0; --times) {
      if (lie != 4) request->sequence += 1000;
      lies.emplace_back(said(*request));
    }
  } else if (const auto grant = frame_of<frames::Grant>(next)) {
    lies.push_back(next);
    if (random.chance(0.7)) lies[0] = said(frames::ChunkEnd{grant->pull, grant->sequence, 1 + random.below(2), -1, 0});
  } else if (const auto* transit = std::get_if<std::shared_ptr<Transit>>(&next)) {
    if (random.chance(0.5)) (*transit)->said_bytes += sizeof(Cell);
    lies.push_back(next);
  }
  if (lies.empty()) return;
  end.lie = 0;
  distrusted_.insert(std::minmax(end.node, end.peer_node));
  end.arriving.insert(end.arriving.begin() + 1, lies.begin(), lies.end());
}

// A frame that is well formed, but must not be sent now.
void World::say_anything(const std::shared_ptr<End>& end, Random& random) {
  const PullId latest = nodes_[end->node]->latest_pull;
  const PullId pull = random.chance(0.5) ? 1 + random.below(30) : latest - std::min<PullId>(latest, random.below(4));
  const auto generation = 1 + random.below(3), sequence = random.below(40), layer = random.below(kLayers + 1);
  const auto slot = static_cast<std::int32_t>(random.below(kSlots + 2)) - 1;
  const Key& key = random.pick(requests_).key;
  const auto say = [&](auto frame) { end->arriving.push_back(said(std::move(frame))); };
  switch (random.below(16)) {
    case 0:
      return say(frames::Opened{pull, generation});
    case 1:
      return say(frames::Ready{pull, generation, random.chance(0.5) ? kAllLayers : static_cast<std::uint16_t>(layer),
                               random.below(80)});
    case 2:
      return say(frames::Revoked{pull, generation});
    case 3:
      return say(frames::Ended{pull, static_cast<Cause>(random.below(kCauses)), kLie, random.chance(0.5)});
    case 4:
    case 5:
      return say(frames::ChunkEnd{pull, sequence, generation, slot, static_cast<std::uint32_t>(random.next())});
    case 6:
      return say(frames::Grant{pull, sequence, Blob(random.below(4), static_cast<std::uint8_t>(random.below(80)))});
    case 7:
      return say(frames::KeepAliveAnswer{pull});
    case 8:
    case 9: {
      // Asks without a pull, any number of them.
      for (std::uint32_t i = random.below(6); i > 0; --i) {
        say(frames::Ask{
            .pull = 1000 + random.below(50), .key = random.chance(0.5) ? Key{1} : key, .blocks = 1, .tokens = 1});
      }
      return;
    }
    case 10:
    case 11:
    case 12:
      return say(frames::Request{pull, generation, sequence, layer, random.below(12), random.below(5)});
    case 13:
      return say(frames::Fetched{pull, sequence});
    case 14:
      return say(frames::CreditSlot{slot});
    default:
      return say(frames::KeepAlive{pull});
  }
}

}  // namespace baton::model
