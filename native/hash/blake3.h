// BLAKE3: plain and keyed hashing with 32 bytes of output, in portable C++.
// Source: "BLAKE3: one function, fast everywhere", O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020, section 2.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace baton {

inline constexpr std::size_t kDigestBytes = 32;
using Digest = std::array<std::uint8_t, kDigestBytes>;
using Bytes = std::span<const std::uint8_t>;

// An incremental hash. `digest` may be called once all input has been added.
class Blake3 {
 public:
  Blake3();
  explicit Blake3(const Digest& key);

  Blake3& add(Bytes input);
  [[nodiscard]] Digest digest() const;

 private:
  using Words = std::array<std::uint32_t, 8>;

  // One 1024-byte leaf of the tree while it fills.
  struct Chunk {
    Words chaining_value;
    std::uint64_t counter = 0;
    std::array<std::uint8_t, 64> block{};
    std::uint8_t block_bytes = 0;
    std::uint8_t blocks_compressed = 0;
    [[nodiscard]] std::size_t size() const { return 64u * blocks_compressed + block_bytes; }
  };

  Blake3(const Words& key, std::uint32_t flags);
  void add_to_chunk(Bytes input);
  void finish_chunk();
  [[nodiscard]] std::uint32_t start_flag() const;

  Words key_;
  std::uint32_t flags_;
  Chunk chunk_;
  std::vector<Words> subtrees_;  // Roots of finished subtrees, largest first: one per set bit of the chunk count.
};

[[nodiscard]] Digest blake3(Bytes input);
[[nodiscard]] Digest blake3_keyed(const Digest& key, Bytes input);

}  // namespace baton
