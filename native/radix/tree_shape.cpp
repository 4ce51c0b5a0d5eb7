// Moves that change the tree's shape and never what is held: drawn in tree.h.
#include "radix/tree.h"

#include <algorithm>

namespace baton::radix {

Tree::NodeNumber Tree::new_node(std::uint32_t first, std::uint32_t length, SetNumber set) {
  const NodeNumber number = nodes_.take();
  Node& node = nodes_[number];
  node.first = first;
  node.length = length;
  node.used = unasked();
  enter_set(number, set);
  return number;
}

void Tree::free_node(NodeNumber number) {
  leave_set(number);
  nodes_.give(number);
}

void Tree::hang(NodeNumber number, NodeNumber parent) {
  Node& node = nodes_[number];
  node.parent = parent;
  node.before = kNoNode;
  node.next = nodes_[parent].first_child;
  if (node.next != kNoNode) nodes_[node.next].before = number;
  nodes_[parent].first_child = number;
}

void Tree::unhang(NodeNumber number) {
  const Node& node = nodes_[number];
  if (node.before == kNoNode) {
    nodes_[node.parent].first_child = node.next;
  } else {
    nodes_[node.before].next = node.next;
  }
  if (node.next != kNoNode) nodes_[node.next].before = node.before;
}

// Puts a node in another one's place among its siblings.
void Tree::replace(NodeNumber number, NodeNumber by) {
  const Node& old = nodes_[number];
  Node& node = nodes_[by];
  node.parent = old.parent;
  node.before = old.before;
  node.next = old.next;
  if (node.before == kNoNode) {
    nodes_[node.parent].first_child = by;
  } else {
    nodes_[node.before].next = by;
  }
  if (node.next != kNoNode) nodes_[node.next].before = by;
}

void Tree::enter_set(NodeNumber number, SetNumber set) {
  Node& node = nodes_[number];
  node.set = set;
  node.before_in_set = kNoNode;
  node.next_in_set = sets_.first_node(set);
  if (node.next_in_set != kNoNode) nodes_[node.next_in_set].before_in_set = number;
  sets_.first_node(set) = number;
  sets_.add_node(set);
}

void Tree::leave_set(NodeNumber number) {
  const Node& node = nodes_[number];
  if (node.before_in_set == kNoNode) {
    sets_.first_node(node.set) = node.next_in_set;
  } else {
    nodes_[node.before_in_set].next_in_set = node.next_in_set;
  }
  if (node.next_in_set != kNoNode) nodes_[node.next_in_set].before_in_set = node.before_in_set;
  sets_.drop_node(node.set);
}

bool Tree::has_few_children(const Node& node) const {
  int left = kFewChildren;
  for (NodeNumber child = node.first_child; child != kNoNode; child = nodes_[child].next) {
    if (left-- == 0) return false;
  }
  return true;
}

void Tree::give_children(NodeNumber from, NodeNumber to) {
  nodes_[to].first_child = nodes_[from].first_child;
  for (NodeNumber child = nodes_[to].first_child; child != kNoNode; child = nodes_[child].next) {
    nodes_[child].parent = to;
  }
}

// Cuts a node behind its first `at` blocks; returns the first part. The second is its only child.
Tree::NodeNumber Tree::split(NodeNumber number, std::uint32_t at) {
  Node& node = nodes_[number];
  const bool new_tail = node.length - at < at && has_few_children(node);
  const std::uint32_t used = node.used;
  const NodeNumber other =
      new_tail ? new_node(node.first + at, node.length - at, node.set) : new_node(node.first, at, node.set);
  Node& part = nodes_[other];
  part.used = used;
  arena_.set_owner(part.first, part.length, other);
  node.length -= part.length;
  if (new_tail) {
    give_children(number, other);
    node.first_child = kNoNode;
    hang(other, number);
    return number;
  }
  node.first += at;
  replace(number, other);
  hang(number, other);
  return other;
}

// Returns a node of exactly these blocks of `number`.
Tree::NodeNumber Tree::isolate(NodeNumber number, std::uint32_t from, std::uint32_t count) {
  if (from + count < nodes_[number].length) number = split(number, from + count);
  if (from > 0) number = nodes_[split(number, from)].first_child;
  return number;
}

// Returns the node behind which a child at this place hangs.
Tree::NodeNumber Tree::node_ending_at(Place place) {
  if (place == kAtRoot) return kRoot;
  if (place == kNowhere) return kLost;
  const NodeNumber number = arena_.owner(place);
  const std::uint32_t length = place - nodes_[number].first + 1;
  return length < nodes_[number].length ? split(number, length) : number;
}

// Makes one node of two, if they are alike and touch; returns it, or `lower` where they stay two.
Tree::NodeNumber Tree::join(NodeNumber upper, NodeNumber lower) {
  if (upper <= kLost) return lower;
  Node& above = nodes_[upper];
  Node& below = nodes_[lower];
  // Nodes without holders are about to be freed, or rare.
  if (above.set != below.set || above.set == kNoHolders || above.end() != below.first ||
      above.length + below.length > kEdgeBlocksMax || above.first_child != lower || below.next != kNoNode ||
      below.first % Arena::kChunkSlots == 0) {
    return lower;
  }
  const std::uint32_t used = std::max(above.used, below.used);
  if (below.length <= above.length && has_few_children(below)) {
    arena_.set_owner(below.first, below.length, upper);
    above.length += below.length;
    above.used = used;
    give_children(lower, upper);
    free_node(lower);
    return upper;
  }
  arena_.set_owner(above.first, above.length, lower);
  below.first = above.first;
  below.length += above.length;
  below.used = used;
  replace(upper, lower);
  free_node(upper);
  return lower;
}

void Tree::join_around(NodeNumber number) {
  number = join(nodes_[number].parent, number);
  if (const NodeNumber child = nodes_[number].first_child; child != kNoNode) join(number, child);
}

// Hangs a node without a place where it belongs. Ids that contradict each other could close a circle.
void Tree::adopt(NodeNumber number, Place place) {
  if (place == kNowhere) return;
  if (place != kAtRoot) {
    for (NodeNumber above = arena_.owner(place); above > kLost; above = nodes_[above].parent) {
      if (above == number) return;
    }
  }
  const NodeNumber parent = node_ending_at(place);
  unhang(number);
  hang(number, parent);
}

}  // namespace baton::radix
