// Arguments and results of an index, whatever its data structure.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "radix/holders.h"
#include "radix/ids.h"
#include "radix/table.h"

namespace baton::radix {

// Blocks that one batch changes at most, which bounds a reader's wait. 64 take 1 to 5 µs, a quarter of the time that a
// match may take, and the cost of the lock is still small against that.
inline constexpr std::size_t kBatchBlocks = 64;

// The parent of the next block: the block in a slot, the root, or unknown.
using Place = std::uint32_t;
inline constexpr Place kAtRoot = kNone, kNowhere = kNone - 1;

// A run of blocks and the one before the first; none at the root.
struct Run {
  std::optional<Id> parent;
  std::vector<Id> blocks;
};

// A run and all its holders.
struct Branch {
  Run run;
  std::vector<Holder> holders;
};

// The longest prefix that the same workers hold: its last block, its length, and the number of workers.
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
  std::size_t blocks = 0;    // Blocks with a holder.
  std::size_t holdings = 0;  // Blocks per worker and tier, summed.
  std::size_t ghosts = 0;    // Blocks without holders, kept because a block behind them has one.
  std::size_t nodes = 0;
  std::size_t sets = 0;
  std::size_t bytes = 0;
};

}  // namespace baton::radix
