// CRC-32C (Castagnoli), as in iSCSI and SSE4.2, alone or fused with a copy. The instruction is used where the
// processor has it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace baton {

// Extends `crc` (0 at the start) over `size` bytes.
[[nodiscard]] std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t size);

// Copies, and extends `crc` over what was written. The bytes are read once, so what was summed is what was copied
// even while another process writes them.
[[nodiscard]] std::uint32_t crc32c_copy(std::uint32_t crc, void* to, const void* from, std::size_t size);

// Copies memory that is in no cache. Reading several pages in turn keeps more of them under way than memcpy does.
void copy_uncached(void* to, const void* from, std::size_t size);

// As crc32c, from tables, without the instruction: the reference in tests.
[[nodiscard]] std::uint32_t crc32c_portable(std::uint32_t crc, const void* data, std::size_t size);

}  // namespace baton
