// What an agent's blocks are, which both ends of a connection compare before bytes move.
#pragma once

#include <optional>

#include "layout/layout.h"
#include "transfer/types.h"

namespace baton::transfer {

struct Geometry {
  std::string fingerprint;
  std::uint32_t layers = 0;
  std::uint32_t blocks = 0;       // Of this side's pool; the other side's may differ.
  std::uint64_t block_bytes = 0;  // Of one tensor.
  std::uint32_t block_tokens = 0;
  std::optional<layout::Layout> layout;  // What is in a block, where the owner says so.

  // A layer's K and V may lie in a tensor each. Chunks are of one tensor: layer l has those from l * tensors_per_layer
  // on.
  [[nodiscard]] std::uint32_t tensors_per_layer() const { return layout ? layout::tensors_of(*layout) : 1; }
  [[nodiscard]] std::uint32_t tensors() const { return layers * tensors_per_layer(); }

  bool operator==(const Geometry&) const = default;
};

// Throws std::invalid_argument, also where the layout says something else than the numbers.
void check(const Geometry& geometry);

// How many blocks one chunk has at most. Both ends compute it from what they agreed on.
[[nodiscard]] inline std::uint32_t chunk_blocks(const Geometry& geometry, const Limits& limits) {
  const std::uint64_t blocks = limits.chunk_bytes / geometry.block_bytes;
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(blocks, 1, limits.chunk_blocks));
}

}  // namespace baton::transfer
