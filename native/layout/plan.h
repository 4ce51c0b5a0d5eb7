// The planner: which tokens of which blocks go where, who is asked for which heads, and what cannot go at all.
//
// Positions are tokens of a sequence. A Table says where a sequence's tokens lie on one side:
//
//   blocks = 7 3 4, origin = 32, 16 tokens per block:    token 32…47 in block 7, 48…63 in block 3, 64…79 in block 4
//
// Everything here is a function of values: no memory is touched, no address is known.
#pragma once

#include <vector>

#include "layout/grid.h"

namespace baton::layout {

struct Tokens {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};

struct Table {
  std::span<const std::uint32_t> blocks;
  std::uint32_t origin = 0;  // Position of the first token of blocks[0].
};

// Tokens that go from one place to another in order. Where a side's block ends, its next block by number follows.
struct Move {
  std::uint32_t source_block = 0;
  std::uint32_t source_token = 0;  // Within the block.
  std::uint32_t sink_block = 0;
  std::uint32_t sink_token = 0;
  std::uint32_t tokens = 0;
  bool whole = false;  // Equal blocks from end to end: bytes are copied as they are, all heads and planes at once.

  bool operator==(const Move&) const = default;
};

// A piece of a layer in wire form.
struct Chunk {
  std::uint32_t layer = 0;
  Plane plane{};
  Tokens tokens;
  Heads heads;
};

// What a sink's rank asks of one of the source's.
struct Share {
  std::uint32_t source_rank = 0;
  Heads heads;
};

// Throws Mismatch, naming both, unless every token of one layout can be stored in the other. Ranks may differ.
void check_convertible(const Layout& source, const Layout& sink);

// Whether blocks can be moved whole between these two ranks.
[[nodiscard]] bool identical(const Layout& source, const Layout& sink);

// Which of the source's ranks give `sink` its heads, each head once. `source` may name any of them.
[[nodiscard]] std::vector<Share> shares(const Layout& source, const Layout& sink);

// Heads that both ranks hold; throws Mismatch where there are none.
[[nodiscard]] Heads common_heads(const Layout& source, const Layout& sink);

// Throws Invalid for a range that a table does not cover.
void check_range(Tokens range, const Table& table, std::uint32_t block_tokens);

[[nodiscard]] std::vector<Move> plan(const Block& source, const Table& source_table, const Block& sink,
                                     const Table& sink_table, Tokens range);

// A layer's tokens and heads cut into pieces of at most `bytes_max`, at ends of the sink's blocks where that is
// possible.
[[nodiscard]] std::vector<Chunk> chunks(const Layout& sink, std::uint32_t layer, Heads heads, Tokens range,
                                        std::uint64_t bytes_max);

// Size of a chunk in wire form; throws Invalid where `layout`'s rank has no such piece.
[[nodiscard]] std::uint64_t chunk_bytes(const Layout& layout, const Chunk& chunk);

}  // namespace baton::layout
