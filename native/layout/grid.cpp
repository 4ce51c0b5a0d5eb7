#include "layout/grid.h"

namespace baton::layout {
namespace {

Axis straight(std::uint32_t extent, std::uint64_t stride) {
  // Strides of axes that have one index mean nothing; they must not make equal blocks look different.
  return {.tile = extent, .outer = 0, .inner = extent == 1 ? 0 : stride};
}

Grid plain_grid(const Layout& layout, std::uint32_t heads, std::uint32_t plane) {
  const std::uint64_t element = element_bytes(layout.dtype);
  const std::uint64_t row = layout.dim * element;
  const std::uint64_t cell = layout.form == Form::fused ? 2 * row : row;  // Bytes of one token and head.
  const bool head_major = layout.order == Order::hnd;
  return {.tensor = layout.form == Form::split ? plane : 0,
          .cells = Cells::rows,
          .origin = layout.form == Form::fused ? plane * row : 0,
          .head_stride = heads == 1   ? 0
                         : head_major ? cell * layout.block_tokens
                                      : cell,
          .token = straight(layout.block_tokens, head_major ? cell : cell * heads),
          .dim = straight(layout.dim, element)};
}

// A head's part of a packed block is all of K, then all of V.
Grid packed_grid(const Layout& layout, std::uint32_t heads, std::uint32_t plane) {
  const std::uint64_t element = element_bytes(layout.dtype);
  const std::uint64_t tokens = layout.block_tokens;
  const std::uint64_t region = tokens * layout.dim * element;
  Grid grid{.origin = plane * region, .head_stride = heads == 1 ? 0 : 2 * region};
  if (layout.packing == Packing::amx) {
    constexpr std::uint32_t kPair = 2, kTile = 16;
    const std::uint64_t word = kPair * element;
    if (plane == 0) {
      grid.cells = Cells::columns;
      grid.token = {.tile = kTile, .outer = kTile * layout.dim * element, .inner = word};
      grid.dim = {.tile = kPair, .outer = kTile * word, .inner = element};
    } else {
      grid.cells = Cells::pairs;
      grid.token = {.tile = kPair, .outer = kTile * word, .inner = element};
      grid.dim = {.tile = kTile, .outer = kTile * tokens * element, .inner = word};
    }
  } else if (plane == 0) {
    grid.cells = Cells::columns;
    grid.token = straight(layout.block_tokens, element);
    grid.dim = {.tile = 1, .outer = tokens * element, .inner = 0};
  } else {
    grid.cells = Cells::rows;
    grid.token = straight(layout.block_tokens, layout.dim * element);
    grid.dim = straight(layout.dim, element);
  }
  return grid;
}

}  // namespace

Block block_of(const Layout& layout) {
  check(layout);
  Block block{.tokens = layout.block_tokens,
              .dim = layout.dim,
              .element_bytes = element_bytes(layout.dtype),
              .heads = heads_of(layout),
              .tensors = tensors_of(layout),
              .bytes = block_bytes(layout),
              .planes = layout.form == Form::latent ? 1u : 2u};
  for (std::uint32_t plane = 0; plane < block.planes; ++plane) {
    block.grids[plane] = layout.packing == Packing::plain ? plain_grid(layout, block.heads.count, plane)
                                                          : packed_grid(layout, block.heads.count, plane);
  }
  return block;
}

Block wire_block(const Block& of, Heads heads, std::uint32_t tokens) {
  const std::uint64_t row = of.row_bytes();
  Block block{.tokens = tokens,
              .dim = of.dim,
              .element_bytes = of.element_bytes,
              .heads = heads,
              .bytes = heads.count * tokens * row};
  block.grids[0] = {.cells = Cells::rows,
                    .head_stride = heads.count == 1 ? 0 : tokens * row,
                    .token = straight(tokens, row),
                    .dim = straight(of.dim, of.element_bytes)};
  return block;
}

std::uint32_t index_of(const Block& block, Plane plane) {
  if ((plane == Plane::latent) != (block.planes == 1)) {
    throw Invalid("K and V are planes of caches with heads; latent rows are the plane of the others");
  }
  return plane == Plane::v ? 1 : 0;
}

}  // namespace baton::layout
