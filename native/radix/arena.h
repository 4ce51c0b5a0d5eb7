// Slots for blocks: a block's id and the node that it is in. A run of blocks lies in consecutive slots and never moves,
// so a node is a stretch of slots, and a split moves nothing.
//
//   chunk     │ a b c d e f · · · · · · g h · · · · · · · · · · · · · · · · │   kChunkSlots slots
//   owner     │ 5 5 5 5 5 5 F         F 7 7 F                             F │   F: ends of a free stretch
//   free            lists per power of two of the length, linked through the ids of the first free slot
//
// Adjacent free stretches are merged. A chunk that is entirely free is returned to the system.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "radix/ids.h"
#include "radix/table.h"

namespace baton::radix {

class Arena {
 public:
  static constexpr std::uint32_t kChunkBits = 14, kChunkSlots = 1u << kChunkBits;
  static constexpr std::uint32_t kSlotsMax = 0xffff0000;

  Arena();

  Id& id(std::uint32_t slot) { return chunk(slot).ids[slot % kChunkSlots]; }
  const Id& id(std::uint32_t slot) const { return chunk(slot).ids[slot % kChunkSlots]; }
  std::uint32_t& owner(std::uint32_t slot) { return chunk(slot).owners[slot % kChunkSlots]; }
  std::uint32_t owner(std::uint32_t slot) const { return chunk(slot).owners[slot % kChunkSlots]; }
  void set_owner(std::uint32_t first, std::uint32_t count, std::uint32_t node);

  // Returns the first of `count` consecutive slots; `count` is at most kChunkSlots.
  std::uint32_t take(std::uint32_t count);
  // Takes the free slots from `first` on, `count` at most, and returns their number.
  std::uint32_t extend(std::uint32_t first, std::uint32_t count);
  void give(std::uint32_t first, std::uint32_t count);

  // Makes room for a chunk; readers may run meanwhile.
  void prepare();
  std::size_t slots() const { return (chunks_.size() - empty_.size()) * kChunkSlots; }
  std::size_t bytes() const {
    return (chunks_.size() - empty_.size() + (spare_ ? 1 : 0)) * sizeof(Chunk) + chunks_.size() * sizeof(chunks_[0]);
  }

 private:
  static constexpr std::uint32_t kFree = kNone;
  struct Chunk {
    std::array<Id, kChunkSlots> ids;
    std::array<std::uint32_t, kChunkSlots> owners;
  };
  // Stored in the id of a free stretch's first slot; the last slot stores the length only.
  struct Stretch {
    std::uint32_t length, before, after;
  };

  Chunk& chunk(std::uint32_t slot) { return *chunks_[slot >> kChunkBits]; }
  const Chunk& chunk(std::uint32_t slot) const { return *chunks_[slot >> kChunkBits]; }
  bool is_free(std::uint32_t slot) const { return owner(slot) == kFree; }
  Stretch stretch(std::uint32_t first) const;
  void write(std::uint32_t first, Stretch stretch);
  void enlist(std::uint32_t first, std::uint32_t count);
  void delist(std::uint32_t first);
  std::uint32_t find(std::uint32_t count) const;
  std::uint32_t cut(std::uint32_t first, std::uint32_t count);
  void add_chunk();

  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::vector<std::uint32_t> empty_;  // Numbers of returned chunks.
  std::unique_ptr<Chunk> spare_;
  std::array<std::uint32_t, kChunkBits + 1> lists_;
};

}  // namespace baton::radix
