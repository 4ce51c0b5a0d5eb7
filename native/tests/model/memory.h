// The simulated memory of one incarnation of an agent: blocks of stamped cells, and who may write which.
//
// A cell stands for the KV of one token in one layer. Its stamp names them and the life of the lease: a lease
// that is revoked and opened again, or a key that is used again, has another. Blocks that are given back lose their
// content at once, so that a late read gets something that no pull may ever take for its own.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "transfer/types.h"

namespace baton::model {

using transfer::Key;

inline constexpr std::uint32_t kLayers = 3, kBlocks = 64, kBlockTokens = 4;

// An error that the code under test must never cause.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void require(bool good, const std::string& what) {
  if (!good) throw Violation(what);
}

// SplitMix64: equal seeds, equal choices, on every platform.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }
  std::uint32_t below(std::size_t bound) { return static_cast<std::uint32_t>(next() % bound); }
  bool chance(double probability) { return static_cast<double>(next() >> 11) * 0x1p-53 < probability; }
  template <class T>
  auto& pick(T& choices) {
    return choices[below(std::size(choices))];
  }

 private:
  std::uint64_t state_;
};

struct Cell {
  std::uint32_t life = 0;      // 0: nothing that may be used.
  std::uint16_t position = 0;  // Position of the block in the lease.
  std::uint8_t layer = 0;
  std::uint8_t token = 0;
  bool operator==(const Cell&) const = default;
};
inline constexpr std::uint64_t kBlockBytes = kBlockTokens * sizeof(Cell);

// Not the product's checksum: a mistake there cannot hide here.
inline std::uint32_t sum(std::uint32_t so_far, const Cell& cell) {
  for (const std::uint32_t part : {cell.life, std::uint32_t{cell.position} << 16 | cell.layer << 8 | cell.token}) {
    so_far = (so_far ^ part) * 0x01000193 + 0x9E3779B9;
  }
  return so_far;
}

enum class Use : std::uint8_t { nothing, lease, pull };

struct Block {
  Use use = Use::nothing;
  Key key{};
  std::array<std::array<Cell, kBlockTokens>, kLayers> layers{};
};

class Memory {
 public:
  [[nodiscard]] Block& at(std::uint32_t block) { return blocks_.at(block); }
  [[nodiscard]] Cell& cell(std::uint32_t layer, std::uint32_t block, std::size_t token) {
    return blocks_.at(block).layers.at(layer).at(token);
  }
  // Scattered and in any order, as an engine's allocator hands them out; nothing where too few are left.
  [[nodiscard]] std::optional<std::vector<std::uint32_t>> take(std::uint32_t count, Use use, const Key& key,
                                                               Random& random) {
    if (count > free_) return std::nullopt;
    std::vector<std::uint32_t> taken;
    for (auto block = random.below(kBlocks); taken.size() < count; block = (block + random.below(7)) % kBlocks) {
      if (blocks_[block].use != Use::nothing) continue;
      blocks_[block] = {.use = use, .key = key};
      taken.push_back(block);
    }
    free_ -= count;
    return taken;
  }
  void give_back(std::vector<std::uint32_t>& blocks) {
    for (const std::uint32_t block : blocks) blocks_[block] = {};
    free_ += static_cast<std::uint32_t>(blocks.size());
    blocks.clear();
  }
  [[nodiscard]] std::uint32_t free() const { return free_; }

 private:
  std::vector<Block> blocks_{kBlocks};
  std::uint32_t free_ = kBlocks;
};

}  // namespace baton::model
