// Block ids as stored in a batch: 16 bytes each, consecutive, at any alignment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace baton::radix {

struct Id {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  bool operator==(const Id&) const = default;
};
inline constexpr std::size_t kIdBytes = sizeof(Id);
static_assert(kIdBytes == 16);

// A view: the caller keeps the bytes alive during the call.
class Ids {
 public:
  Ids() = default;
  Ids(const void* data, std::size_t count) : data_(static_cast<const unsigned char*>(data)), count_(count) {}

  std::size_t size() const { return count_; }
  bool empty() const { return count_ == 0; }
  const void* data() const { return data_; }
  Id operator[](std::size_t at) const {
    Id id;
    std::memcpy(&id, data_ + at * kIdBytes, kIdBytes);
    return id;
  }
  Ids subspan(std::size_t at, std::size_t count) const { return {data_ + at * kIdBytes, count}; }
  Ids subspan(std::size_t at) const { return subspan(at, count_ - at); }

 private:
  const unsigned char* data_ = nullptr;
  std::size_t count_ = 0;
};

// Ids are digests already; the multiplication only spreads made-up ids that share their low bits.
inline std::uint32_t hash_of(const Id& id) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(id.low ^ 0x9e3779b97f4a7c15u) * (id.high ^ 0xd1b54a32d192ed03u);
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64)) >>
                                    32);
}

// Returns the number of equal leading ids, `count` at most.
inline std::size_t common_ids(const Id* mine, Ids theirs, std::size_t count) {
  constexpr std::size_t kStep = 16;
  std::size_t at = 0;
  const auto* bytes = static_cast<const unsigned char*>(theirs.data());
  while (at + kStep <= count && std::memcmp(mine + at, bytes + at * kIdBytes, kStep * kIdBytes) == 0) at += kStep;
  while (at < count && mine[at] == theirs[at]) ++at;
  return at;
}

// Returns how many ids of `theirs` equal `mine`, the id before it, the id before that, and so on; `count` at most.
inline std::size_t common_ids_backwards(const Id* mine, Ids theirs, std::size_t count) {
  std::size_t at = 0;
  while (at < count && *(mine - at) == theirs[at]) ++at;
  return at;
}

}  // namespace baton::radix
