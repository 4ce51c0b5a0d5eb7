#include "hash/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace baton {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // Reflected.

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][b] is the effect of byte b when k more bytes follow it, so eight bytes fold in one step.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t crc = tables[k - 1][byte];
      tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

#if defined(__x86_64__)

// The instruction takes one step per cycle but has a latency of three, so three independent lanes run at once.
// Their results are joined by `shift`, which says what a lane's CRC becomes when a lane of zeros follows.
constexpr std::size_t kLaneBytes = 2048;

using ShiftTables = std::array<std::array<std::uint32_t, 256>, 4>;

constexpr std::uint32_t append_zero_byte(std::uint32_t crc) {
  return (crc >> 8) ^ kTables[0][crc & 0xFF];
}

ShiftTables make_shift_tables() {
  // CRC over zeros is linear in the CRC before: shifting each bit alone gives the shift of every value.
  std::array<std::uint32_t, 32> of_bit{};
  for (std::size_t bit = 0; bit < 32; ++bit) {
    std::uint32_t crc = std::uint32_t{1} << bit;
    for (std::size_t i = 0; i < kLaneBytes; ++i) crc = append_zero_byte(crc);
    of_bit[bit] = crc;
  }
  ShiftTables tables{};
  for (std::size_t part = 0; part < 4; ++part) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      for (std::size_t bit = 0; bit < 8; ++bit) {
        if ((byte >> bit & 1) != 0) tables[part][byte] ^= of_bit[8 * part + bit];
      }
    }
  }
  return tables;
}

std::uint32_t shift(const ShiftTables& tables, std::uint64_t crc) {
  return tables[0][crc & 0xFF] ^ tables[1][crc >> 8 & 0xFF] ^ tables[2][crc >> 16 & 0xFF] ^ tables[3][crc >> 24 & 0xFF];
}

std::uint64_t load64(const unsigned char* at) {
  std::uint64_t value = 0;
  std::memcpy(&value, at, sizeof value);
  return value;
}

__attribute__((target("sse4.2"))) std::uint32_t crc32c_sse42(std::uint32_t crc, const unsigned char* at,
                                                             std::size_t size) {
  static const ShiftTables kShift = make_shift_tables();
  std::uint64_t first = static_cast<std::uint32_t>(~crc);
  while (size >= 3 * kLaneBytes) {
    std::uint64_t second = 0, third = 0;
    for (std::size_t i = 0; i < kLaneBytes; i += 8) {
      first = _mm_crc32_u64(first, load64(at + i));
      second = _mm_crc32_u64(second, load64(at + kLaneBytes + i));
      third = _mm_crc32_u64(third, load64(at + 2 * kLaneBytes + i));
    }
    first = shift(kShift, shift(kShift, first) ^ second) ^ third;
    at += 3 * kLaneBytes;
    size -= 3 * kLaneBytes;
  }
  for (; size >= 8; at += 8, size -= 8) first = _mm_crc32_u64(first, load64(at));
  auto rest = static_cast<std::uint32_t>(first);
  for (; size > 0; ++at, --size) rest = _mm_crc32_u8(rest, *at);
  return ~rest;
}

#endif

}  // namespace

std::uint32_t crc32c_portable(std::uint32_t crc, const void* data, std::size_t size) {
  const auto* at = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; size >= 8; at += 8, size -= 8) {
    const std::uint32_t low = crc ^ (at[0] | at[1] << 8 | at[2] << 16 | static_cast<std::uint32_t>(at[3]) << 24);
    crc = kTables[7][low & 0xFF] ^ kTables[6][low >> 8 & 0xFF] ^ kTables[5][low >> 16 & 0xFF] ^ kTables[4][low >> 24] ^
          kTables[3][at[4]] ^ kTables[2][at[5]] ^ kTables[1][at[6]] ^ kTables[0][at[7]];
  }
  for (; size > 0; ++at, --size) crc = (crc >> 8) ^ kTables[0][(crc ^ *at) & 0xFF];
  return ~crc;
}

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
  if (has_instruction) return crc32c_sse42(crc, static_cast<const unsigned char*>(data), size);
#endif
  return crc32c_portable(crc, data, size);
}

}  // namespace baton
