// The baseline: a flat hash table from block to holders, one record for each block.
//
// The tree's baseline. It shares the tree's parts (table, sets, counts) and has its answers; it lacks runs, so every
// block of a prompt is looked up, and a way from a block to what hangs behind it.
#pragma once

#include "radix/holdings.h"
#include "radix/leading.h"
#include "radix/types.h"

namespace baton::radix {

class Flat {
 public:
  explicit Flat(bool counts_copies) : holdings_(counts_copies) {}

  void prepare();
  void install();
  bool has_room(std::size_t blocks) const { return table_.size() + blocks < kNowhere; }
  void prefetch(Ids ids) const;

  Place place_of(const std::optional<Id>& parent);
  std::size_t insert(Holder holder, Place& place, Ids ids);
  std::size_t erase(Holder holder, Ids ids);
  bool clear_some(Holder holder, SetNumber set);
  bool has_unheld() const { return false; }
  bool sweep() { return false; }

  bool holds(std::uint32_t worker, const Id& id) const;
  void match(Ids ids, Leading& leading, std::vector<Held>& out);
  SetNumber next_set(Holder holder, SetNumber from) const;
  std::vector<Run> dump(Holder holder) const;
  const Holdings& holdings() const { return holdings_; }
  Size size() const;

 private:
  static constexpr std::uint32_t kNoBlock = 0;
  struct Block {
    Id id, parent;
    SetNumber set = kNoHolders;
    std::uint32_t before_in_set = kNoBlock, next_in_set = kNoBlock;
    bool is_root = false;
  };

  std::uint32_t find(const Id& id) const {
    return table_.find(hash_of(id), [&](std::uint32_t slot) { return blocks_[slot].id == id; });
  }
  void enter_set(std::uint32_t slot, SetNumber set);
  void leave_set(std::uint32_t slot);
  void release(Holder holder, std::uint32_t slot);

  SlotTable table_;
  std::optional<SlotTable> other_table_;
  bool is_grown_ = false;
  HolderSets sets_;
  Pool<Block> blocks_;
  Holdings holdings_;
  Id loose_parent_;  // Parent of the run to be inserted, if it is not held itself.
};

}  // namespace baton::radix
