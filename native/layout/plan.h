// The planner: the destination of each token, the source rank of each head, and the refusal of incompatible layouts.
//
// Positions are tokens of a sequence. A Table maps a sequence's tokens to blocks on one side:
//
//   blocks = 7 3 4, origin = 32, 16 tokens per block:    token 32…47 in block 7, 48…63 in block 3, 64…79 in block 4
//
// Everything here is a pure function of values: it touches no memory and knows no address.
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

// Tokens that move in order from one place to another. At a block's end a side continues in its next-numbered block.
struct Move {
  std::uint32_t source_block = 0;
  std::uint32_t source_token = 0;  // Position in the block.
  std::uint32_t sink_block = 0;
  std::uint32_t sink_token = 0;
  std::uint32_t tokens = 0;
  bool whole = false;  // Complete, equal blocks: bytes are copied unchanged, all heads and planes at once.

  bool operator==(const Move&) const = default;
};

// A piece of a layer in wire form.
struct Chunk {
  std::uint32_t layer = 0;
  Plane plane{};
  Tokens tokens;
  Heads heads;
};

// The request of a sink's rank to one of the source's ranks.
struct Share {
  std::uint32_t source_rank = 0;
  Heads heads;
};

// Throws Mismatch, naming both, unless every token of one layout can be stored in the other. Ranks may differ.
void check_convertible(const Layout& source, const Layout& sink);

// Whether blocks can be moved whole between these two ranks.
[[nodiscard]] bool identical(const Layout& source, const Layout& sink);

// The ranks of the source from which `sink` gets its heads, each head once. `source` may name any of them.
[[nodiscard]] std::vector<Share> shares(const Layout& source, const Layout& sink);

// Heads that both ranks hold; throws Mismatch if there are none.
[[nodiscard]] Heads common_heads(const Layout& source, const Layout& sink);

// Throws Invalid for a range that a table does not cover.
void check_range(Tokens range, const Table& table, std::uint32_t block_tokens);

[[nodiscard]] std::vector<Move> plan(const Block& source, const Table& source_table, const Block& sink,
                                     const Table& sink_table, Tokens range);

// A layer's tokens and heads, cut into pieces of at most `bytes_max`, at ends of the sink's blocks if possible.
[[nodiscard]] std::vector<Chunk> chunks(const Layout& sink, std::uint32_t layer, Heads heads, Tokens range,
                                        std::uint64_t bytes_max);

// Size of a chunk in wire form; throws Invalid if `layout`'s rank has no such piece.
[[nodiscard]] std::uint64_t chunk_bytes(const Layout& layout, const Chunk& chunk);

}  // namespace baton::layout
