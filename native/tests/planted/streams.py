"""Connections and sums."""

# The texts are lines as they stand in the sources.
from __future__ import annotations

from planted import Mutation

MUTATIONS = [
    Mutation(
        "a frame may have any length",
        "transfer/tcp.cpp",
        "    if (length == 0 || length > kFrameBytesMax) return fail(",
        "    if (length == 0) return fail(",
        "streams",
    ),
    Mutation(
        "a frame may be empty",
        "transfer/tcp.cpp",
        "    if (length == 0 || length > kFrameBytesMax) return fail(",
        "    if (length > kFrameBytesMax) return fail(",
        "streams",
    ),
    Mutation(
        "a frame that has not come whole is taken",
        "transfer/tcp.cpp",
        "    if (buffer_end_ - buffer_begin_ < kLengthBytes + length) return true;\n",
        "",
        "streams",
    ),
    Mutation(
        "a payload may have any length",
        "transfer/tcp.cpp",
        " || data->bytes > payload_bytes_max_) {",
        ") {",
        "streams",
    ),
    Mutation(
        "a payload may be empty",
        "transfer/tcp.cpp",
        "    if (!data || data->bytes == 0 ||",
        "    if (!data ||",
        "streams",
    ),
    Mutation(
        "a payload may be placed twice",
        "transfer/tcp.cpp",
        "  if (!arriving_ || arriving_->decided || chunk.slot >= 0) return false;",
        "  if (!arriving_ || chunk.slot >= 0) return false;",
        "streams",
    ),
    Mutation(
        "a stopped payload is written on",
        "transfer/tcp.cpp",
        "  arriving_->pieces.clear();\n  arriving_->rest.clear();\n",
        "",
        "streams",
    ),
    Mutation(
        "a payload is sent within another frame",
        "transfer/tcp.cpp",
        "    for (std::size_t i = 0; !on_the_way && i < control_.size()",
        "    for (std::size_t i = 0; i < control_.size()",
        "streams",
    ),
    Mutation(
        "a payload that is on its way is forgotten",
        "transfer/tcp.cpp",
        " && !payload.on_the_way(); });",
        "; });",
        "streams",
    ),
    Mutation(
        "a payload is served before it was sent",
        "transfer/tcp.cpp",
        "  if (payload.piece < payload.pieces.size()) return;\n",
        "",
        "streams",
    ),
    Mutation(
        "a payload is placed before it came whole",
        "transfer/tcp.cpp",
        "  if (payload.left_bytes > 0) return;\n",
        "",
        "streams",
    ),
    Mutation(
        "bytes behind a payload are taken for it",
        "transfer/tcp.cpp",
        "std::min<std::size_t>(buffer_end_ - buffer_begin_, arriving_->left_bytes);",
        "buffer_end_ - buffer_begin_;",
        "streams",
    ),
    Mutation(
        "a payload's sum is not taken where it arrives",
        "transfer/tcp.cpp",
        "    const std::uint32_t crc = checksum_ ? checksum_of(payload.pieces) : 0;",
        "    const std::uint32_t crc = 0;",
        "streams",
    ),
    Mutation(
        "frames for a peer that does not read are kept without end",
        "transfer/tcp.cpp",
        '  if (control_bytes_ > kControlBytesMax) return fail("the peer does not read what it is sent");\n',
        "",
        "streams",
    ),
    Mutation(
        "lanes are joined without a shift",
        "hash/crc32c.cpp",
        "first = shift(kShift, shift(kShift, first) ^ second) ^ third;",
        "first = shift(kShift, first ^ second) ^ third;",
        "crc32c",
    ),
    Mutation(
        "a lane is left out",
        "hash/crc32c.cpp",
        "shift(kShift, first) ^ second) ^ third;",
        "shift(kShift, first) ^ second);",
        "crc32c",
    ),
    Mutation(
        "the last bytes are not summed",
        "hash/crc32c.cpp",
        "    if constexpr (kSum) rest = _mm_crc32_u8(rest, byte);",
        "    if constexpr (kSum) rest = rest + 0 * byte;",
        "crc32c",
    ),
    Mutation(
        "the last bytes are not copied",
        "hash/crc32c.cpp",
        "    if constexpr (kCopy) to[at] = byte;\n",
        "",
        "copies",
    ),
    Mutation(
        "the tables sum seven bytes of eight",
        "hash/crc32c.cpp",
        "kTables[1][at[6]] ^ kTables[0][at[7]];",
        "kTables[1][at[6]];",
        "crc32c",
    ),
]
