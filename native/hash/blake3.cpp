#include "hash/blake3.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace baton {
namespace {

using Words = std::array<std::uint32_t, 8>;
using State = std::array<std::uint32_t, 16>;

constexpr std::size_t kBlockBytes = 64;
constexpr std::size_t kChunkBytes = 1024;

constexpr std::uint32_t kChunkStart = 1, kChunkEnd = 2, kParent = 4, kRoot = 8, kKeyed = 16;

constexpr Words kInitial = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                            0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

constexpr std::array<std::uint8_t, 16> kPermutation = {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8};

std::uint32_t load32(const std::uint8_t* at) {
  return std::uint32_t{at[0]} | std::uint32_t{at[1]} << 8 | std::uint32_t{at[2]} << 16 | std::uint32_t{at[3]} << 24;
}

void mix(State& v, int a, int b, int c, int d, std::uint32_t x, std::uint32_t y) {
  v[a] += v[b] + x;
  v[d] = std::rotr(v[d] ^ v[a], 16);
  v[c] += v[d];
  v[b] = std::rotr(v[b] ^ v[c], 12);
  v[a] += v[b] + y;
  v[d] = std::rotr(v[d] ^ v[a], 8);
  v[c] += v[d];
  v[b] = std::rotr(v[b] ^ v[c], 7);
}

void round(State& v, const State& m) {
  mix(v, 0, 4, 8, 12, m[0], m[1]);
  mix(v, 1, 5, 9, 13, m[2], m[3]);
  mix(v, 2, 6, 10, 14, m[4], m[5]);
  mix(v, 3, 7, 11, 15, m[6], m[7]);
  mix(v, 0, 5, 10, 15, m[8], m[9]);
  mix(v, 1, 6, 11, 12, m[10], m[11]);
  mix(v, 2, 7, 8, 13, m[12], m[13]);
  mix(v, 3, 4, 9, 14, m[14], m[15]);
}

Words compress(const Words& chaining_value, const State& block, std::uint64_t counter, std::uint32_t block_bytes,
               std::uint32_t flags) {
  State v = {chaining_value[0],
             chaining_value[1],
             chaining_value[2],
             chaining_value[3],
             chaining_value[4],
             chaining_value[5],
             chaining_value[6],
             chaining_value[7],
             kInitial[0],
             kInitial[1],
             kInitial[2],
             kInitial[3],
             static_cast<std::uint32_t>(counter),
             static_cast<std::uint32_t>(counter >> 32),
             block_bytes,
             flags};
  State m = block;
  for (int i = 0; i < 7; ++i) {
    round(v, m);
    if (i < 6) {
      State permuted;
      for (std::size_t j = 0; j < 16; ++j) permuted[j] = m[kPermutation[j]];
      m = permuted;
    }
  }
  Words out;
  for (std::size_t i = 0; i < 8; ++i) out[i] = v[i] ^ v[i + 8];
  return out;
}

State words_of(const std::uint8_t* block) {
  State words;
  for (std::size_t i = 0; i < 16; ++i) words[i] = load32(block + 4 * i);
  return words;
}

State words_of(const Words& left, const Words& right) {
  State words;
  std::copy(left.begin(), left.end(), words.begin());
  std::copy(right.begin(), right.end(), words.begin() + 8);
  return words;
}

Words words_of(const Digest& key) {
  Words words;
  for (std::size_t i = 0; i < 8; ++i) words[i] = load32(key.data() + 4 * i);
  return words;
}

}  // namespace

Blake3::Blake3() : Blake3(kInitial, 0) {}
Blake3::Blake3(const Digest& key) : Blake3(words_of(key), kKeyed) {}
Blake3::Blake3(const Words& key, std::uint32_t flags) : key_(key), flags_(flags) {
  chunk_.chaining_value = key_;
}

std::uint32_t Blake3::start_flag() const {
  return chunk_.blocks_compressed == 0 ? kChunkStart : 0;
}

Blake3& Blake3::add(Bytes input) {
  while (!input.empty()) {
    // A full chunk is only closed once more input follows: the last one may be the root.
    if (chunk_.size() == kChunkBytes) finish_chunk();
    const auto take = std::min(input.size(), kChunkBytes - chunk_.size());
    add_to_chunk(input.first(take));
    input = input.subspan(take);
  }
  return *this;
}

void Blake3::add_to_chunk(Bytes input) {
  while (!input.empty()) {
    if (chunk_.block_bytes == kBlockBytes) {
      chunk_.chaining_value = compress(chunk_.chaining_value, words_of(chunk_.block.data()), chunk_.counter,
                                       kBlockBytes, flags_ | start_flag());
      ++chunk_.blocks_compressed;
      chunk_.block.fill(0);
      chunk_.block_bytes = 0;
    }
    const auto take = std::min(input.size(), kBlockBytes - chunk_.block_bytes);
    std::memcpy(chunk_.block.data() + chunk_.block_bytes, input.data(), take);
    chunk_.block_bytes = static_cast<std::uint8_t>(chunk_.block_bytes + take);
    input = input.subspan(take);
  }
}

void Blake3::finish_chunk() {
  Words value = compress(chunk_.chaining_value, words_of(chunk_.block.data()), chunk_.counter, chunk_.block_bytes,
                         flags_ | start_flag() | kChunkEnd);
  // Each trailing zero bit of the new count completes one more subtree, as in a binary counter.
  const std::uint64_t chunks = chunk_.counter + 1;
  for (std::uint64_t rest = chunks; (rest & 1) == 0; rest >>= 1) {
    value = compress(key_, words_of(subtrees_.back(), value), 0, kBlockBytes, flags_ | kParent);
    subtrees_.pop_back();
  }
  subtrees_.push_back(value);
  chunk_ = Chunk{.chaining_value = key_, .counter = chunks};
}

Digest Blake3::digest() const {
  const bool only_chunk = subtrees_.empty();
  Words value = compress(chunk_.chaining_value, words_of(chunk_.block.data()), chunk_.counter, chunk_.block_bytes,
                         flags_ | start_flag() | kChunkEnd | (only_chunk ? kRoot : 0));
  for (std::size_t i = subtrees_.size(); i-- > 0;) {
    value = compress(key_, words_of(subtrees_[i], value), 0, kBlockBytes, flags_ | kParent | (i == 0 ? kRoot : 0));
  }
  Digest out;
  for (std::size_t i = 0; i < 8; ++i) {
    for (std::size_t j = 0; j < 4; ++j) out[4 * i + j] = static_cast<std::uint8_t>(value[i] >> (8 * j));
  }
  return out;
}

Digest blake3(Bytes input) {
  return Blake3().add(input).digest();
}
Digest blake3_keyed(const Digest& key, Bytes input) {
  return Blake3(key).add(input).digest();
}

}  // namespace baton
