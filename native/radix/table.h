// A flat hash table from block id to slot.
//
//   entry   [ 32 bits of the id's hash | slot + 1 ]      0: empty
//   home    the highest bits of that hash, then linear probing
//
// An entry holds its whole hash, so neither growing the table nor closing the gap of an erased entry reads an id, and a
// table of twice the size is filled front to back. The caller compares the ids in their slots.
#pragma once

#include <cstdint>
#include <vector>

namespace baton::radix {

inline constexpr std::uint32_t kNone = 0xffffffff;

class SlotTable {
 public:
  explicit SlotTable(std::uint32_t bits = 10) : shift_(32 - bits), entries_(std::size_t{1} << bits) {}

  // Returns the slot with this hash for which `is_it(slot)` holds, or kNone.
  template <class IsIt>
  std::uint32_t find(std::uint32_t hash, IsIt is_it) const {
    for (std::size_t at = home(hash);; at = next(at)) {
      const std::uint64_t entry = entries_[at];
      if (entry == 0) return kNone;
      if (hash_in(entry) == hash && is_it(slot_in(entry))) return slot_in(entry);
    }
  }

  void prefetch(std::uint32_t hash) const { __builtin_prefetch(&entries_[home(hash)], 1); }

  // The slot must not be in the table, and the table not crowded.
  void insert(std::uint32_t hash, std::uint32_t slot) {
    std::size_t at = home(hash);
    while (entries_[at] != 0) at = next(at);
    entries_[at] = (std::uint64_t{hash} << 32) | (slot + 1);
    ++used_;
  }

  // The slot must be in the table. Later entries move up, so that no probe ends too early. With a at home in the first
  // place, b in the second and d in its own:
  //
  //   │ a a b a d · │   erase the second a   │ a b a · d · │
  //
  void erase(std::uint32_t hash, std::uint32_t slot) {
    std::size_t gap = home(hash);
    while (slot_in(entries_[gap]) != slot) gap = next(gap);
    for (std::size_t at = next(gap); entries_[at] != 0; at = next(at)) {
      const std::size_t from_home = (at - home(hash_in(entries_[at]))) & mask();
      if (from_home >= ((at - gap) & mask())) {
        entries_[gap] = entries_[at];
        gap = at;
      }
    }
    entries_[gap] = 0;
    --used_;
  }

  std::size_t size() const { return used_; }
  std::size_t bytes() const { return entries_.size() * sizeof(std::uint64_t); }
  bool is_crowded(std::size_t more) const { return (used_ + more) * 4 > entries_.size() * 3; }

  // Returns a larger table with the same content.
  SlotTable grown() const {
    SlotTable larger(32 - shift_ + 1);
    for (const std::uint64_t entry : entries_) {
      if (entry != 0) larger.insert(hash_in(entry), slot_in(entry));
    }
    return larger;
  }

 private:
  static std::uint32_t hash_in(std::uint64_t entry) { return static_cast<std::uint32_t>(entry >> 32); }
  static std::uint32_t slot_in(std::uint64_t entry) { return static_cast<std::uint32_t>(entry) - 1; }
  std::size_t home(std::uint32_t hash) const { return hash >> shift_; }
  std::size_t mask() const { return entries_.size() - 1; }
  std::size_t next(std::size_t at) const { return (at + 1) & mask(); }

  std::uint32_t shift_;
  std::size_t used_ = 0;
  std::vector<std::uint64_t> entries_;
};

}  // namespace baton::radix
