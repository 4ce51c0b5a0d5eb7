// Injected faults, for tests and benchmarks; the names are those of baton.transfer.TransferFaults.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace baton::transfer {

// The damage to a chunk's bytes.
enum class Corruption : std::uint8_t { none, flip, zero, shift };
inline constexpr std::uint8_t kCorruptions = 4;

struct Faults {
  double delay_s = 0;
  std::uint32_t corrupt_every = 0;
  Corruption corruption = Corruption::flip;
  bool before_checksum = false;
  bool silent = false;  // Sink: sends no keep-alives.
};

inline void corrupt(std::span<std::uint8_t> bytes, Corruption corruption) {
  constexpr std::size_t kShift = 64;  // A multiple of the size of every number format.
  const auto middle = bytes.begin() + static_cast<std::ptrdiff_t>(bytes.size() / 2);
  switch (corruption) {
    case Corruption::none:
      return;
    case Corruption::flip:
      *middle ^= 0x10;
      return;
    case Corruption::zero:
      std::fill(bytes.begin(), bytes.end(), std::uint8_t{0});
      return;
    case Corruption::shift:
      std::rotate(bytes.begin(), bytes.size() > kShift ? bytes.begin() + kShift : middle, bytes.end());
  }
}

}  // namespace baton::transfer
