// The state of a match: the workers that hold all blocks so far, and the count of each, computed word by word.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "radix/holders.h"

namespace baton::radix {

struct Held {
  std::uint32_t worker;
  std::array<std::uint32_t, kTiers> reach;  // Leading blocks each of which is on a tier or on a nearer one, by tier.
};

class Leading {
 public:
  // Begins with the holders of the first blocks. Keeps its memory from one match to the next.
  void begin(const HolderSet& set) {
    first_group_ = set.first_group();
    const std::size_t groups = set.end_group() - first_group_;
    alive_.resize(groups);
    counts_.assign(groups * 64, {});
    for (std::size_t at = 0; at < groups; ++at) alive_[at] = words_of(set, at);
    seen_ = alive_;
  }

  // Drops the workers that are not in `set`, which held `blocks`. Returns whether any are left.
  bool narrow(const HolderSet& set, std::uint32_t blocks) {
    std::uint64_t left = 0;
    for (std::size_t at = 0; at < alive_.size(); ++at) {
      const Words here = words_of(set, at);
      for (std::size_t tier = 0; tier < kTiers; ++tier) {
        note(at, tier, alive_[at][tier] & ~here[tier], blocks);
        alive_[at][tier] &= here[tier];
      }
      left |= alive_[at].back();
    }
    return left != 0;
  }

  // Ends the match: the workers left hold `blocks`. Puts one entry for each worker that held any into `out`.
  void finish(std::uint32_t blocks, std::vector<Held>& out) {
    for (std::size_t at = 0; at < alive_.size(); ++at) {
      for (std::size_t tier = 0; tier < kTiers; ++tier) note(at, tier, alive_[at][tier], blocks);
      for (std::uint64_t bits = seen_[at].back(); bits != 0; bits &= bits - 1) {
        const std::size_t worker = at * 64 + static_cast<std::size_t>(std::countr_zero(bits));
        out.push_back({static_cast<std::uint32_t>(first_group_ * 64 + worker), counts_[worker]});
      }
    }
  }

 private:
  using Words = std::array<std::uint64_t, kTiers>;  // Holders on a tier or on a nearer one, by tier.

  Words words_of(const HolderSet& set, std::size_t at) const {
    const std::uint32_t group = first_group_ + static_cast<std::uint32_t>(at);
    if (group < set.first_group() || group >= set.end_group()) return {};
    Words words{};
    std::uint64_t nearer = 0;
    for (std::size_t tier = 0; tier < kTiers; ++tier) words[tier] = nearer |= set.word(group, kAllTiers[tier]);
    return words;
  }

  void note(std::size_t at, std::size_t tier, std::uint64_t workers, std::uint32_t blocks) {
    for (; workers != 0; workers &= workers - 1) {
      counts_[at * 64 + static_cast<std::size_t>(std::countr_zero(workers))][tier] = blocks;
    }
  }

  std::uint32_t first_group_ = 0;
  std::vector<Words> alive_;
  std::vector<Words> seen_;
  std::vector<std::array<std::uint32_t, kTiers>> counts_;
};

}  // namespace baton::radix
