// Slots of a chunk's size beside the pool, for a lane's chunks until their conversion, if the source's blocks differ
// from the sink's. A chunk gets its slot before its request, so that no chunk on the connection waits for a slot: the
// trailers that would free other slots may be behind it.
//
//   take ──▶ asked for ──▶ placed into its slot ──▶ verified ──▶ converted into the pool ──▶ release
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "transfer/geometry.h"

namespace baton::transfer {

class Staging {
 public:
  Staging(const Geometry& source, const Limits& limits) : owners_(slots(source, limits), kFree) {}

  [[nodiscard]] static std::uint32_t slots(const Geometry& source, const Limits& limits) {
    const std::uint64_t bytes = chunk_blocks(source, limits) * source.block_bytes;
    return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(limits.staging_bytes / bytes, 2, 64));
  }

  // Whether a pull may take one more when this many pulls share the slots.
  [[nodiscard]] bool has_room(PullId pull, std::size_t pulls) const {
    const auto held = static_cast<std::size_t>(std::count(owners_.begin(), owners_.end(), pull));
    return held < std::max<std::size_t>(1, owners_.size() / std::max<std::size_t>(1, pulls)) &&
           std::find(owners_.begin(), owners_.end(), kFree) != owners_.end();
  }
  // Precondition: there is room.
  [[nodiscard]] std::uint32_t take(PullId pull) {
    const auto free = std::find(owners_.begin(), owners_.end(), kFree);
    *free = pull;
    return static_cast<std::uint32_t>(free - owners_.begin());
  }
  void release(std::uint32_t slot) { owners_[slot] = kFree; }
  // Releases all slots of a pull.
  void forget(PullId pull) { std::replace(owners_.begin(), owners_.end(), pull, kFree); }

 private:
  static constexpr PullId kFree = 0;  // Pulls are numbered from 1 on.

  std::vector<PullId> owners_;  // Indexed by slot.
};

}  // namespace baton::transfer
