#include <string>

#include "hash/blake3.h"
#include "hash/blocks.h"
#include "hash/crc32c.h"
#include "tests/check.h"

namespace {

std::string hex(const baton::Digest& digest) {
  std::string text;
  for (const std::uint8_t byte : digest) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", byte);
    text += two;
  }
  return text;
}

// The input of the official test vectors: bytes 0 to 250, again and again.
std::vector<std::uint8_t> vector_input(std::size_t size) {
  std::vector<std::uint8_t> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::uint8_t>(i % 251);
  return bytes;
}

}  // namespace

TEST(blake3_of_nothing_is_the_published_value) {
  CHECK(hex(baton::blake3({})) == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262");
}

TEST(blake3_does_not_depend_on_how_input_is_cut) {
  for (const std::size_t size : {1u, 64u, 1024u, 1025u, 5000u, 31744u}) {
    const auto input = vector_input(size);
    const auto whole = baton::blake3(input);
    for (const std::size_t cut : {1u, 63u, 64u, 65u, 1023u, 1024u, 1025u}) {
      baton::Blake3 hash;
      for (std::size_t at = 0; at < size; at += cut) {
        hash.add(baton::Bytes(input).subspan(at, std::min(cut, size - at)));
      }
      CHECK(hash.digest() == whole);
    }
  }
}

TEST(crc32c_instruction_equals_tables) {
  const auto input = vector_input(20011);
  for (std::size_t begin = 0; begin < 9; ++begin) {
    for (const std::size_t size : {0u, 1u, 7u, 8u, 100u, 12287u, 12288u, 12289u, 20000u}) {
      CHECK(baton::crc32c(7, input.data() + begin, size) == baton::crc32c_portable(7, input.data() + begin, size));
    }
  }
  CHECK(baton::crc32c(0, "123456789", 9) == 0xE3069283u);
}

TEST(copies_are_whole_and_summed) {
  const auto input = vector_input(40000);
  for (const std::size_t begin : {0u, 1u, 33u}) {
    for (const std::size_t size : {0u, 1u, 63u, 64u, 65u, 4096u, 12287u, 12288u, 12289u, 24640u, 39000u}) {
      std::vector<std::uint8_t> summed(size + 2, 0xEE), plain(size + 2, 0xEE);
      const std::uint8_t* from = input.data() + begin;
      CHECK(baton::crc32c_copy(3, summed.data() + 1, from, size) == baton::crc32c_portable(3, from, size));
      baton::copy_uncached(plain.data() + 1, from, size);
      CHECK(std::equal(from, from + size, summed.begin() + 1) && summed == plain);
      CHECK(plain.front() == 0xEE && plain.back() == 0xEE);
    }
  }
}

TEST(block_ids_chain) {
  const baton::Digest root = baton::blake3({});
  const auto tokens = vector_input(96 * 4);
  const auto all = baton::hash_blocks(root, tokens, 32, {});
  CHECK(all.size() == 3 * baton::kBlockIdBytes);
  const baton::Bytes second(all.data() + 16, 16);
  const auto third = baton::hash_blocks(root, baton::Bytes(tokens).subspan(64 * 4), 32, second);
  CHECK(std::equal(third.begin(), third.end(), all.begin() + 32, all.end()));
}
