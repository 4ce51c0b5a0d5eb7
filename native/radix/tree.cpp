#include "radix/tree.h"

#include <algorithm>

namespace baton::radix {

Tree::Tree(bool counts_copies) : holdings_(counts_copies) {
  nodes_.take();  // kRoot
  nodes_.take();  // kLost: the parent of nodes whose parents are still unknown.
}

void Tree::prepare() {
  other_table_.reset();
  if (table_.is_crowded(kBatchBlocks + 1)) {
    other_table_ = table_.grown();
    is_grown_ = true;
  }
  arena_.prepare();
  nodes_.prepare();
  sets_.prepare();
}

void Tree::install() {
  if (is_grown_) std::swap(table_, *other_table_);
  is_grown_ = false;
}

void Tree::prefetch(Ids ids) const {
  for (std::size_t at = 0; at < ids.size(); ++at) table_.prefetch(hash_of(ids[at]));
}

// -------------------------------------------------------------------- storing

Place Tree::place_of(const std::optional<Id>& parent) {
  if (!parent) return kAtRoot;
  std::uint32_t slot = find(*parent);
  if (slot != kNone) return slot;
  slot = arena_.take(1);
  const NodeNumber ghost = new_node(slot, 1, kNoHolders);
  arena_.id(slot) = *parent;
  arena_.owner(slot) = ghost;
  table_.insert(hash_of(*parent), slot);
  hang(ghost, kLost);
  unheld_.push_back(ghost);  // Listed until something hangs behind it.
  return slot;
}

std::size_t Tree::insert(Holder holder, Place& place, Ids ids) {
  Sum fresh;
  renew_path(place);
  while (!ids.empty()) {
    const std::uint32_t slot = find(ids[0]);
    std::uint32_t done = 0;
    if (slot == kNone) {
      done = plant(holder, place, ids);
      fresh += sum_of(ids.subspan(0, done));
    } else {
      const NodeNumber number = arena_.owner(slot);
      if (nodes_[number].parent == kLost && nodes_[number].first == slot) adopt(number, place);
      done = share(holder, slot, ids, fresh);
      place = slot + done - 1;
    }
    ids = ids.subspan(done);
  }
  holdings_.add(holder, fresh);
  return fresh.blocks;
}

// Adds the leading ids that are not in the tree yet, the first of which is not; `place` then is the last of them.
std::uint32_t Tree::plant(Holder holder, Place& place, Ids ids) {
  const auto wanted = static_cast<std::uint32_t>(std::min<std::size_t>(ids.size(), kEdgeBlocksMax));
  const SetNumber only = sets_.with(kNoHolders, holder);
  NodeNumber number = node_ending_at(place);
  Node* node = &nodes_[number];
  std::uint32_t room = 0;
  if (number > kLost && node->set == only && node->first_child == kNoNode && node->length < kEdgeBlocksMax) {
    room = arena_.extend(node->end(), std::min(wanted, kEdgeBlocksMax - node->length));
  }
  if (room == 0) {
    room = wanted;
    const NodeNumber above = number;
    number = new_node(arena_.take(room), 0, only);
    node = &nodes_[number];
    hang(number, above);
  }
  const std::uint32_t first = node->end();
  std::uint32_t planted = 0;
  for (; planted < room; ++planted) {
    const Id id = ids[planted];
    const std::uint32_t hash = hash_of(id);
    if (planted > 0 && table_.find(hash, [&](std::uint32_t slot) { return arena_.id(slot) == id; }) != kNone) break;
    arena_.id(first + planted) = id;
    arena_.owner(first + planted) = number;
    table_.insert(hash, first + planted);
  }
  if (planted < room) arena_.give(first + planted, room - planted);
  node->length += planted;
  renew(*node);
  held_blocks_ += planted;
  place = first + planted - 1;
  return planted;
}

// Adds the holder to the blocks of one node, from `slot` on, that are the leading ids; returns how many these are.
std::uint32_t Tree::share(Holder holder, std::uint32_t slot, Ids ids, Sum& fresh) {
  const NodeNumber number = arena_.owner(slot);
  Node& node = nodes_[number];
  const std::size_t most = std::min<std::size_t>(ids.size(), node.end() - slot);
  const auto count = static_cast<std::uint32_t>(common_ids(&arena_.id(slot), ids, most));
  renew(node);
  if (!sets_[node.set].contains(holder)) {
    const SetNumber set = sets_.with(node.set, holder);
    const NodeNumber part = isolate(number, slot - node.first, count);
    set_holders(part, set);
    join_around(part);
    fresh += sum_of(ids.subspan(0, count));
  } else if (holdings_.counts_copies()) {
    for (std::uint32_t at = 0; at < count; ++at) holdings_.add_copy(slot + at, holder);
  }
  return count;
}

// -------------------------------------------------------------------- removing

std::size_t Tree::erase(Holder holder, Ids ids) {
  std::size_t held = 0;
  while (!ids.empty()) {
    const std::uint32_t slot = find(ids[0]);
    std::size_t count = 1;
    if (slot != kNone && sets_[nodes_[arena_.owner(slot)].set].contains(holder)) {
      const NodeNumber number = arena_.owner(slot);
      const Node& node = nodes_[number];
      std::uint32_t from = slot - node.first;
      if (!holdings_.any_copies()) {
        // Engines forget prompts from their ends, so runs come in either order.
        count = common_ids(&arena_.id(slot), ids, std::min<std::size_t>(ids.size(), node.length - from));
        if (count == 1) {
          count = common_ids_backwards(&arena_.id(slot), ids, std::min<std::size_t>(ids.size(), from + 1));
          from -= static_cast<std::uint32_t>(count) - 1;
        }
      }
      held += count;
      if (!holdings_.any_copies() || !holdings_.take_copy(slot, holder)) {
        holdings_.drop(holder, sum_of(ids.subspan(0, count)));
        release(holder, isolate(number, from, static_cast<std::uint32_t>(count)));
      }
    }
    ids = ids.subspan(count);
  }
  return held;
}

bool Tree::clear_some(Holder holder, SetNumber set) {
  constexpr int kNodes = 16;  // A join may overwrite thousands of owners.
  for (int left = kNodes; left > 0 && sets_.first_node(set) != kNoNode; --left) {
    NodeNumber number = sets_.first_node(set);
    if (holdings_.any_copies()) {
      number = isolate(number, 0, std::min<std::uint32_t>(nodes_[number].length, kBatchBlocks / kNodes));
      const Node& node = nodes_[number];
      for (std::uint32_t slot = node.first; slot < node.end(); ++slot) holdings_.forget_copies(slot, holder);
    }
    holdings_.drop_some_of_all(holder, nodes_[number].length);
    release(holder, number);
  }
  return sets_.first_node(set) == kNoNode;
}

bool Tree::sweep() {
  auto budget = static_cast<std::uint32_t>(kBatchBlocks);
  while (!unheld_.empty() && budget > 0) {
    const NodeNumber number = unheld_.back();
    Node& node = nodes_[number];
    // A node that was a ghost may be held by now, or part of another node.
    if (node.length == 0 || node.set != kNoHolders || node.first_child != kNoNode) {
      unheld_.pop_back();
      continue;
    }
    const std::uint32_t count = std::min(budget, node.length);
    const std::uint32_t first = node.end() - count;
    for (std::uint32_t slot = first; slot < node.end(); ++slot) table_.prefetch(hash_of(arena_.id(slot)));
    for (std::uint32_t slot = first; slot < node.end(); ++slot) table_.erase(hash_of(arena_.id(slot)), slot);
    arena_.give(first, count);
    node.length -= count;
    budget -= count;
    if (node.length > 0) continue;
    unheld_.pop_back();
    const NodeNumber above = node.parent;
    unhang(number);
    free_node(number);
    if (above > kLost) unheld_.push_back(above);
  }
  return !unheld_.empty();
}

void Tree::set_holders(NodeNumber number, SetNumber set) {
  const Node& node = nodes_[number];
  if (node.set == kNoHolders) held_blocks_ += node.length;
  if (set == kNoHolders) held_blocks_ -= node.length;
  leave_set(number);
  enter_set(number, set);
}

// Takes the holder from a whole node. The node stays, for the others or for what hangs behind it, or is swept.
void Tree::release(Holder holder, NodeNumber number) {
  const SetNumber set = sets_.without(nodes_[number].set, holder);
  set_holders(number, set);
  if (set != kNoHolders) {
    join_around(number);
  } else if (nodes_[number].first_child == kNoNode) {
    unheld_.push_back(number);
  }
}

// -------------------------------------------------------------------- recency

// Readers do this as well, several at once.
void Tree::touch(Node& node) const {
  const std::uint32_t now = now_.load(std::memory_order_relaxed);
  std::atomic_ref<std::uint32_t> used(node.used);
  if (used.load(std::memory_order_relaxed) != now) used.store(now, std::memory_order_relaxed);
}

// A node is as fresh as the freshest behind it. So the way up ends at the first that is as fresh as can be.
void Tree::renew_path(Place place) {
  if (place == kAtRoot || place == kNowhere) return;
  for (NodeNumber at = arena_.owner(place); at > kLost && nodes_[at].used < unasked(); at = nodes_[at].parent) {
    renew(nodes_[at]);
  }
}

}  // namespace baton::radix
