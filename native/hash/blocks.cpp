#include "hash/blocks.h"

#include <algorithm>
#include <stdexcept>

namespace baton {

std::vector<std::uint8_t> hash_blocks(const Digest& root, Bytes packed_tokens, std::size_t block_tokens, Bytes parent) {
  if (block_tokens == 0) throw std::invalid_argument("block_tokens must be positive");
  if (packed_tokens.size() % kTokenBytes != 0) {
    throw std::invalid_argument("packed tokens must be whole little-endian uint32 values");
  }
  if (!parent.empty() && parent.size() != kBlockIdBytes) {
    throw std::invalid_argument("a parent id has 16 bytes");
  }
  const std::size_t blocks = packed_tokens.size() / kTokenBytes / block_tokens;
  const std::size_t block_bytes = block_tokens * kTokenBytes;
  std::array<std::uint8_t, kBlockIdBytes> id{};
  std::copy(parent.begin(), parent.end(), id.begin());
  std::vector<std::uint8_t> ids;
  ids.reserve(blocks * kBlockIdBytes);
  for (std::size_t i = 0; i < blocks; ++i) {
    const Digest digest = Blake3(root).add(id).add(packed_tokens.subspan(i * block_bytes, block_bytes)).digest();
    std::copy_n(digest.begin(), kBlockIdBytes, id.begin());
    ids.insert(ids.end(), id.begin(), id.end());
  }
  return ids;
}

}  // namespace baton
