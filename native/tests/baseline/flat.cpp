#include "tests/baseline/flat.h"

namespace baton::radix {

void Flat::prepare() {
  other_table_.reset();
  if (table_.is_crowded(kBatchBlocks)) {
    other_table_ = table_.grown();
    is_grown_ = true;
  }
  if (blocks_.end() == kNoBlock) blocks_.take();
  blocks_.prepare();
  sets_.prepare();
}

void Flat::install() {
  if (is_grown_) std::swap(table_, *other_table_);
  is_grown_ = false;
}

void Flat::prefetch(Ids ids) const {
  for (std::size_t at = 0; at < ids.size(); ++at) table_.prefetch(hash_of(ids[at]));
}

Place Flat::place_of(const std::optional<Id>& parent) {
  if (!parent) return kAtRoot;
  const std::uint32_t slot = find(*parent);
  loose_parent_ = *parent;
  return slot == kNone ? kNowhere : slot;
}

std::size_t Flat::insert(Holder holder, Place& place, Ids ids) {
  Sum fresh;
  for (std::size_t at = 0; at < ids.size(); ++at) {
    const Id id = ids[at];
    std::uint32_t slot = find(id);
    if (slot == kNone) {
      slot = blocks_.take();
      Block& block = blocks_[slot];
      block.id = id;
      block.is_root = place == kAtRoot;
      block.parent = place == kNowhere ? loose_parent_ : block.is_root ? Id{} : blocks_[place].id;
      table_.insert(hash_of(id), slot);
      enter_set(slot, sets_.with(kNoHolders, holder));
      fresh.add(id);
    } else if (!sets_[blocks_[slot].set].contains(holder)) {
      const SetNumber set = sets_.with(blocks_[slot].set, holder);
      leave_set(slot);
      enter_set(slot, set);
      fresh.add(id);
    } else if (holdings_.counts_copies()) {
      holdings_.add_copy(slot, holder);
    }
    place = slot;
  }
  holdings_.add(holder, fresh);
  return fresh.blocks;
}

std::size_t Flat::erase(Holder holder, Ids ids) {
  std::size_t held = 0;
  for (std::size_t at = 0; at < ids.size(); ++at) {
    const std::uint32_t slot = find(ids[at]);
    if (slot == kNone || !sets_[blocks_[slot].set].contains(holder)) continue;
    ++held;
    if (!holdings_.any_copies() || !holdings_.take_copy(slot, holder)) release(holder, slot);
  }
  return held;
}

bool Flat::clear_some(Holder holder, SetNumber set) {
  for (std::size_t left = kBatchBlocks; left > 0 && sets_.first_node(set) != kNoBlock; --left) {
    const std::uint32_t slot = sets_.first_node(set);
    if (holdings_.any_copies()) holdings_.forget_copies(slot, holder);
    release(holder, slot);
  }
  return sets_.first_node(set) == kNoBlock;
}

bool Flat::holds(std::uint32_t worker, const Id& id) const {
  const std::uint32_t slot = find(id);
  return slot != kNone && sets_[blocks_[slot].set].contains(worker);
}

void Flat::match(Ids ids, Leading& leading, std::vector<Held>& out) {
  std::uint32_t at = 0;
  SetNumber holders = kNoHolders;
  for (; at < ids.size(); ++at) {
    const std::uint32_t slot = find(ids[at]);
    if (slot == kNone) break;
    const SetNumber set = blocks_[slot].set;
    if (holders == kNoHolders) {
      leading.begin(sets_[set]);
    } else if (set != holders && !leading.narrow(sets_[set], at)) {
      break;
    }
    holders = set;
  }
  if (holders != kNoHolders) leading.finish(at, out);
}

SetNumber Flat::next_set(Holder holder, SetNumber from) const {
  for (SetNumber set = from; set < sets_.end(); ++set) {
    if (sets_[set].contains(holder)) return set;
  }
  return kNoHolders;
}

std::vector<Run> Flat::dump(Holder holder) const {
  std::vector<Run> runs;
  for (SetNumber set = next_set(holder, 1); set != kNoHolders; set = next_set(holder, set + 1)) {
    for (std::uint32_t slot = sets_.first_node(set); slot != kNoBlock; slot = blocks_[slot].next_in_set) {
      const Block& block = blocks_[slot];
      const Run run{block.is_root ? std::nullopt : std::optional(block.parent), {block.id}};
      runs.insert(runs.end(), 1 + (holdings_.any_copies() ? holdings_.copies(slot, holder) : 0), run);
    }
  }
  return runs;
}

Size Flat::size() const {
  const std::size_t other_bytes = other_table_ ? other_table_->bytes() : 0;
  return {
      .blocks = table_.size(),
      .holdings = holdings_.all(),
      .nodes = table_.size(),
      .sets = sets_.size() - 1,
      .bytes = table_.bytes() + other_bytes + sets_.bytes() + blocks_.bytes() + holdings_.bytes(),
  };
}

void Flat::enter_set(std::uint32_t slot, SetNumber set) {
  Block& block = blocks_[slot];
  block.set = set;
  block.before_in_set = kNoBlock;
  block.next_in_set = sets_.first_node(set);
  if (block.next_in_set != kNoBlock) blocks_[block.next_in_set].before_in_set = slot;
  sets_.first_node(set) = slot;
  sets_.add_node(set);
}

void Flat::leave_set(std::uint32_t slot) {
  const Block& block = blocks_[slot];
  if (block.before_in_set == kNoBlock) {
    sets_.first_node(block.set) = block.next_in_set;
  } else {
    blocks_[block.before_in_set].next_in_set = block.next_in_set;
  }
  if (block.next_in_set != kNoBlock) blocks_[block.next_in_set].before_in_set = block.before_in_set;
  sets_.drop_node(block.set);
}

void Flat::release(Holder holder, std::uint32_t slot) {
  const SetNumber set = sets_.without(blocks_[slot].set, holder);
  Sum gone;
  gone.add(blocks_[slot].id);
  holdings_.drop(holder, gone);
  leave_set(slot);
  if (set != kNoHolders) {
    enter_set(slot, set);
    return;
  }
  table_.erase(hash_of(blocks_[slot].id), slot);
  blocks_.give(slot);
}

}  // namespace baton::radix
