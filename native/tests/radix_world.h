// Prompts as chained ids, and the oracle of the index: a set of ids for each holder.
#pragma once

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "radix/index.h"

namespace baton::tests {

using namespace baton::radix;

struct ById {
  bool operator()(const Id& a, const Id& b) const { return std::pair(a.low, a.high) < std::pair(b.low, b.high); }
};

using Prompt = std::vector<Id>;

inline Ids view(const Prompt& prompt, std::size_t from, std::size_t count) {
  return {prompt.data() + from, count};
}

inline Ids view(const Prompt& prompt) {
  return view(prompt, 0, prompt.size());
}

// Prompts that share prefixes: each branches off an earlier one, at any of its blocks.
inline std::vector<Prompt> make_prompts(std::mt19937_64& random, std::size_t count, std::size_t blocks_max) {
  std::vector<Prompt> prompts;
  for (std::size_t number = 0; number < count; ++number) {
    Prompt prompt;
    if (number > 0) {
      const Prompt& other = prompts[random() % number];
      prompt.assign(other.begin(), other.begin() + static_cast<std::ptrdiff_t>(random() % (other.size() + 1)));
    }
    const std::size_t length = std::max<std::size_t>(prompt.size(), 1 + random() % blocks_max);
    while (prompt.size() < length) prompt.push_back({random(), random()});
    prompts.push_back(std::move(prompt));
  }
  return prompts;
}

class Oracle {
 public:
  using Blocks = std::set<Id, ById>;

  Blocks& of(Holder holder) { return held_[holder.number()]; }

  bool holds(std::uint32_t worker, const Id& id) {
    return std::any_of(std::begin(kAllTiers), std::end(kAllTiers),
                       [&](Tier tier) { return of({worker, tier}).contains(id); });
  }

  std::vector<Held> match(const Prompt& prompt, std::uint32_t workers) {
    std::vector<Held> out;
    for (std::uint32_t worker = 0; worker < workers; ++worker) {
      Held held{worker, {}};
      for (std::size_t far = 0; far < kTiers; ++far) {
        const auto is_near = [&](const Id& id) {
          return std::any_of(kAllTiers, kAllTiers + far + 1,
                             [&](Tier tier) { return of({worker, tier}).contains(id); });
        };
        while (held.reach[far] < prompt.size() && is_near(prompt[held.reach[far]])) ++held.reach[far];
      }
      if (held.reach.back() > 0) out.push_back(held);
    }
    return out;
  }

  Sum sum(Holder holder) {
    Sum sum;
    for (const Id& id : of(holder)) sum.add(id);
    return sum;
  }

  Size size() const {
    Blocks all;
    Size out;
    for (const auto& [holder, blocks] : held_) {
      all.insert(blocks.begin(), blocks.end());
      out.holdings += blocks.size();
    }
    out.blocks = all.size();
    return out;
  }

 private:
  std::map<std::uint32_t, Blocks> held_;
};

inline bool same(const std::vector<Held>& mine, const std::vector<Held>& theirs) {
  return std::equal(mine.begin(), mine.end(), theirs.begin(), theirs.end(),
                    [](const Held& a, const Held& b) { return a.worker == b.worker && a.reach == b.reach; });
}

}  // namespace baton::tests
