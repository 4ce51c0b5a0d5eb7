#include <nanobind/nanobind.h>

#include <algorithm>
#include <stdexcept>

#include "hash/blake3.h"
#include "hash/blocks.h"
#include "hash/crc32c.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

baton::Bytes view(const nb::bytes& data) {
  return {static_cast<const std::uint8_t*>(data.data()), data.size()};
}

nb::bytes to_bytes(baton::Bytes data) {
  return nb::bytes(data.data(), data.size());
}

baton::Digest key_of(const nb::bytes& key) {
  if (key.size() != baton::kDigestBytes) throw std::invalid_argument("a key has 32 bytes");
  baton::Digest out;
  std::copy_n(view(key).begin(), baton::kDigestBytes, out.begin());
  return out;
}

}  // namespace

void bind_hash(nb::module_& m) {
  m.def(
      "blake3",
      [](const nb::bytes& data) {
        baton::Digest digest;
        {
          nb::gil_scoped_release release;
          digest = baton::blake3(view(data));
        }
        return to_bytes(digest);
      },
      "data"_a, "Return the BLAKE3 digest of `data`, 32 bytes.");
  m.def(
      "blake3_keyed",
      [](const nb::bytes& key, const nb::bytes& data) {
        const baton::Digest checked_key = key_of(key);
        baton::Digest digest;
        {
          nb::gil_scoped_release release;
          digest = baton::blake3_keyed(checked_key, view(data));
        }
        return to_bytes(digest);
      },
      "key"_a, "data"_a, "Return the keyed BLAKE3 digest of `data`, 32 bytes. `key` has 32 bytes.");
  m.def(
      "hash_blocks",
      [](const nb::bytes& root, const nb::bytes& packed_tokens, std::size_t block_tokens, const nb::bytes& parent) {
        const baton::Digest key = key_of(root);
        std::vector<std::uint8_t> ids;
        {
          nb::gil_scoped_release release;
          ids = baton::hash_blocks(key, view(packed_tokens), block_tokens, view(parent));
        }
        return to_bytes(ids);
      },
      "root"_a, "packed_tokens"_a, "block_tokens"_a, "parent"_a = nb::bytes("", 0),
      "Return the 16-byte ids of all full blocks, concatenated.");
  m.def(
      "crc32c", [](const nb::bytes& data, std::uint32_t crc) { return baton::crc32c(crc, data.data(), data.size()); },
      "data"_a, "crc"_a = 0, "Extend `crc` over `data`.");
  m.def(
      "crc32c_at",
      [](std::uintptr_t address, std::size_t size, std::uint32_t crc) {
        return baton::crc32c(crc, reinterpret_cast<const void*>(address), size);
      },
      "address"_a, "size"_a, "crc"_a = 0, nb::call_guard<nb::gil_scoped_release>(),
      "Extend `crc` over memory, without the GIL.");
  m.def(
      "crc32c_portable",
      [](const nb::bytes& data, std::uint32_t crc) { return baton::crc32c_portable(crc, data.data(), data.size()); },
      "data"_a, "crc"_a = 0, "Extend `crc` over `data` without the processor's instruction.");
}
