#include "tests/model/node.h"

#include <algorithm>

#include "tests/model/world.h"
#include "transfer/endpoint.h"

namespace baton::model {

Node::Node(World& in, std::uint32_t as, Options with)
    : world(in),
      number(as),
      options(std::move(with)),
      endpoint(format_endpoint({{{"10.0.0.1:" + std::to_string(1000 + as)}}, options.incarnation})),
      core(options) {
  core.set_geometry({"model", kLayers, kBlocks, kBlockBytes, kBlockTokens});
}

void Node::step(std::span<const Event> events) {
  for (const Event& event : events) hear(event);
  std::vector<Key> over;
  for (Action& action : core.step(world.now_s, events)) {
    if (const auto* report = std::get_if<Report>(&action)) {
      on_report(*report);
      if (report->kind >= ReportKind::lease_released) over.push_back(report->key);
    } else {
      check_action(action);
      actions_.push_back(std::move(action));
    }
  }
  for (const Event& event : events) {
    const auto* closed = std::get_if<Closed>(&event);
    if (closed == nullptr) continue;
    forget(closed->connection);
    known_.erase(closed->connection);
    closing_.erase(closed->connection);
  }
  // A parked ask is forgotten without a word when its sink is silent.
  std::erase_if(asks_, [&](const auto& entry) {
    const auto book = leases.find(entry.second.ask.key);
    const bool parked =
        book == leases.end() || (!book->second.live && std::count(over.begin(), over.end(), book->first) == 0);
    return parked && world.now_s >= entry.second.heard_s + options.lease_ttl_s;
  });
  for (const Key& key : over) check_notified(key, "a sink was not notified of a lease's end");
  for (const auto& [id, asked] : asks_) {
    const auto book = leases.find(asked.ask.key);
    require(book == leases.end() || !book->second.open || !book->second.completed ||
                asked.ask.tokens <= book->second.tokens,
            "a sink waits for more than there will be");
  }
  require(core.wake_s() > world.now_s, "the core wants to be woken at once, again and again");
  check_limits();
}

void Node::tick() {
  if (world.now_s >= core.wake_s()) step({});
}

// ---------------------------------------------------------------- the owner

bool Node::command(const Event& event) {
  try {
    step({&event, 1});
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

bool Node::open(const Key& key, std::uint32_t tokens, double unclaimed_ttl_s) {
  LeaseBook& lease = leases[key];
  if (lease.open) return false;
  const LeaseBook before = lease;
  lease.key = key;
  lease.tokens = tokens;
  lease.live = lease.open = true;
  lease.completed = false;
  lease.ready = {};
  lease.life = world.begin_life(key);
  heard_s_.erase(key);
  if (!command(OpenLease{key, unclaimed_ttl_s})) {
    lease = before;
    return false;
  }
  lease.generation = core.generation(key);
  return lease.open;
}

void Node::extend(LeaseBook& lease, std::uint32_t count, Random& random) {
  auto blocks = memory->take(count, Use::lease, lease.key, random);
  if (!blocks) return;
  lease.blocks.insert(lease.blocks.end(), blocks->begin(), blocks->end());
  require(command(ExtendLease{lease.key, lease.generation, *blocks}), "an extension was refused");
}

// A layer is computed up to some token, as prefill does it chunk by chunk; then it says so.
void Node::compute(LeaseBook& lease, Random& random) {
  const auto room = static_cast<std::uint32_t>(lease.blocks.size()) * kBlockTokens;
  const auto begin = std::min_element(lease.ready.begin(), lease.ready.end());
  const std::uint32_t most = std::min(room, lease.tokens);
  if (*begin >= most) return;
  const std::uint32_t tokens = *begin + 1 + random.below(most - *begin);
  const bool all = random.chance(0.3);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    if (!all && layer != begin - lease.ready.begin()) continue;
    for (std::uint32_t token = lease.ready[layer]; token < tokens; ++token) {
      const std::uint32_t position = token / kBlockTokens;
      memory->cell(layer, lease.blocks[position], token % kBlockTokens) = {
          lease.life, static_cast<std::uint16_t>(position), static_cast<std::uint8_t>(layer),
          static_cast<std::uint8_t>(token % kBlockTokens)};
    }
  }
  const auto layer = static_cast<std::int32_t>(begin - lease.ready.begin());
  for (std::uint32_t i = 0; i < kLayers; ++i) {
    if (all || i == static_cast<std::uint32_t>(layer)) lease.ready[i] = std::max(lease.ready[i], tokens);
  }
  require(command(PostReady{lease.key, lease.generation, all ? -1 : layer, tokens}), "a watermark was refused");
}

void Node::complete(LeaseBook& lease, std::uint32_t tokens) {
  lease.completed = true;
  lease.completed = command(CompleteLease{lease.key, lease.generation, tokens});
}

// Acts like preemption: the blocks have another owner as soon as the call returns.
void Node::revoke(LeaseBook& lease) {
  lease.open = false;
  memory->give_back(lease.blocks);
  notified_.clear();
  require(command(RevokeLease{lease.key, false}), "a revocation was refused");
  for (const auto& [id, asked] : asks_) {
    const bool is_notified = asked.ask.key != lease.key || asked.ask.data_only || notified_.contains(id);
    require(is_notified, "a sink was not notified of a revocation");
  }
  // Chunks that were not begun are forgotten, and may be asked for again.
  std::erase_if(served_, [&](const auto& entry) { return world.key_of_life(entry.second.life) == lease.key; });
}

bool Node::pull(PullBook book, const std::string& of, double budget_s, Random& random) {
  const std::uint32_t last = (book.tokens + kBlockTokens - 1) / kBlockTokens;
  auto blocks = memory->take(last - book.first_block, Use::pull, book.key, random);
  if (!blocks) return false;
  book.blocks = *blocks;
  book.deadline_s = world.now_s + budget_s;
  const Key key = book.key;
  const StartPull start{key, of, book.first_block * kBlockTokens, book.tokens, *blocks, budget_s};
  pulls[key] = std::move(book);
  if (command(start)) return true;
  memory->give_back(pulls.at(key).blocks);
  pulls.erase(key);
  return false;
}

}  // namespace baton::model
