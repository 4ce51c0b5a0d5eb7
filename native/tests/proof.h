// Proof that a peer knows the secret, as transfer/handshake.h draws it, implemented a second time: for tests
// that take the place of a peer.
#pragma once

#include <string_view>

#include "hash/blake3.h"
#include "transfer/wire.h"

namespace baton::tests {

inline Bytes bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

inline Digest proof(const char* side, const Digest& of_sink, const Digest& of_source,
                    transfer::frames::Identity identity, const char* secret = "shared") {
  transfer::Blob said;
  transfer::Writer writer(said);
  std::apply([&](auto&... field) { (writer.put(field), ...); }, identity.fields());
  const Digest key = Blake3().add(bytes_of("baton/agent/1")).add(bytes_of(secret)).digest();
  return Blake3(key).add(bytes_of(side)).add(of_sink).add(of_source).add(said).digest();
}

}  // namespace baton::tests
