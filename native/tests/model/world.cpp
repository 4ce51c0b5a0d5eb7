#include "tests/model/world.h"

#include <algorithm>
#include <limits>

namespace baton::model {
namespace {

constexpr std::uint32_t kNodes = 3, kRequests = 6, kTokensMax = 40;
constexpr double kKernelGivesUpS = 25;  // On a connection whose other end says nothing; see `tune` in sockets.cpp.
constexpr double kAllEndsS = 300;       // However long what is under way may take.

std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  return Random(a ^ Random(b).next()).next();
}

const char* name_of(ReportKind kind) {
  static constexpr const char* kNames[] = {"progress", "done", "failed", "asked", "released", "ended"};
  return kNames[static_cast<std::size_t>(kind)];
}
const char* name_of(Cause cause) {
  static constexpr const char* kNames[] = {"none",    "cancelled", "deadline", "unreachable", "refused", "revoked",
                                           "expired", "checksum",  "stalled",  "layout",      "model"};
  static_assert(std::size(kNames) == kCauses);
  return kNames[static_cast<std::size_t>(cause)];
}

}  // namespace

World::World(std::uint64_t seed, Seen& seen, std::function<void(const std::string&)> trace)
    : seen_(seen), trace_(std::move(trace)), seed_(seed) {
  Random random(mix(seed, 1));
  static const std::vector<std::string> kWays = {"direct", "shm", "tcp"};
  works_ = random.pick(kWays);
  disturbs_ = random.chance(0.6);
  lies_ = random.chance(0.3);
  corrupts_ = random.chance(0.1);
  checksum_ = corrupts_ || random.chance(0.7);
  stripes_ = random.chance(0.3);
  for (std::uint32_t number = 0; number < kNodes; ++number) nodes_.push_back(make_node(number));
  if (corrupts_) nodes_[0]->command(SetFaults{{.corrupt_every = 7}});
  for (std::uint32_t i = 0; i < kRequests; ++i) requests_.push_back(make_request(random));
}

// Limits are small, so that they are met.
std::unique_ptr<Node> World::make_node(std::uint32_t number) {
  Options options{.secret = "shared", .backends = {"direct", "shm", "tcp"}, .checksum = checksum_};
  options.unclaimed_ttl_s = 8;
  options.wanted_timeout_s = 6;
  options.stall_timeout_s = 4;
  options.lease_ttl_s = 3;
  options.incarnation = ++lifetimes_;
  options.entropy[0] = static_cast<std::uint8_t>(lifetimes_);
  options.entropy[1] = static_cast<std::uint8_t>(lifetimes_ >> 8);
  Limits& limits = options.limits;
  limits.leases = 5;
  limits.pulls = 5;
  limits.parked = 3;
  limits.readers_per_lease = 2;
  limits.connections = 8;
  limits.ended = 12;
  limits.ended_ttl_s = 20;
  limits.chunk_bytes = 3 * kBlockBytes;
  limits.chunks_in_flight = 4;
  limits.chunks_served = 8;
  limits.idle_s = 5;
  if (stripes_) {
    options.striped = options.backends;
    options.streams = 2;
    options.lane_bytes = 1;
    limits.readers_per_lease = 4;
    limits.connections = 16;
  }
  return std::make_unique<Node>(*this, number, std::move(options));
}

// Keys are like digests: changing some bytes of one never gives another.
World::Request World::make_request(Random& random) {
  Request request;
  for (std::uint64_t part = 0, number = ++keys_; part < 2; ++part) {
    const std::uint64_t bits = mix(number, part);
    std::memcpy(request.key.data() + 8 * part, &bits, sizeof bits);
  }
  request.source = random.below(kNodes);
  request.endpoint = nodes_[request.source]->endpoint;
  request.tokens = 1 + random.below(kTokensMax);
  return request;
}

void World::note(const Report& report) {
  std::string what = std::string(name_of(report.kind)) + " " + name_of(report.cause);
  digest_ = mix(digest_, mix(report.key[0] + report.bytes, mix(static_cast<std::uint64_t>(report.kind) * 100 +
                                                                   static_cast<std::uint64_t>(report.cause),
                                                               static_cast<std::uint64_t>(now_s * 1e6))));
  if (trace_) trace_("      " + what + " key " + std::to_string(report.key[0]) + ": " + report.detail);
  if (report.kind == ReportKind::pull_progress) return;
  ++seen_[what];
  if (report.kind != ReportKind::pull_done) return;
  ++seen_[what + " by " + report.backend];
  if (report.restarts > 0) ++seen_[what + " by " + report.backend + ", restarted"];
}

std::uint32_t World::begin_life(const Key& key) {
  lives_.push_back(key);
  return static_cast<std::uint32_t>(lives_.size() - 1);
}

// ---------------------------------------------------------------- what happens by itself

void World::connect(Node& node, const Connect& action, Random& random) {
  const auto colon = action.address.rfind(':');
  const auto number = static_cast<std::uint32_t>(std::stoul(action.address.substr(colon + 1))) - 1000;
  require(number < nodes_.size(), "a connection to an address that no endpoint named");
  const auto ours = node.connect(number, action.connection);
  ours->link = std::make_shared<Link>();
  if (!reachable_) {
    // Refused at once, or no answer at all.
    if (random.chance(0.5)) return node.drop(ours, "unreachable", false);
    ours->link->silent = true;
    ours->link->silent_since_s = now_s;
    return;
  }
  Node& other = *nodes_[number];
  const auto theirs = other.connect(node.number, other.next_accepted());
  theirs->link = ours->link;
  ours->peer = theirs;
  theirs->peer = ours;
  ours->remote = other.memory;
  theirs->remote = node.memory;
  other.happened(Accepted{theirs->id});
  node.happened(Connected{ours->id});
}

// Lets one of the possible next things happen; false when there is none.
bool World::move(Random& random) {
  static constexpr bool (Node::* kMoves[])(Random&) = {&Node::take_events, &Node::carry_out_one, &Node::deliver,
                                                       &Node::read,        &Node::write,         &Node::stop_writing};
  constexpr std::size_t count = std::size(kMoves);
  const std::size_t all = nodes_.size() * count, first = random.below(all);
  for (std::size_t i = 0; i < all; ++i) {
    const std::size_t at = (first + i) % all;
    if ((*nodes_[at / count].*kMoves[at % count])(random)) return true;
  }
  return false;
}

void World::drain(Random& random) {
  for (std::uint32_t moves = 0; move(random); ++moves) require(moves < 1'000'000, "it goes on for ever without time");
  for (const auto& node : nodes_) node->check_quiet();
}

void World::pass(double duration_s) {
  now_s += duration_s;
  for (const auto& node : nodes_) {
    node->tick();
    for (const auto& [id, end] : std::map(node->ends)) {
      if (end->link->silent && now_s >= end->link->silent_since_s + kKernelGivesUpS) node->drop(end, "timed out", true);
    }
  }
}

double World::next_alarm_s() const {
  double next_s = std::numeric_limits<double>::infinity();
  for (const auto& node : nodes_) {
    next_s = std::min(next_s, node->core.wake_s());
    for (const auto& [id, end] : node->ends) {
      if (end->link->silent) next_s = std::min(next_s, end->link->silent_since_s + kKernelGivesUpS);
    }
  }
  return next_s;
}

void World::pass_to_next_alarm() {
  const double next_s = next_alarm_s();
  if (next_s < std::numeric_limits<double>::infinity()) pass(std::max(0.0, next_s - now_s));
}

// ---------------------------------------------------------------- the end

void World::finish() {
  Random random(mix(seed_, 2));
  reachable_ = true;
  for (const auto& node : nodes_) {
    for (const auto& [id, end] : node->ends) end->stalls = false;
  }
  if (trace_) trace_("the end");
  const double began_s = now_s;
  const auto settle = [&] {
    for (drain(random); next_alarm_s() < std::numeric_limits<double>::infinity(); drain(random)) {
      pass_to_next_alarm();
      drain(random);
      for (const auto& node : nodes_) node->check_end(now_s);
      require(now_s < began_s + kAllEndsS, "it does not come to an end");
    }
    for (const auto& node : nodes_) node->check_nothing_left();
  };
  settle();
  check_that_it_works(random);
  settle();
  for (const auto& node : nodes_) {
    const Stats stats = node->core.stats();
    require(lies_ || stats.protocol_errors == 0, "honest agents broke the protocol");
  }
}

// However they were treated: each can still pull from each.
void World::check_that_it_works(Random& random) {
  if (trace_) trace_("does it still work?");
  for (const auto& node : nodes_) node->command(SetFaults{});
  corrupts_ = false;
  for (const auto& source : nodes_) {
    for (const auto& sink : nodes_) {
      const Request request = [&] {
        Request made = make_request(random);
        made.source = source->number;
        return made;
      }();
      const std::uint64_t before = sink->core.stats().pulls_done;
      require(sink->pull({.key = request.key, .source = source->number, .tokens = request.tokens}, source->endpoint, 20,
                         random),
              "a pull was refused though nothing else is going on");
      require(source->open(request.key, request.tokens, -1), "a lease was refused though nothing else is going on");
      LeaseBook& lease = source->leases.at(request.key);
      source->extend(lease, (request.tokens + kBlockTokens - 1) / kBlockTokens, random);
      // A source that takes longer than a lease lives unclaimed, or a connection that is lost on the way, costs time
      // only.
      for (int steps = random.chance(0.3) ? 14 : 0; steps > 0; --steps, drain(random)) pass(0.5);
      while (lease.open && *std::min_element(lease.ready.begin(), lease.ready.end()) < request.tokens) {
        source->compute(lease, random);
      }
      for (std::uint32_t moves = random.below(60); moves > 0 && move(random); --moves) continue;
      const bool is_cut = random.chance(0.5);
      if (is_cut) cut(random);
      for (int alarms = 0; alarms < 100 && (sink->pulls.contains(request.key) || lease.live); ++alarms) {
        drain(random);
        pass_to_next_alarm();
      }
      require(sink->core.stats().pulls_done == before + 1, "a pull failed though its source is there");
      require(is_cut ? !lease.live : lease.released, "a lease was not released though its sink is there");
    }
  }
}

}  // namespace baton::model
