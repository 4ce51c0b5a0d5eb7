// The index as a compressed radix tree over chained block ids.
//
// A node is a stretch of slots (see arena.h) that the same holders hold. Children hang behind the last block of a node.
// Workers A and B, blocks a to f, and g behind c:
//
//     A stores a…f              B stores a b c g              A removes b
//
//     [a b c d e f] {A}         [a b c] {A B}                 [a] {A B}
//                                ├─[d e f] {A}                 └─[b] {B}
//                                └─[g]     {B}                    └─[c] {A B}
//                                                                    ├─[d e f] {A}
//                                                                    └─[g]     {B}
//
// After the removal A holds c to f without a path to them, and `match` drops it at b. When A stores b again, nothing
// has to be said about c. If no worker held b, its node would stay as a **ghost**, without holders, for as long as
// something hangs behind it. A run that is loaded before its parent also gets a ghost as parent, without a place yet.
//
// A split cuts a node in two, for a difference in holders or a branch. No block moves and no id is looked up: the
// shorter part becomes a new node, and the owners of its slots are overwritten.
//
//     slots    │ a b c d e f │                  slots    │ a b c d e f │
//     owner    │ 5 5 5 5 5 5 │   split 5 at 2   owner    │ 8 8 5 5 5 5 │
//
//     parent                                    parent
//      └─5 = [a b c d e f] {A}                   └─8 = [a b] {A}
//         └─children                                └─5 = [c d e f] {A}
//                                                      └─children
//
// Where the tail is the shorter part it becomes the new node, unless too many children would have to learn its number.
// A join undoes a split: a node with one child, the same holders, and slots that touch.
#pragma once

#include <algorithm>
#include <atomic>
#include <optional>

#include "radix/arena.h"
#include "radix/holdings.h"
#include "radix/leading.h"
#include "radix/types.h"

namespace baton::radix {

// Not thread-safe: index.h keeps readers (`match`, `size`) and changes apart.
class Tree {
 public:
  explicit Tree(bool counts_copies);

  // `prepare` makes room before a batch, beside readers, so that the batch rarely allocates; `install` uses the room
  // within the batch.
  void prepare();
  void install();
  bool has_room(std::size_t blocks) const { return table_.size() + blocks <= Arena::kSlotsMax; }
  bool has_unheld() const { return !unheld_.empty(); }
  void prefetch(Ids ids) const;

  // ---------------------------------------------------------------- changes, each of kBatchBlocks at most

  // Returns the parent's place; an unknown parent is added as a ghost.
  Place place_of(const std::optional<Id>& parent);
  // Adds a run behind `place`, which then is the run's end. Returns the number of blocks that are new to the holder.
  std::size_t insert(Holder holder, Place& place, Ids ids);
  // Returns the number of the blocks that the holder held.
  std::size_t erase(Holder holder, Ids ids);
  // Takes the holder from some nodes of `set`, which must contain it; returns whether that was all of them.
  bool clear_some(Holder holder, SetNumber set);
  // Frees some of the blocks that have no holder any more; returns whether there are more.
  bool sweep();

  // ---------------------------------------------------------------- questions

  bool holds(std::uint32_t worker, const Id& id) const;
  void match(Ids ids, Leading& leading, std::vector<Held>& out);
  // Returns the first set from `from` on that contains the holder, or kNoHolders.
  SetNumber next_set(Holder holder, SetNumber from) const;
  std::vector<Run> dump(Holder holder) const;
  // Returns the block and everything behind it with all holders, each run after its parent.
  std::vector<Branch> dump_behind(const Id& id) const;
  // Returns those of the ids that have no holder here.
  std::vector<Id> unheld(Ids ids) const;
  // Returns the first blocks of the topmost nodes that were not matched for `ticks` and have, with everything behind
  // them, at most `blocks_max` blocks. A stored block begins as if it had last been matched kUnaskedTicks ago: blocks
  // of a prompt seen once become idle before those of a prompt seen again, so a scan evicts nothing in use.
  std::vector<Id> idle(std::uint32_t ticks, std::size_t blocks_max) const;
  // Returns the number of ticks for which the `blocks` longest idle blocks have been idle at least.
  std::uint32_t age_of(std::size_t blocks) const;
  // Looks at every node; `top` prefixes at most.
  Survey survey(std::size_t top) const;
  // Advances the clock of `idle`.
  void tick() { now_.fetch_add(1, std::memory_order_relaxed); }
  const Holdings& holdings() const { return holdings_; }
  Size size() const;

 private:
  using NodeNumber = std::uint32_t;
  static constexpr NodeNumber kRoot = 0, kLost = 1, kNoNode = 0;
  static constexpr std::uint32_t kEdgeBlocksMax = 4096;
  static constexpr int kFewChildren = 8;
  static constexpr std::uint32_t kUnaskedTicks = 600;

  struct Node {
    std::uint32_t first = 0;
    std::uint32_t length = 0;
    SetNumber set = kNoHolders;
    NodeNumber parent = kRoot;
    NodeNumber first_child = kNoNode;
    NodeNumber before = kNoNode, next = kNoNode;                // Siblings.
    NodeNumber before_in_set = kNoNode, next_in_set = kNoNode;  // Nodes with the same holders.
    std::uint32_t used = 0;                                     // The tick when it was last matched.

    std::uint32_t end() const { return first + length; }
  };

  std::uint32_t find(const Id& id) const {
    return table_.find(hash_of(id), [&](std::uint32_t slot) { return arena_.id(slot) == id; });
  }

  // tree_shape.cpp: moves that change the shape and never what is held.
  NodeNumber new_node(std::uint32_t first, std::uint32_t length, SetNumber set);
  void free_node(NodeNumber number);
  void hang(NodeNumber number, NodeNumber parent);
  void unhang(NodeNumber number);
  void replace(NodeNumber number, NodeNumber by);
  void enter_set(NodeNumber number, SetNumber set);
  void leave_set(NodeNumber number);
  bool has_few_children(const Node& node) const;
  void give_children(NodeNumber from, NodeNumber to);
  NodeNumber split(NodeNumber number, std::uint32_t at);
  NodeNumber isolate(NodeNumber number, std::uint32_t from, std::uint32_t count);
  NodeNumber node_ending_at(Place place);
  NodeNumber join(NodeNumber upper, NodeNumber lower);
  void join_around(NodeNumber number);
  void adopt(NodeNumber number, Place place);

  std::uint32_t plant(Holder holder, Place& place, Ids ids);
  std::uint32_t share(Holder holder, std::uint32_t slot, Ids ids, Sum& fresh);
  void set_holders(NodeNumber number, SetNumber set);
  void release(Holder holder, NodeNumber number);
  void touch(Node& node) const;
  static std::uint32_t used_of(const Node& node);
  std::uint32_t unasked() const { return now_.load(std::memory_order_relaxed) - kUnaskedTicks; }
  void renew(Node& node) const { node.used = std::max(node.used, unasked()); }
  void renew_path(Place place);
  std::optional<Id> parent_of(const Node& node) const;
  Run run_of(const Node& node, std::uint32_t from) const;

  Arena arena_;
  SlotTable table_;
  std::optional<SlotTable> other_table_;  // The next, larger table, or the previous one, freed beside readers.
  bool is_grown_ = false;
  HolderSets sets_;
  Pool<Node> nodes_;
  Holdings holdings_;
  std::vector<NodeNumber> unheld_;  // Leaves without holders, to be freed; empty between two changes.
  std::size_t held_blocks_ = 0;
  std::atomic<std::uint32_t> now_{kUnaskedTicks};
};

}  // namespace baton::radix
