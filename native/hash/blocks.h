// Ids of canonical blocks: chained keyed BLAKE3, truncated to 128 bits. The construction is drawn in baton/blocks.py.
#pragma once

#include <vector>

#include "hash/blake3.h"

namespace baton {

inline constexpr std::size_t kBlockIdBytes = 16;
inline constexpr std::size_t kTokenBytes = 4;

// Returns one id per full block, concatenated. `parent` is the id of the block before the first, or empty.
// Throws std::invalid_argument when `parent` is neither empty nor an id, or `packed_tokens` is cut within a token.
[[nodiscard]] std::vector<std::uint8_t> hash_blocks(const Digest& root, Bytes packed_tokens, std::size_t block_tokens,
                                                    Bytes parent);

}  // namespace baton
