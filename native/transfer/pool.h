// The paged KV cache that an agent reads from and writes into.
//
//   layer l:  | block 0 | gap | block 1 | gap | …          block b begins at layers[l] + b * stride_bytes
//             |<------ stride ------>|
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <span>
#include <vector>

namespace baton::transfer {

struct Pool {
  std::vector<std::uint8_t*> layers;
  std::uint64_t block_bytes = 0;
  std::uint64_t stride_bytes = 0;

  // The memory of some blocks of a layer, in order; neighbours become one piece.
  [[nodiscard]] std::vector<iovec> pieces(std::uint32_t layer, std::span<const std::uint32_t> blocks) const {
    std::vector<iovec> out;
    for (const std::uint32_t block : blocks) {
      std::uint8_t* at = layers[layer] + block * stride_bytes;
      if (!out.empty() && static_cast<std::uint8_t*>(out.back().iov_base) + out.back().iov_len == at) {
        out.back().iov_len += block_bytes;
      } else {
        out.push_back({at, block_bytes});
      }
    }
    return out;
  }
};

}  // namespace baton::transfer
