// The positions of one block's elements, of a Layout or of a piece in wire form, as arithmetic.
#pragma once

#include <array>
#include <span>

#include "layout/layout.h"

namespace baton::layout {

// The kinds of rows of a token: K and V, or the latent rows alone.
enum class Plane : std::uint8_t { k, v, latent };

// One axis: index i lies at i / tile * outer + i % tile * inner.
struct Axis {
  std::uint32_t tile = 1;
  std::uint64_t outer = 0;
  std::uint64_t inner = 0;

  [[nodiscard]] std::uint64_t at(std::uint32_t index) const { return index / tile * outer + index % tile * inner; }
  bool operator==(const Axis&) const = default;
};

// The order of a plane's elements, which selects the copy loop; see layout/cells.h.
enum class Cells : std::uint8_t {
  rows,     // A token's dimensions are contiguous; tokens have a fixed distance within a block.
  columns,  // Words of neighbouring tokens side by side, a word being one or more dimensions.
  pairs,    // Two tokens' dimensions alternate, sixteen of each at a time.
};

// One plane of one block; all in bytes from the block's beginning in its tensor.
struct Grid {
  std::uint32_t tensor = 0;
  Cells cells{};
  std::uint64_t origin = 0;
  std::uint64_t head_stride = 0;
  Axis token;
  Axis dim;

  bool operator==(const Grid&) const = default;
};

struct Block {
  std::uint32_t tokens = 0;
  std::uint32_t dim = 0;
  std::uint32_t element_bytes = 0;
  Heads heads;  // Heads held here.
  std::uint32_t tensors = 1;
  std::uint64_t bytes = 0;  // Size in one tensor.
  std::uint32_t planes = 1;
  std::array<Grid, 2> grids;  // K and V, or the latent rows.

  [[nodiscard]] std::uint64_t row_bytes() const { return std::uint64_t{dim} * element_bytes; }
  // Equal blocks have the same content at the same positions, so they may be copied whole.
  bool operator==(const Block&) const = default;
};

[[nodiscard]] Block block_of(const Layout& layout);  // Throws Invalid.

// The wire form: one plane of `tokens` tokens and some heads, dense, as [head][token][dim].
[[nodiscard]] Block wire_block(const Block& of, Heads heads, std::uint32_t tokens);

// Index of a plane in `grids`; throws Invalid if the block has no such plane.
[[nodiscard]] std::uint32_t index_of(const Block& block, Plane plane);

}  // namespace baton::layout
