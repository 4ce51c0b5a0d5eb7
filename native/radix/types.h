// What goes into an index and comes out of it, whichever way it keeps its blocks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "radix/holders.h"
#include "radix/ids.h"
#include "radix/table.h"

namespace baton::radix {

// Blocks that one batch changes at most: how long a reader may have to wait. 64 take 1 to 5 µs, a quarter of what a
// match may take, and the cost of the lock itself still vanishes beside them.
inline constexpr std::size_t kBatchBlocks = 64;

// Where the next block hangs: behind the block in a slot, at the root, or nobody knows.
using Place = std::uint32_t;
inline constexpr Place kAtRoot = kNone, kNowhere = kNone - 1;

// A run of blocks and the one before the first; none at the root.
struct Run {
  std::optional<Id> parent;
  std::vector<Id> blocks;
};

// A run and all that hold it.
struct Branch {
  Run run;
  std::vector<Holder> holders;
};

// A prefix as long as the same workers hold it: where it ends, its length, and how many they are.
struct Prefix {
  Id last;
  std::uint32_t blocks = 0;
  std::uint32_t workers = 0;
};

struct Survey {
  std::uint32_t depth = 0;  // Blocks of the longest prefix.
  std::vector<Prefix> top;  // Held by the most workers, then longest, first.
};

struct Size {
  std::size_t blocks = 0;    // That somebody holds.
  std::size_t holdings = 0;  // Blocks per worker and tier, summed.
  std::size_t ghosts = 0;    // Blocks that nobody holds, kept because somebody holds a block behind them.
  std::size_t nodes = 0;
  std::size_t sets = 0;
  std::size_t bytes = 0;
};

}  // namespace baton::radix
