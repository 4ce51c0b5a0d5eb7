#include "transfer/geometry.h"

#include <stdexcept>

#include "transfer/wire.h"

namespace baton::transfer {

void check(const Geometry& geometry) {
  const auto require = [](bool good, const std::string& why) {
    if (!good) throw std::invalid_argument(why);
  };
  require(geometry.layers > 0 && geometry.tensors() < kAllLayers && geometry.layers < kAllLayers,
          "a pool has 1 to 65534 layers");
  require(geometry.blocks > 0, "a pool has at least one block");
  require(geometry.block_tokens > 0, "a block has at least one token");
  require(geometry.block_bytes > 0 && geometry.block_bytes <= std::uint64_t{64} << 20,
          "one layer's block has 1 byte to 64 MiB");
  require(geometry.fingerprint.size() <= 1024, "a fingerprint has at most 1024 bytes");
  if (!geometry.layout) return;
  const layout::Layout& layout = *geometry.layout;
  layout::check(layout);
  require(layout.layers == geometry.layers && layout.block_tokens == geometry.block_tokens &&
              layout::block_bytes(layout) == geometry.block_bytes,
          "a pool of " + std::to_string(geometry.layers) + " layers with blocks of " +
              std::to_string(geometry.block_tokens) + " tokens and " + std::to_string(geometry.block_bytes) +
              " bytes is not one of '" + layout::to_string(layout) + "'");
}

}  // namespace baton::transfer
