#include "hash/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
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
// Their results are joined by `shift`, which says what a lane's CRC becomes when a lane of zeros follows. A lane is a
// page, because the processor fetches ahead within each of several pages, and nothing across the end of one.
constexpr std::size_t kLaneBytes = 4096;
constexpr std::size_t kLineBytes = 64;

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

// One cache line of one lane, each byte loaded once: the sum is of what is stored.
template <bool kCopy, bool kSum>
__attribute__((target("avx2,sse4.2"), always_inline)) inline void line(std::uint64_t& crc, unsigned char* to,
                                                                       const unsigned char* from) {
  for (std::size_t i = 0; i < kLineBytes; i += sizeof(__m256i)) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    if constexpr (kCopy) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), bytes);
    if constexpr (kSum) {
      crc = _mm_crc32_u64(crc, static_cast<std::uint64_t>(_mm256_extract_epi64(bytes, 0)));
      crc = _mm_crc32_u64(crc, static_cast<std::uint64_t>(_mm256_extract_epi64(bytes, 1)));
      crc = _mm_crc32_u64(crc, static_cast<std::uint64_t>(_mm256_extract_epi64(bytes, 2)));
      crc = _mm_crc32_u64(crc, static_cast<std::uint64_t>(_mm256_extract_epi64(bytes, 3)));
    }
  }
}

template <bool kCopy, bool kSum>
__attribute__((target("avx2,sse4.2"))) std::uint32_t run_lanes(std::uint32_t crc, unsigned char* to,
                                                               const unsigned char* from, std::size_t size) {
  static const ShiftTables kShift = make_shift_tables();
  std::uint64_t first = static_cast<std::uint32_t>(~crc);
  std::size_t at = 0;
  for (; size - at >= 3 * kLaneBytes; at += 3 * kLaneBytes) {
    std::uint64_t second = 0, third = 0;
    for (std::size_t i = at; i < at + kLaneBytes; i += kLineBytes) {
      line<kCopy, kSum>(first, to + i, from + i);
      line<kCopy, kSum>(second, to + i + kLaneBytes, from + i + kLaneBytes);
      line<kCopy, kSum>(third, to + i + 2 * kLaneBytes, from + i + 2 * kLaneBytes);
    }
    if constexpr (kSum) first = shift(kShift, shift(kShift, first) ^ second) ^ third;
  }
  for (; size - at >= kLineBytes; at += kLineBytes) line<kCopy, kSum>(first, to + at, from + at);
  auto rest = static_cast<std::uint32_t>(first);
  for (; at < size; ++at) {
    const unsigned char byte = from[at];
    if constexpr (kCopy) to[at] = byte;
    if constexpr (kSum) rest = _mm_crc32_u8(rest, byte);
  }
  return ~rest;
}

bool has_lanes() {
  static const bool has = __builtin_cpu_supports("sse4.2") != 0 && __builtin_cpu_supports("avx2") != 0;
  return has;
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
  if (has_lanes()) return run_lanes<false, true>(crc, nullptr, static_cast<const unsigned char*>(data), size);
#endif
  return crc32c_portable(crc, data, size);
}

std::uint32_t crc32c_copy(std::uint32_t crc, void* to, const void* from, std::size_t size) {
#if defined(__x86_64__)
  if (has_lanes()) {
    return run_lanes<true, true>(crc, static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), size);
  }
#endif
  std::memcpy(to, from, size);
  return crc32c_portable(crc, to, size);
}

void copy_uncached(void* to, const void* from, std::size_t size) {
#if defined(__x86_64__)
  if (has_lanes()) {
    run_lanes<true, false>(0, static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), size);
    return;
  }
#endif
  std::memcpy(to, from, size);
}

}  // namespace baton
