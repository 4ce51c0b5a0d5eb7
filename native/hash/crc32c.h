// CRC-32C (Castagnoli), as in iSCSI and SSE4.2, alone or fused with a copy. The instruction is used where the
// processor has it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace baton {

// Extends `crc` (0 at the start) over `size` bytes.
[[nodiscard]] std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size);

// Copies, and extends `crc` over the bytes written. Each byte is read once, so the sum matches the copy even while
// another process writes the source.
[[nodiscard]] std::uint32_t crc32c_copy(std::uint32_t crc, void* to, const void* from, std::size_t size);

// Copies uncached memory. Reading several pages in turn keeps more loads in flight than memcpy does.
void copy_uncached(void* to, const void* from, std::size_t size);

// The same as crc32c, by tables instead of the instruction: the reference in tests.
[[nodiscard]] std::uint32_t crc32c_portable(std::uint32_t crc, const void* data, std::size_t size);

}  // namespace baton
