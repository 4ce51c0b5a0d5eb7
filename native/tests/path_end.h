// One end of a connection's data path without an agent: a pool in a region, and a stream that goes nowhere.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <cstring>
#include <string>

#include "tests/fake_adapters.h"
#include "transfer/region.h"
#include "transfer/tcp.h"

namespace baton::tests {

struct PathEnd {
  static constexpr std::uint32_t kLayers = 2, kBlocks = 16;
  static constexpr std::uint64_t kBlockBytes = 96, kChunkBytes = 4 * kBlockBytes;

  explicit PathEnd(std::uint64_t stride_bytes = kBlockBytes, const std::string& verbs_devices = "fake_0")
      : region(transfer::Region::create(kLayers * kBlocks * stride_bytes)),
        pool{.block_bytes = kBlockBytes, .stride_bytes = stride_bytes, .blocks = kBlocks, .region = region} {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      pool.layers.push_back(region->data() + layer * kBlocks * stride_bytes);
    }
    transfer::kVerbs.prepare({.verbs_library = FAKE_VERBS, .verbs_devices = verbs_devices}, pool, fabrics);
  }
  transfer::Site site() { return {1, stream, pool, kChunkBytes, happened, fabrics}; }

  std::shared_ptr<transfer::Region> region;
  transfer::Pool pool;
  std::vector<transfer::Event> happened;
  transfer::Fabrics fabrics;
  transfer::Stream stream{::socket(AF_UNIX, SOCK_STREAM, 0), 1, happened};
};

// Works until `done`, as an agent's thread does; false: the path is broken, or nothing happens any more.
template <class Done>
bool work(transfer::DataPath& path, const Done& done) {
  while (!done()) {
    const auto turn = path.advance();
    if (turn == transfer::DataPath::Turn::broken) return false;
    if (turn == transfer::DataPath::Turn::more || done()) continue;
    pollfd waiting{path.fd(), POLLIN, 0};
    if (path.fd() < 0 || ::poll(&waiting, 1, 1000) != 1) return false;
  }
  return true;
}

inline transfer::Blob proof_of(transfer::DataPath& path) {
  std::optional<transfer::Blob> proof;
  return work(path, [&] { return (proof = path.proof()).has_value(); }) ? *proof : transfer::Blob{};
}

}  // namespace baton::tests
