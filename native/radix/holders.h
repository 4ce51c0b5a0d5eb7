// Holders of nodes: sets of (worker, tier). Each set is stored once, however many nodes share it.
//
//   a set       groups of 64 workers from the first to the last that has a member, per group three words
//               [ active: one bit per worker | history: likewise | file: likewise ]   [ active | history | file ]   …
//   a node      the number of its set: equal numbers mean equal holders
//
// There are few distinct sets: prompts of one worker share a set, and so do the parts of a prompt that all workers
// hold. A set never changes: a node is given another set, and a set without nodes is freed.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <iterator>
#include <memory>
#include <vector>

#include "radix/pool.h"

namespace baton::radix {

using SetNumber = std::uint32_t;
inline constexpr SetNumber kNoHolders = 0;
inline constexpr std::uint32_t kWorkersMax = 1u << 16;
inline constexpr std::uint32_t kTiers = 3;

// The caches of a worker, the nearest first: a block of the history must be promoted before use, one of the file read.
enum class Tier : std::uint32_t { active = 0, history = 1, file = 2 };
inline constexpr Tier kAllTiers[kTiers] = {Tier::active, Tier::history, Tier::file};

struct Holder {
  std::uint32_t worker;
  Tier tier;
  std::uint32_t number() const { return worker * kTiers + static_cast<std::uint32_t>(tier); }
  bool operator==(const Holder&) const = default;
};

class HolderSet {
 public:
  // `words` begin with the group `first_group` and have a member in the first and in the last group.
  HolderSet() = default;
  HolderSet(std::uint32_t first_group, const std::uint64_t* words, std::uint32_t groups);

  std::uint32_t first_group() const { return first_group_; }
  std::uint32_t end_group() const { return first_group_ + groups_; }
  // Words of a group within first_group() … end_group().
  std::uint64_t word(std::uint32_t group, Tier tier) const {
    return words()[(group - first_group_) * kTiers + static_cast<std::uint32_t>(tier)];
  }
  bool contains(Holder holder) const {
    const std::uint32_t group = holder.worker / 64;
    return group >= first_group_ && group < end_group() && (word(group, holder.tier) >> (holder.worker % 64) & 1) != 0;
  }
  bool contains(std::uint32_t worker) const {
    return std::any_of(std::begin(kAllTiers), std::end(kAllTiers), [&](Tier tier) { return contains({worker, tier}); });
  }
  // Number of workers that have the block on any tier.
  std::uint32_t workers() const {
    int count = 0;
    for (std::uint32_t group = first_group(); group < end_group(); ++group) {
      std::uint64_t any = 0;
      for (const Tier tier : kAllTiers) any |= word(group, tier);
      count += std::popcount(any);
    }
    return static_cast<std::uint32_t>(count);
  }
  const std::uint64_t* words() const { return many_ ? many_.get() : few_.data(); }
  std::uint32_t words_count() const { return groups_ * kTiers; }

 private:
  std::uint32_t first_group_ = 0;
  std::uint32_t groups_ = 0;
  std::array<std::uint64_t, kTiers> few_{};
  std::unique_ptr<std::uint64_t[]> many_;
};

class HolderSets {
 public:
  HolderSets();

  const HolderSet& operator[](SetNumber set) const { return records_[set].set; }
  // Returns the number of the set with or without one holder. A new set has no nodes yet.
  SetNumber with(SetNumber set, Holder holder);
  SetNumber without(SetNumber set, Holder holder);

  // The count of a set's nodes. The tree lists them, beginning with the set's first node.
  void add_node(SetNumber set) { ++records_[set].nodes; }
  void drop_node(SetNumber set) {
    if (--records_[set].nodes == 0) forget(set);
  }
  std::uint32_t& first_node(SetNumber set) { return records_[set].first_node; }
  std::uint32_t first_node(SetNumber set) const { return records_[set].first_node; }

  // Upper bound of set numbers; some sets below it may be empty.
  SetNumber end() const { return records_.end(); }
  std::size_t size() const { return records_.size(); }
  std::size_t bytes() const;

  // Makes room for the sets that one batch may add; readers may run meanwhile.
  void prepare();

 private:
  struct Record {
    HolderSet set;
    std::uint32_t hash = 0;
    std::uint32_t nodes = 0;
    SetNumber next = kNoHolders;
    std::uint32_t first_node = 0;
  };

  SetNumber changed(SetNumber set, Holder holder);
  SetNumber intern(std::uint32_t first_group, const std::uint64_t* words, std::uint32_t groups);
  void forget(SetNumber set);
  SetNumber& bucket(std::uint32_t hash) { return buckets_[hash & (buckets_.size() - 1)]; }

  Pool<Record> records_;
  std::vector<SetNumber> buckets_;
  std::vector<std::uint64_t> scratch_;
  std::size_t words_bytes_ = 0;
};

}  // namespace baton::radix
