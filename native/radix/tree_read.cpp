// Queries of the tree.
#include <algorithm>
#include <map>
#include <utility>

#include "radix/tree.h"

namespace baton::radix {

bool Tree::holds(std::uint32_t worker, const Id& id) const {
  const std::uint32_t slot = find(id);
  return slot != kNone && sets_[nodes_[arena_.owner(slot)].set].contains(worker);
}

std::vector<Id> Tree::unheld(Ids ids) const {
  std::vector<Id> out;
  for (std::size_t at = 0; at < ids.size(); ++at) {
    const std::uint32_t slot = find(ids[at]);
    if (slot == kNone || nodes_[arena_.owner(slot)].set == kNoHolders) out.push_back(ids[at]);
  }
  return out;
}

// Walks the prompt node by node: an id is looked up where a node begins, and not even there if the prompt goes on in
// one of the two children that came last: behind a branch, the rest of what was there and what branched off.
void Tree::match(Ids ids, Leading& leading, std::vector<Held>& out) {
  std::uint32_t at = 0;
  SetNumber holders = kNoHolders;
  NodeNumber likely = kNoNode;
  while (at < ids.size()) {
    const Id id = ids[at];
    NodeNumber number = likely;
    if (number != kNoNode && arena_.id(nodes_[number].first) != id) number = nodes_[number].next;
    std::uint32_t slot = nodes_[number].first;
    if (number == kNoNode || arena_.id(slot) != id) {
      slot = find(id);
      if (slot == kNone) break;
      number = arena_.owner(slot);
    }
    Node& node = nodes_[number];
    if (node.set == kNoHolders) break;
    if (holders == kNoHolders) {
      leading.begin(sets_[node.set]);
    } else if (node.set != holders && !leading.narrow(sets_[node.set], at)) {
      break;
    }
    holders = node.set;
    touch(node);
    const std::size_t rest = node.end() - slot;
    const std::size_t common = common_ids(&arena_.id(slot), ids.subspan(at), std::min(rest, ids.size() - at));
    at += static_cast<std::uint32_t>(common);
    likely = common == rest ? node.first_child : kNoNode;
  }
  if (holders != kNoHolders) leading.finish(at, out);
}

SetNumber Tree::next_set(Holder holder, SetNumber from) const {
  for (SetNumber set = from; set < sets_.end(); ++set) {
    if (sets_[set].contains(holder)) return set;
  }
  return kNoHolders;
}

std::vector<Run> Tree::dump(Holder holder) const {
  std::vector<Run> runs;
  for (SetNumber set = next_set(holder, 1); set != kNoHolders; set = next_set(holder, set + 1)) {
    for (NodeNumber at = sets_.first_node(set); at != kNoNode; at = nodes_[at].next_in_set) {
      const Node& node = nodes_[at];
      runs.push_back(run_of(node, 0));
      if (!holdings_.any_copies()) continue;
      for (std::uint32_t slot = node.first; slot < node.end(); ++slot) {
        const std::optional<Id> before = slot == node.first ? parent_of(node) : arena_.id(slot - 1);
        runs.insert(runs.end(), holdings_.copies(slot, holder), {before, {arena_.id(slot)}});
      }
    }
  }
  return runs;
}

std::vector<Branch> Tree::dump_behind(const Id& id) const {
  std::vector<Branch> branches;
  const std::uint32_t slot = find(id);
  if (slot == kNone) return branches;
  std::vector<NodeNumber> open{arena_.owner(slot)};
  std::uint32_t from = slot - nodes_[open[0]].first;
  while (!open.empty()) {
    const Node& node = nodes_[open.back()];
    open.pop_back();
    if (node.set != kNoHolders) {
      Branch& branch = branches.emplace_back(Branch{run_of(node, from), {}});
      const HolderSet& set = sets_[node.set];
      for (std::uint32_t worker = set.first_group() * 64; worker < set.end_group() * 64; ++worker) {
        for (const Tier tier : kAllTiers) {
          if (set.contains({worker, tier})) branch.holders.push_back({worker, tier});
        }
      }
    }
    from = 0;
    for (NodeNumber child = node.first_child; child != kNoNode; child = nodes_[child].next) open.push_back(child);
  }
  return branches;
}

// Matches beside this one may touch it.
std::uint32_t Tree::used_of(const Node& node) {
  return std::atomic_ref(const_cast<std::uint32_t&>(node.used)).load(std::memory_order_relaxed);
}

std::vector<Id> Tree::idle(std::uint32_t ticks, std::size_t blocks_max) const {
  // All nodes, each after its parent; then, from the end, the blocks of each with what is behind it.
  std::vector<NodeNumber> order{kRoot, kLost};
  for (std::size_t at = 0; at < order.size(); ++at) {
    for (NodeNumber child = nodes_[order[at]].first_child; child != kNoNode; child = nodes_[child].next) {
      order.push_back(child);
    }
  }
  std::vector<std::size_t> blocks(nodes_.end());
  for (std::size_t at = order.size(); at-- > 2;) {
    const Node& node = nodes_[order[at]];
    blocks[order[at]] += node.length;
    blocks[node.parent] += blocks[order[at]];
  }
  std::vector<Id> ids;
  const std::uint32_t now = now_.load(std::memory_order_relaxed);
  std::vector<NodeNumber> open{kRoot, kLost};
  while (!open.empty()) {
    const Node& above = nodes_[open.back()];
    open.pop_back();
    for (NodeNumber child = above.first_child; child != kNoNode; child = nodes_[child].next) {
      const Node& node = nodes_[child];
      if (now - used_of(node) >= ticks && blocks[child] <= blocks_max) {
        ids.push_back(arena_.id(node.first));
      } else {
        open.push_back(child);
      }
    }
  }
  return ids;
}

std::uint32_t Tree::age_of(std::size_t blocks) const {
  std::map<std::uint32_t, std::size_t> by_used;
  for (NodeNumber number = kLost + 1; number < nodes_.end(); ++number) {
    const Node& node = nodes_[number];
    if (node.length > 0) by_used[used_of(node)] += node.length;
  }
  const std::uint32_t now = now_.load(std::memory_order_relaxed);
  std::uint32_t age = 0;
  for (const auto& [used, length] : by_used) {
    age = now - used;
    if (length >= blocks) break;
    blocks -= length;
  }
  return age;
}

Survey Tree::survey(std::size_t top) const {
  Survey survey;
  const auto is_above = [](const Prefix& a, const Prefix& b) {
    return std::pair(a.workers, a.blocks) > std::pair(b.workers, b.blocks);
  };
  std::vector<std::pair<NodeNumber, std::uint32_t>> open{{kRoot, 0}};
  while (!open.empty()) {
    const auto [number, blocks] = open.back();
    open.pop_back();
    const Node& node = nodes_[number];
    const std::uint32_t workers = sets_[node.set].workers();
    bool goes_on = false;
    for (NodeNumber child = node.first_child; child != kNoNode; child = nodes_[child].next) {
      open.emplace_back(child, blocks + nodes_[child].length);
      goes_on |= sets_[nodes_[child].set].workers() == workers;
    }
    if (node.set == kNoHolders) continue;
    survey.depth = std::max(survey.depth, blocks);
    if (goes_on) continue;
    // A heap whose first is the least of the best so far.
    survey.top.push_back({arena_.id(node.end() - 1), blocks, workers});
    std::push_heap(survey.top.begin(), survey.top.end(), is_above);
    if (survey.top.size() <= top) continue;
    std::pop_heap(survey.top.begin(), survey.top.end(), is_above);
    survey.top.pop_back();
  }
  std::sort_heap(survey.top.begin(), survey.top.end(), is_above);
  return survey;
}

Size Tree::size() const {
  const std::size_t other_bytes = other_table_ ? other_table_->bytes() : 0;
  return {
      .blocks = held_blocks_,
      .holdings = holdings_.all(),
      .ghosts = table_.size() - held_blocks_,
      .nodes = nodes_.size() - 2,
      .sets = sets_.size() - 1,
      .bytes = arena_.bytes() + table_.bytes() + other_bytes + sets_.bytes() + nodes_.bytes() + holdings_.bytes(),
  };
}

std::optional<Id> Tree::parent_of(const Node& node) const {
  if (node.parent <= kLost) return std::nullopt;
  return arena_.id(nodes_[node.parent].end() - 1);
}

Run Tree::run_of(const Node& node, std::uint32_t from) const {
  const std::uint32_t first = node.first + from;
  const Id* ids = &arena_.id(first);
  return {from == 0 ? parent_of(node) : arena_.id(first - 1), {ids, ids + (node.length - from)}};
}

}  // namespace baton::radix
