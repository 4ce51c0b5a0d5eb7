// Records per holder: the number of its blocks, the sum of their ids, and the copies of a block beyond the first.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "radix/holders.h"
#include "radix/ids.h"

namespace baton::radix {

// The digest of a set of blocks, whatever their order. Ids are digests, so their sum as 128-bit numbers is as good a
// digest of the set as each id is of its prompt.
struct Sum {
  __extension__ using Wide = unsigned __int128;
  Wide ids = 0;
  std::size_t blocks = 0;

  void add(const Id& id) {
    ids += static_cast<Wide>(id.high) << 64 | id.low;
    ++blocks;
  }
  void operator+=(const Sum& other) {
    ids += other.ids;
    blocks += other.blocks;
  }
  void operator-=(const Sum& other) {
    ids -= other.ids;
    blocks -= other.blocks;
  }
};

inline Sum sum_of(Ids ids) {
  Sum sum;
  for (std::size_t at = 0; at < ids.size(); ++at) sum.add(ids[at]);
  return sum;
}

class Holdings {
 public:
  // Whether each store adds a copy and each removal takes one. Otherwise repeated stores and removals change nothing.
  explicit Holdings(bool counts_copies) : counts_copies_(counts_copies) {}

  void add(Holder holder, const Sum& sum) {
    if (sums_.size() <= holder.number()) sums_.resize(holder.number() + 1);
    sums_[holder.number()] += sum;
    all_ += sum.blocks;
  }
  void drop(Holder holder, const Sum& sum) {
    sums_[holder.number()] -= sum;
    all_ -= sum.blocks;
  }
  // Drops some blocks of a holder that is being cleared. The sum of ids is not updated, since it ends at zero.
  void drop_some_of_all(Holder holder, std::size_t blocks) {
    Sum& sum = sums_[holder.number()];
    sum.blocks -= blocks;
    if (sum.blocks == 0) sum.ids = 0;
    all_ -= blocks;
  }
  Sum of(Holder holder) const { return holder.number() < sums_.size() ? sums_[holder.number()] : Sum{}; }
  std::size_t blocks(std::uint32_t worker) const {
    std::size_t blocks = 0;
    for (const Tier tier : kAllTiers) blocks += of({worker, tier}).blocks;
    return blocks;
  }
  std::size_t all() const { return all_; }

  bool counts_copies() const { return counts_copies_; }
  bool any_copies() const { return !copies_.empty(); }
  void add_copy(std::uint32_t slot, Holder holder) { ++copies_[key(slot, holder)]; }
  // Takes a copy; returns whether there was one, so that the block is still held.
  bool take_copy(std::uint32_t slot, Holder holder) {
    const auto found = copies_.find(key(slot, holder));
    if (found == copies_.end()) return false;
    if (--found->second == 0) copies_.erase(found);
    return true;
  }
  std::uint32_t copies(std::uint32_t slot, Holder holder) const {
    const auto found = copies_.find(key(slot, holder));
    return found == copies_.end() ? 0 : found->second;
  }
  void forget_copies(std::uint32_t slot, Holder holder) { copies_.erase(key(slot, holder)); }

  std::size_t bytes() const {
    constexpr std::size_t kNodeBytes = 32;  // A node of the map: next, key, value.
    return sums_.capacity() * sizeof(sums_[0]) + copies_.size() * kNodeBytes + copies_.bucket_count() * sizeof(void*);
  }

 private:
  static std::uint64_t key(std::uint32_t slot, Holder holder) { return std::uint64_t{slot} << 32 | holder.number(); }

  bool counts_copies_;
  std::size_t all_ = 0;
  std::vector<Sum> sums_;
  std::unordered_map<std::uint64_t, std::uint32_t> copies_;
};

}  // namespace baton::radix
