// The checksum of chunks that a device moves: cheap enough to compute during the move, and independent of the order of
// its threads.
//
// CRC-32C does not suit GPUs: its steps depend on each other, and GPUs have no instruction for it. Here each 16 bytes
// give two products of 32-bit words, each word shifted by a key that depends on its position in the chunk (the NH
// construction of UMAC and XXH3); the sum is modulo 2^64, folded to 32 bits. It detects wrong and overwritten blocks
// as surely as 32 bits can; it does not protect against an attacker who chooses the bytes.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define BATON_ON_BOTH __host__ __device__
#else
#define BATON_ON_BOTH
#endif

namespace baton::gpu {

// The term of the 16 bytes at `position`, which counts units of 16 bytes in the chunk.
BATON_ON_BOTH inline std::uint64_t sum_of(std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d,
                                          std::uint64_t position) {
  const std::uint32_t key = (static_cast<std::uint32_t>(position) + 1) * 0x9E3779B1U;
  const std::uint32_t other = key ^ 0x85EBCA77U;
  return std::uint64_t{a + key} * (b + other) + std::uint64_t{c + ~key} * (d + (other << 16 | other >> 16));
}

BATON_ON_BOTH inline std::uint32_t fold(std::uint64_t sum) {
  return static_cast<std::uint32_t>(sum ^ (sum >> 32));
}

}  // namespace baton::gpu
