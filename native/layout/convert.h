// Execution of plans: the only part of this folder that touches KV.
//
// Nothing outside the planned tokens and heads is written. Everything is checked before the first byte is. Source and
// sink must not overlap, and the caller keeps both alive and the source unchanged meanwhile.
#pragma once

#include <functional>
#include <utility>

#include "layout/plan.h"

namespace baton::layout {

// A rank's paged KV cache in this process. Block b of a tensor lies at its address + b * stride.
class Pool {
 public:
  // `tensors`: by layer; where the form is split, a layer's K and then its V. Throws Invalid.
  Pool(const Layout& layout, std::vector<std::uint8_t*> tensors, std::uint32_t blocks, std::uint64_t stride_bytes);

  [[nodiscard]] const Layout& layout() const { return layout_; }
  [[nodiscard]] const Block& block() const { return block_; }
  [[nodiscard]] std::uint32_t blocks() const { return blocks_; }
  [[nodiscard]] std::uint64_t stride_bytes() const { return stride_bytes_; }
  [[nodiscard]] std::span<std::uint8_t* const> layer(std::uint32_t layer) const {
    return std::span(tensors_).subspan(std::size_t{layer} * block_.tensors, block_.tensors);
  }

 private:
  Layout layout_;
  Block block_;
  std::vector<std::uint8_t*> tensors_;
  std::uint32_t blocks_;
  std::uint64_t stride_bytes_;
};

// One layer of one side.
struct Side {
  const Block& block;
  std::span<std::uint8_t* const> tensors;
  std::uint64_t stride;
};

// Pairs of the source's plane and the sink's.
using Planes = std::span<const std::pair<std::uint32_t, std::uint32_t>>;

// A function that carries out the moves of one layer.
using Carry =
    std::function<void(const Side& source, const Side& sink, std::span<const Move> moves, Heads heads, Planes planes)>;
void carry_on_host(const Side& source, const Side& sink, std::span<const Move> moves, Heads heads, Planes planes);

// Copies tokens of some layers from one pool to another, all heads that both hold. Returns the bytes copied.
std::uint64_t convert(const Pool& source, const Table& source_table, const Pool& sink, const Table& sink_table,
                      Tokens range, std::uint32_t first_layer, std::uint32_t layers,
                      const Carry& carry = &carry_on_host);

// The same for one tensor of the source alone, numbered as in its pool: if K and V are split, K or V of one layer.
// The source's other tensors are not read.
std::uint64_t convert_tensor(const Pool& source, const Table& source_table, const Pool& sink, const Table& sink_table,
                             Tokens range, std::uint32_t tensor);

// Writes a chunk to the wire; `out` has exactly `chunk_bytes`.
void gather(const Pool& pool, const Table& table, const Chunk& chunk, std::span<std::uint8_t> out,
            const Carry& carry = &carry_on_host);

// Reads a chunk from the wire.
void scatter(const Pool& pool, const Table& table, const Chunk& chunk, std::span<const std::uint8_t> in,
             const Carry& carry = &carry_on_host);

}  // namespace baton::layout
