// What is counted per holder: blocks held, and the copies of a block beyond the first.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "radix/holders.h"

namespace baton::radix {

class Holdings {
 public:
  // Whether each store adds a copy and each removal takes one. Else a block is held or not, however often that is said.
  explicit Holdings(bool counts_copies) : counts_copies_(counts_copies) {}

  void add(Holder holder, std::size_t blocks) {
    if (blocks_.size() <= holder.number()) blocks_.resize(holder.number() + 1);
    blocks_[holder.number()] += blocks;
    all_ += blocks;
  }
  void drop(Holder holder, std::size_t blocks) {
    blocks_[holder.number()] -= blocks;
    all_ -= blocks;
  }
  std::size_t of(Holder holder) const { return holder.number() < blocks_.size() ? blocks_[holder.number()] : 0; }
  std::size_t of(std::uint32_t worker) const { return of({worker, Tier::active}) + of({worker, Tier::history}); }
  std::size_t all() const { return all_; }

  bool counts_copies() const { return counts_copies_; }
  bool any_copies() const { return !copies_.empty(); }
  void add_copy(std::uint32_t slot, Holder holder) { ++copies_[key(slot, holder)]; }
  // Returns whether there was a copy to take, so that the block is held still.
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
    constexpr std::size_t kNodeBytes = 32;  // Of the map: next, key, value.
    return blocks_.capacity() * sizeof(blocks_[0]) + copies_.size() * kNodeBytes +
           copies_.bucket_count() * sizeof(void*);
  }

 private:
  static std::uint64_t key(std::uint32_t slot, Holder holder) { return std::uint64_t{slot} << 32 | holder.number(); }

  bool counts_copies_;
  std::size_t all_ = 0;
  std::vector<std::size_t> blocks_;
  std::unordered_map<std::uint64_t, std::uint32_t> copies_;
};

}  // namespace baton::radix
