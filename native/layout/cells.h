// The inner loops: tokens as rows on one side, a head's packed cells on the other.
//
//   rows                 columns (word = 1 dim)      columns (word = 2 dims)        pairs
//   t0: a0 a1 a2 a3      a0 b0 c0 d0 …               a0 a1 b0 b1 c0 c1 d0 d1 …      a0 b0 a1 b1 a2 b2 a3 b3 …
//   t1: b0 b1 b2 b3      a1 b1 c1 d1 …               a2 a3 b2 b3 c2 c3 d2 d3 …      c0 d0 c1 d1 c2 d2 c3 d3 …
//   t2: c0 c1 c2 c3      a2 b2 c2 d2 …
//   t3: d0 d1 d2 d3      a3 b3 c3 d3 …
#pragma once

#include "layout/grid.h"

namespace baton::layout {

// Cells of the tokens [first, first + rows.size()) of one head in one block. `cells` is the beginning of that head's
// part of the plane. Grids of rows need no conversion and are not accepted here.
void pack(const Block& block, const Grid& grid, std::uint8_t* cells, std::uint32_t first,
          std::span<const std::uint8_t* const> rows);
void unpack(const Block& block, const Grid& grid, const std::uint8_t* cells, std::uint32_t first,
            std::span<std::uint8_t* const> rows);

}  // namespace baton::layout
