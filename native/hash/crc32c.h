// CRC-32C (Castagnoli), as in iSCSI and SSE4.2. The instruction is used where the processor has it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace baton {

// Extends `crc` (0 at the start) over `size` bytes.
[[nodiscard]] std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size);

// The same from tables, without the instruction: the reference in tests.
[[nodiscard]] std::uint32_t crc32c_portable(std::uint32_t crc, const void* data, std::size_t size);

}  // namespace baton
