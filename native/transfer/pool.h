// The paged KV cache that an agent reads from and writes into.
//
//   tensor t: | block 0 | gap | block 1 | gap | …          block b begins at layers[t] + b * stride_bytes
//             |<------ stride ------>|
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace baton::transfer {

class Region;

struct Pool {
  std::vector<std::uint8_t*> layers;  // Indexed by tensor, see Geometry: one for a layer, or its K and then its V.
  std::uint64_t block_bytes = 0;
  std::uint64_t stride_bytes = 0;
  std::uint32_t blocks = 0;
  std::shared_ptr<Region> region;  // The region of all layers; null for memory that the agent does not own.
  int device = -1;                 // The CUDA device whose memory it is; -1: the host's.

  // Bytes from a layer's first byte to its last.
  [[nodiscard]] std::uint64_t layer_bytes() const { return (blocks - 1) * stride_bytes + block_bytes; }

  // The memory of some blocks of a layer, in order; adjacent blocks become one piece.
  [[nodiscard]] std::vector<iovec> pieces(std::uint32_t layer, std::span<const std::uint32_t> indexes) const {
    std::vector<iovec> out;
    for (const std::uint32_t block : indexes) {
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
