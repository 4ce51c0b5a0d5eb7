// The shape of an agent's blocks, which both ends of a connection compare before bytes move.
#pragma once

#include <optional>

#include "layout/layout.h"
#include "transfer/types.h"

namespace baton::transfer {

struct Geometry {
  std::string fingerprint;
  std::uint32_t layers = 0;
  std::uint32_t blocks = 0;       // Number in this side's pool; the other side's may differ.
  std::uint64_t block_bytes = 0;  // Per tensor.
  std::uint32_t block_tokens = 0;
  std::optional<layout::Layout> layout;  // The content of a block, if the owner describes it.

  // A layer's K and V may be separate tensors. A chunk belongs to one tensor; those of layer l begin at
  // l * tensors_per_layer.
  [[nodiscard]] std::uint32_t tensors_per_layer() const { return layout ? layout::tensors_of(*layout) : 1; }
  [[nodiscard]] std::uint32_t tensors() const { return layers * tensors_per_layer(); }

  bool operator==(const Geometry&) const = default;
};

// Throws std::invalid_argument, also if the layout contradicts the numbers.
void check(const Geometry& geometry);

// The maximum number of blocks per chunk. Both ends compute it from the agreed values.
[[nodiscard]] inline std::uint32_t chunk_blocks(const Geometry& geometry, const Limits& limits) {
  const std::uint64_t blocks = limits.chunk_bytes / geometry.block_bytes;
  return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(blocks, 1, limits.chunk_blocks));
}

}  // namespace baton::transfer
